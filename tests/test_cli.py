"""The commands: help, exit status, and one line where something that may fail does."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.studies import SPEC, grid_of, hand_made, study_of

import attnlib
from attnlib import cli
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.run import cluster, store
from attnlib.run.jobs import StoppedError
from attnlib.run.study import Sweep
from attnlib.studies import STUDIES

ROOT = Path(__file__).resolve().parents[1]
CASES = tuple(DecodeCase(SPEC, 1, kv_len) for kv_len in (8, 9))
TINY = study_of(grid_of(*CASES), name="tiny")
TRACE = ROOT / "data" / "traces" / "fa3_decode.json.gz"
RIGHT = f"""
doctor --json
diagnose {TRACE} --shape heads=32/8,page_size=16,batch_size=16,kv_len=8192
diagnose {TRACE} {TRACE} --json
measure tiny --rounds 1 --overlay flashinfer-python==0.6.3=folder
measure tiny --gpus 2
publish tiny --machine h100
bisect --package flashinfer-python --good 0.5.3 --bad 0.6.3 --study tiny --case k8 --rounds 3
compare --base 0.6.3 --new 0.6.4 --model Llama-3.1-8B --tp 1 --lens 8192x16 --not-slower 2%
compare --base 0.6.4 --new 0.7.2.post1 --heads 8/1 --lens 9..99 --batch 64 --backend fa2
claims claim --json
report --out report.html
advise --model Llama-3.1-70B --tp 8 --lens 9..99x64 --engine sglang==0.5.23 --gpu h100
explain --library flashinfer==0.6.3 --mode decode --heads 32/8 --gpu sm90 --call graph
explain --diff flashinfer==0.6.13 flashinfer==0.7.2 --model Llama-3.1-8B --policy auto
repro split_cap
watch --base 0.5.22 --new 0.5.23
""".split("\n")[1:-1]
"""Command lines, to be spoiled."""
WRONG = (
    "",
    " ",
    "-1",
    "-",
    "--",
    "x" * 3000,
    "\u00e9",
    "\n",
    "a\nb",
    "\0",
    "/",
    ".",
    "../..",
    "folder/none",
    "nan",
    "1e9",
    "0x3",
    "3..1",
    "1..",
    "1,,2",
    "=",
    "a=b=c",
    "==",
    "flashinfer==",
    "vllm==9.9",
    "sglang==0.5.55",
    "8/0",
    "8/3",
    "x/y",
    "-2%",
    "\u0663",
    "heads=",
    "heads=1",
    "kv_len=nan",
    "Llama-3.1-8B at TP 3",
    "sm90,sm1",
    "--bogus",
    "[]",
)


MEASURABLE = [name for name, study in STUDIES.items() if not study.retired]


@pytest.fixture
def tiny(instant_jobs, without_gpu, monkeypatch):
    """A study of two cases that this machine measures at once, under the name `tiny`."""
    monkeypatch.setitem(STUDIES, "tiny", TINY)
    return instant_jobs


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_is_given_for_every_command_and_lists_the_studies(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert f"usage: python -m attnlib {command}" in text
    if command == "measure":
        listed = "".join(text.partition("studies:")[2].split()).split(",")
        assert listed == MEASURABLE


@pytest.mark.parametrize(
    "line, program",
    [
        ("", "attnlib"),
        ("profile", "attnlib"),
        ("measure", "attnlib measure"),
        ("measure --rounds x", "attnlib measure"),
        ("measure tiny --minutes 0", "attnlib measure"),
    ],
)
def test_a_command_line_that_is_no_command_is_one_line_that_points_to_help(line, program, capsys):
    assert cli.main(line.split()) == cli.USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{program}: ")
    assert said.endswith("; see --help")


def test_the_module_is_the_command_and_ends_in_silence_unread_or_at_ctrl_c(monkeypatch, capsys):
    command = [sys.executable, "-m", "attnlib"]
    pipe = subprocess.PIPE
    how = {"cwd": ROOT, "stderr": pipe, "text": True}
    done = subprocess.run([*command, "measure", "nope"], stdout=pipe, **how)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    read, write = os.pipe()
    os.close(read)
    command += [*EXPLAIN, "--gpu", "sm90"]
    done = subprocess.run(command, stdout=write, **how)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""
    # A shell's background job begins with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(cli.doctor, "examine", lambda: signal.raise_signal(signal.SIGINT))
    assert cli.main(["doctor"]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        TypeError("x"),
        AssertionError(),
        MemoryError(),
    ],
)
@pytest.mark.parametrize("name", ["compare", "diagnose", "measure"])
def test_a_crash_of_ours_has_a_status_of_its_own_and_is_no_verdict(
    name, error, monkeypatch, capsys
):
    def crash(**_):
        raise error

    monkeypatch.setitem(
        cli.COMMANDS,
        name,
        cli.COMMANDS[name]._replace(run=crash, arguments={}),
    )
    assert cli.main([name]) == cli.CRASHED == 5
    assert cli.CRASHED not in cli.OUTCOMES.values()
    out, err = capsys.readouterr()
    *lines, last = err.rstrip().splitlines()
    assert "Traceback" in lines[0]
    assert type(error).__name__ in err
    assert out == ""
    assert last.startswith(f"attnlib {name} crashed, which is a fault of attnlib and no result")


def test_a_package_that_cannot_be_loaded_is_a_crash_too():
    code = "import sys; sys.modules['attnlib.cli'] = None; from attnlib.__main__ import main; "
    code += "sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == cli.CRASHED and "import of attnlib.cli halted" in done.stderr


def test_help_lists_every_exit_status(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    listed = told.partition("exit status: ")[2]
    for status in (
        0,
        cli.FAILED,
        cli.USAGE,
        *cli.OUTCOMES.values(),
        cli.KNOWN_PROBLEM,
        cli.CHANGED,
        cli.CRASHED,
        130,
    ):
        assert re.search(rf"\b{status} (on|if|for|after) ", listed), status


@pytest.mark.parametrize("seed", range(20))
def test_a_malformed_argument_is_refused_in_one_line_and_nothing_is_written(
    seed, tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("attnlib.lab.report.build.execute", lambda path: int("a notebook's number"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    pick = random.Random(seed)
    for _ in range(10):
        words = shlex.split(pick.choice(RIGHT))
        words[pick.randrange(1, len(words))] = pick.choice(WRONG)
        statuses = (cli.USAGE, cli.UNDECIDED, cli.COMMANDS[words[0]].status)
        assert cli.main(words) in statuses, words
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert line.startswith(f"attnlib {words[0]}: ") and out == "", words
        assert [*tmp_path.iterdir()] == [], words


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nope"], f"one of {', '.join([*MEASURABLE, 'tiny'])}, got 'nope'"),
        (["engine_now"], STUDIES["engine_now"].retired),
        (["tiny", "--rounds", "0"], "rounds must be >= 1, got 0"),
        (["tiny", "--gpus", "all", "--rounds", "0"], "rounds must be >= 1, got 0"),
        (["tiny", "--gpus", "0"], "--gpus must be all or a number from 1, got '0'"),
        (["tiny", "--gpus", "all"], "with a CUDA GPU; none is here"),
        (["tiny", "--gpus", "1", "--dask", "one:1"], "must not be given together"),
        (["tiny", "--releases", "sglang==1,2"], "study 'tiny' has no backend of 'sglang'"),
        (["tiny", "--dask", "tcp://127.0.0.1:1"], attnlib.install_with("cluster")),
    ],
)
def test_what_cannot_be_measured_fails_in_one_line(fails, tiny, arguments, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert fails("measure", *arguments).endswith(words)


def test_a_record_that_is_lost_is_measured_again_and_one_that_is_broken_is_named(
    tiny, capsys, fails
):
    assert cli.main(["measure", "tiny"]) == 0
    path, *_ = store.measured_path("tiny", "cpu-test64").glob("*.json")
    path.unlink()
    capsys.readouterr()
    assert cli.main(["measure", "tiny"]) == 0
    assert capsys.readouterr().out.startswith("1 items measured")
    assert len(store.load("tiny", "cpu-test64")) == 2
    path.write_text('{"schema": 1\n')
    assert f"{path} must be a record" in fails("measure", "tiny")


@pytest.mark.parametrize(
    "options, measured",
    [
        ([], [[8, 9]]),
        (["--rounds", "2"], [[8, 9], [9, 8]]),
    ],
)
def test_measure_does_what_its_options_say_and_names_the_file_it_wrote(
    tiny, options, measured, monkeypatch, capsys
):
    monkeypatch.setenv("ATTNLIB_MACHINE", "cpu-test64")
    assert cli.main(["measure", "tiny", *options]) == 0
    assert [[item.case.kv_len for item in job.items] for job in tiny.jobs] == measured
    path = store.measured_path("tiny", "cpu-test64")
    count = len(sum(measured, []))
    assert capsys.readouterr().out == f"{count} items measured; records in {path}\n"


def test_measure_stops_after_its_minutes_and_goes_on_the_next_time(tiny, monkeypatch, capsys):
    now = Mock(return_value=0.0)
    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=now))

    def stopped(sweep, study):
        assert not sweep.stop()
        now.return_value = 31.0
        assert sweep.stop()
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(Sweep, "measure", stopped)
        assert cli.main(["measure", "tiny", "--minutes", "0.5"]) == 0
    words = "stopped after 0.5 minutes; the same command measures the rest\n"
    assert capsys.readouterr().out == words
    assert cli.main(["measure", "tiny", "--minutes", "0.5"]) == 0
    assert capsys.readouterr().out.startswith("2 items measured")


@pytest.mark.parametrize(
    "options, where",
    [
        (["--gpus", "2"], [{"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "7"}]),
        (["--dask", "tcp://one:1"], "tcp://one:1"),
    ],
)
def test_measure_on_several_gpus_names_the_folder_of_each(
    tiny, options, where, tmp_path, monkeypatch, capsys
):
    hand_made(tmp_path, "flashinfer-python", "0.6.3")
    asked = []

    def measure_on_gpus(study, sweep, client):
        asked.append((study.name, client, sweep.retry, sweep.overlays))
        return 3, ["gpu-x", "gpu-y"]

    monkeypatch.setattr(cluster, "asked_gpus", lambda text: ["5", "7"])
    monkeypatch.setattr(cluster, "local_cluster", lambda asked: nullcontext([*asked]))
    monkeypatch.setattr(cluster, "running_cluster", nullcontext)
    monkeypatch.setattr(cluster, "measure_on_gpus", measure_on_gpus)
    overlaid = replace(TINY, grids=(replace(TINY.grids[0], releases=("0.6.3",)),))
    monkeypatch.setitem(STUDIES, "tiny", overlaid)
    overlay = f"flashinfer-python==0.6.3={tmp_path}"
    assert cli.main(["measure", "tiny", "--retry", "--overlay", overlay, *options]) == 0
    assert asked == [("tiny", where, True, {"flashinfer-python==0.6.3": tmp_path})]
    folders = ", ".join(str(store.measured_path("tiny", name)) for name in ("gpu-x", "gpu-y"))
    assert capsys.readouterr().out == f"3 items measured; records in {folders}\n"


def test_a_data_folder_that_is_missing_is_an_error_and_no_empty_one(fails, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path / "none"))
    for line in ("doctor", "claims", "advise --heads 8/1 --lens 9", "publish tiny"):
        assert "ATTNLIB_DATA must name a folder, got" in fails(*line.split())
    assert not (tmp_path / "none").exists()


EXPLAIN = ("explain", "--library", "flashinfer==0.6.3", "--mode", "decode", "--heads", "32/8")


def test_explain_prints_the_choice_and_every_row_or_json_with_kernel_and_reasons(capsys):
    assert cli.main([*EXPLAIN, "--gpu", "sm90"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    short = rest[rest.index("") :]
    assert short[-1] == "Sources: --details"
    assert short[2] == "yes  fa3         a general function chooses, fa3 on Hopper"
    assert cli.main([*EXPLAIN, "--gpu", "sm90", "--details"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "flashinfer==0.6.3, decode on sm90, policy auto: fa3"
    assert any("[flashinfer-fa3-decode-auto]" in line for line in rest)
    rows = rest[rest.index("") :]
    assert rows[2].startswith("yes  fa3 ")
    assert rows[2].endswith("FlashInfer #2148")
    options = ["--library", "sglang==0.5.23", "--gpu", "sm80", "--call", "graph", "--json"]
    assert cli.main([*EXPLAIN, *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["backend"] == "flashinfer"
    assert answer["kernel"] == "fa2"
    assert answer["reasons"][-1]["source"].startswith("SGLang #18364")
    options = ["--library", "vllm==0.33.0", "--gpu", "sm90", "--call", "model=gemma4"]
    assert cli.main([*EXPLAIN, *options, "--call", "packed=no"]) == 0
    printed = capsys.readouterr().out
    assert (
        "makes no difference to its choice: packed\n" in printed
        and "\nfull (head_dim 512): " in printed
    )


def printed_by(capsys, line):
    cli.main(line.split())
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "line, same",
    [
        (
            "explain --library vllm==0.33.0 --backend FLASHINFER --gpu h100 --heads 32/8",
            "explain --engine vllm==0.33.0 --policy flashinfer --gpu h100 --heads 32/8",
        ),
        (
            "advise --library vllm==0.33.0 --backend FLASHINFER heads=32/8 lens=9x2",
            "advise --engine=vllm==0.33.0 --policy flashinfer heads=32/8 lens=9x2",
        ),
    ],
)
@pytest.mark.usefixtures("published_records")
def test_an_option_has_both_names_in_every_command(line, same, capsys):
    said = printed_by(capsys, line)
    assert said and printed_by(capsys, same) == said


@pytest.mark.usefixtures("published_records")
def test_advise_takes_a_fact_of_the_call(capsys):
    line = (
        "advise --library vllm==0.33.0,flashinfer==0.6.2 --backend FLASHINFER heads=32/8 lens=9x2"
    )
    assert "flashinfer-fa3-decode-auto" not in printed_by(capsys, f"{line} --call cubins=yes")
    assert "flashinfer-fa3-decode-auto" in printed_by(capsys, f"{line} --call cubins=no")


@pytest.mark.parametrize(
    "line, words",
    [
        ("advise --engine sgl==0.5.23 heads=32/8 lens=9x2", "advise: engine must be such as"),
        ("advise --library sgl==0.5.23 heads=32/8 lens=9x2", "advise: library must be such as"),
        ("advise --kv-dtype fp8 heads=32/8 lens=9x2", "say kv_dtype=... in 'heads=32/8 lens=9x2'"),
        ("advise --page-size 16 heads=32/8 lens=9x2", "say page=... in 'heads=32/8 lens=9x2'"),
        ("diagnose /nowhere.json", "trace must be a file, there is none at '/nowhere.json'"),
        ("diagnose data", "trace must be a file, got the folder 'data'"),
    ],
)
def test_an_error_says_what_to_type(line, words, fails):
    assert words in fails(*line.split())


def test_a_command_that_is_none_names_the_nearest(capsys):
    assert cli.main(["advice"]) == 2
    assert "got 'advice'; did you mean advise?; see --help" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"attnlib {attnlib.__version__}\n"
