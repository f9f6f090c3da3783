"""`serve`: what can be asked, the verdict on arms of a stand-in server, and its exit status."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from support.studies import CPU

from attnlib import cli
from attnlib.lab import serve as serving
from attnlib.studies.serving import engine, rounds
from attnlib.studies.serving.measure import Answer, reduced
from attnlib.studies.splits.traffic import batches

TESTS = Path(__file__).resolve().parents[1]
CAPTURED = TESTS.parent / "data" / "captures" / "engine.jsonl"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A command over the stand-in server, on a machine that says to have a GPU."""
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    monkeypatch.setenv("ATTNLIB_LOCKS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("STAND_IN_TOKEN_S", "0.01")
    stand_in = replace(engine.ENGINES["sglang"], module="support.stand_in_server")
    monkeypatch.setitem(engine.ENGINES, "sglang", stand_in)
    monkeypatch.setattr(serving, "mode", lambda: "live")
    monkeypatch.setattr(serving, "describe", lambda device: CPU)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = min(probe.getsockname()[1], 60_000)
    return [
        "serve",
        f"--model={model}",
        "--arm=default",
        "--arm=splits=bounded",
        "--traffic=40+10x2",
        "--output=40",
        "--turns=2",
        "--rounds=3",
        f"--port={port}",
        "--together",
    ]


def steady(ratio):
    """A measurement in which a token takes 10 ms, or `ratio` of it by the second arm."""

    def measure(server, case, memory, **how):
        gap = 0.01 * (ratio if server.arm.variables else 1.0)
        answers = []
        for request in case.requests():
            at = tuple(gap * (1 + count) for count in range(request.output))
            gaps = (gap,) * (request.output - 1)
            answers.append(Answer(request, 0.0, tuple(range(request.output)), at, gaps))
        return reduced(case, answers) | {"reported_backend": server.runs()}

    return measure


@pytest.mark.parametrize(
    ("ratio", "outcome", "status"),
    [(0.4, "not slower", 0), (1.01, "not slower", 0), (2.0, "slower", 1)],
)
def test_a_verdict_by_rounds_and_its_status(words, monkeypatch, capsys, ratio, outcome, status):
    monkeypatch.setattr(rounds, "measure", steady(ratio))
    assert cli.main([*words, "--json"]) == status
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["outcome"] == outcome
    assert {row["metric"] for row in found["rows"]} == set(serving.JUDGED)
    assert "rounds: 3, arms: 2, loads: 1; about " in err.splitlines()[0]
    assert err.count("tokens/s") == 6
    assert cli.main(words) == status  # from the records of before
    out, err = capsys.readouterr()
    assert "tokens/s" not in err
    assert f"sglang is the base: {outcome}" in out
    assert out.rstrip().splitlines()[-1].startswith(f"{outcome}: sglang splits=bounded takes ")


def test_one_round_decides_nothing(words, capsys):
    assert cli.main([*words, "--rounds=1"]) == 3
    assert "not decided: " in capsys.readouterr().out


def test_a_server_that_fails_is_one_line(words, monkeypatch, capsys):
    monkeypatch.setenv("STAND_IN", "ends at once")
    assert cli.main(words) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith(
        "attnlib serve: the server 'default' ended with status 1; its log ends"
    )


def test_without_a_gpu_it_says_how_long_it_would_take(capsys):
    words = ["serve", "--model=llama-3.1-8b", "--arm=default", "--arm=splits=bounded"]
    assert cli.main(words) == cli.UNDECIDED
    assert "on a CUDA GPU, where it takes about 12 minutes; none is here" in capsys.readouterr().err


def test_a_dry_run_says_what_it_would_start_and_starts_nothing(capsys, monkeypatch):
    monkeypatch.setattr(serving, "mode", lambda: "live")
    monkeypatch.setattr(serving, "drive", lambda *asked: pytest.fail("it started a server"))
    words = ["serve", "--model=llama-3.1-8b", "--arm=default", "--arm=splits=bounded"]
    words += ["--traffic=512x40+100000", "--open=60", "--options=--page-size 1", "--dry-run"]
    assert cli.main(words) == 0
    sizes, model, default, bounded, closed, opened = capsys.readouterr().out.splitlines()
    assert sizes == "rounds: 4, arms: 2, loads: 2; about 15 minutes"
    assert model == "model llama-3.1-8b: a folder with random weights, made for the run"
    assert default == (
        "server default: python -m sglang.launch_server --model-path llama-3.1-8b "
        "--host 127.0.0.1 --port 30000 --load-format dummy --nccl-port 30001 "
        "--skip-tokenizer-init --incremental-streaming-output --page-size 1"
    )
    assert bounded.startswith("server splits=bounded: ATTNLIB_SGLANG_SPLITS=bounded python -m ")
    assert "--port 31000" in bounded
    load = "41 clients x 3 requests, prompts of 512 to 100,000 tokens, 256 to make"
    assert (closed, opened) == (f"closed loop: {load}", f"open loop at 60 %: {load}")


def test_a_dry_run_says_that_a_plan_of_flashinfer_changes_no_other_backend(capsys):
    words = ["serve", "--engine=vllm", "--model=llama-3.1-8b", "--arm=default", "--dry-run"]
    words.append("--arm=decode=planned")
    said = "decode=planned changes FlashInfer's decode alone"
    assert cli.main(words) == 0
    assert capsys.readouterr().out.count(said) == 1
    assert cli.main([*words, "--options=--attention-backend FLASHINFER"]) == 0
    assert said not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--arm=default"], "arm must be given twice or more"),
        (["--arm=default", "--arm=split=1"], "arm must be one of"),
        (["--arm=default", "--arm=splits=1", "--traffic=foo"], "traffic must be chat, kimi"),
        (["--arm=default", "--arm=splits=1", "--traffic=azure-code:7"], "must have 16, 32, 64"),
        (["--arm=default", "--arm=splits=1", "--model=nope"], "model must be a folder with config"),
        (["--arm=default", "--arm=splits=1", "--traffic=nope.csv"], "No such file"),
    ],
)
def test_what_cannot_be_asked_is_refused(capsys, more, says):
    assert cli.main(["serve", "--model=llama-3.1-8b", *more]) == 2
    assert says in capsys.readouterr().err


def test_the_load_is_real_traffic_a_log_or_captured_steps(tmp_path):
    chat, _ = serving.lengths_of("chat")
    first = next(b for b in batches() if (b.trace, b.in_flight) == ("azure-conversation", 32))
    assert chat == first.tokens
    log = tmp_path / "log.csv"
    log.write_text("ContextTokens,GeneratedTokens\n100,20\n300,40\n")
    assert serving.lengths_of(str(log)) == ([100, 300], 30)
    log.write_text("prompt\n0\n")
    with pytest.raises(ValueError, match="prompt of .* must be tokens above 0, got '0'"):
        serving.lengths_of(str(log))
    log.write_text("other\n1\n")
    with pytest.raises(ValueError, match="must have a column of prompt or input_tokens"):
        serving.lengths_of(str(log))
    assert len(serving.lengths_of(str(CAPTURED))[0]) == 40
    asked = serving.Asked(model="m", arms=(), traffic="512x2+9", loads=(60, 90))
    assert [case.load for case in serving.cases_of(asked, "m")] == [0, 60, 90]
