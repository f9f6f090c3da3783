"""What measures what LOG predicts: rows kept whole, the judge of the advice, and the hunts."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import triton.language as tl
from support import hunts, judge_advice, rounds
from support.rounds import TIME_IS_OVER, Process
from support.sglang_code import wheel_of
from support.studies import SPEC, hand_made

from attnlib.core.backends import unsupported, vllm
from attnlib.measure.calls.cases import read_case
from attnlib.measure.calls.decode.case import DecodeCase

GPU = {"gpu": "NVIDIA H200", "gpu_id": "0badcafe"}
CALLS = ("first", "endless", "fatal", "wrong", "last")
KEYS = tuple({"call": call} for call in CALLS)
SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
from support import rounds

def measure(key):
    if key["call"] == "endless" and "PATIENT" not in os.environ:
        time.sleep(60)
    if key["call"] == "fatal":
        os.kill(os.getpid(), signal.SIGKILL)
    if key["call"] == "wrong":
        raise ValueError("nonsense")
    return {{"status": "ok", "run_us": (3.0, 1.0, 2.0), "kernels": ()}}

rounds.identify_gpu = lambda: {GPU}
process = rounds.Process(tuple({KEYS}))
sys.exit(rounds.measure_left(process, Path(sys.argv[1]), measure))
"""
COLUMNS = {"status", "us", "samples_us", *GPU, "versions", "date"}


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    monkeypatch.setattr(rounds, "identify_gpu", lambda: GPU)


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """The process that starts others takes this for a machine with a GPU."""
    monkeypatch.setattr(rounds.torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ATTNLIB_LOCKS", str(tmp_path))


def rows_of(path):
    return {row["call"]: row for row in map(json.loads, path.read_text().splitlines())}


def measured(keys, path, measure, monkeypatch):
    """The rows that a process writes, in this one."""
    monkeypatch.setattr(rounds.threading, "Thread", Mock())
    assert rounds.measure_left(Process(tuple(keys)), path, measure) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- rows


@pytest.mark.slow
def test_a_run_that_was_stopped_loses_one_row_and_goes_on_where_it_was(
    on_a_gpu, tmp_path, monkeypatch, capfd
):
    out = tmp_path / "rows.jsonl"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    command = [sys.executable, str(script), str(out)]

    def killed_after_a_row(limit_s, command, **options):
        assert 0 < limit_s <= 9
        with subprocess.Popen(command, **options) as process:
            while not rounds.rows_in(out):
                assert process.poll() is None
                time.sleep(0.02)
            process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "ended_within", killed_after_a_row)
        assert rounds.run(command, [Process(KEYS)], out, 9) == TIME_IS_OVER
    assert "9 s are over; the same command measures the rest" in capfd.readouterr().out
    first = rows_of(out)
    assert [*first] == ["first"]
    assert first["first"].keys() == {"call", *COLUMNS}
    assert first["first"]["us"] == 2.0
    with out.open("a") as file:
        file.write('{"call": "endl')  # the writer was killed in the middle

    monkeypatch.setenv("PATIENT", "1")
    assert rounds.run(command, [Process(KEYS)], out, 60) == 0
    rows = rows_of(out)
    assert [*rows] == [*CALLS]
    assert rows["first"] == first["first"]
    assert (rows["fatal"]["status"], rows["fatal"]["reason"]) == ("crashed", "signal 9")
    assert (rows["wrong"]["status"], rows["wrong"]["reason"]) == ("error", "ValueError: nonsense")
    assert rows["last"]["us"] == 2.0
    assert rounds.run(["must not start"], [Process(KEYS)], out, 1) == 0


def test_rows_of_another_gpu_do_not_count_and_a_process_that_fails_ends_the_run(on_a_gpu, tmp_path):
    out = tmp_path / "rows.jsonl"
    for key in KEYS:
        rounds.add(out, key | GPU | {"gpu_id": "another"})
    assert len(rounds.left(Process(KEYS), out, GPU["gpu_id"])) == len(KEYS)
    command = [sys.executable, "-c", "raise SystemExit(2)"]
    with pytest.raises(SystemExit, match="failed with exit status 2"):
        rounds.run(command, [Process(KEYS)], out, 30)


def test_without_a_gpu_nothing_is_started(without_gpu, tmp_path):
    with pytest.raises(SystemExit, match="must be measured on a CUDA GPU, none is here"):
        rounds.run(["must not start"], [Process(KEYS)], tmp_path / "rows.jsonl", 1)


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (judge_advice, "", "the following arguments are required: verb"),
        (judge_advice, "measure out", "one of the arguments --seconds is required"),
        (judge_advice, "measure out --seconds 0", "argument --seconds: must be above 0, got 0"),
        (judge_advice, "judge", "the following arguments are required: out"),
        (hunts, "caps --seconds 9", "the following arguments are required: out"),
        (hunts, "caps out --seconds x", "argument --seconds: invalid seconds value: 'x'"),
        (hunts, "nope", "argument lane: invalid choice: 'nope'"),
        (hunts, "offsets out --seconds 9", "offsets must have --overlay of flashinfer-python=="),
        (hunts, "offsets out --seconds 9 --overlay a", "--overlay must be NAME==VERSION=DIR"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(script, arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.asked(arguments.split())
    *_, said = capsys.readouterr().err.splitlines()
    assert words in said


def test_what_cannot_be_measured_is_refused_and_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(hunts, "unavailable", lambda name: f"{name} is not here")
    out = tmp_path / "rows.jsonl"
    words = "caps cannot be measured here: vllm-flash-attn-3 is not here"
    with pytest.raises(SystemExit, match=words):
        hunts.main(["caps", str(out), "--seconds", "9"])
    monkeypatch.setattr(hunts, "unavailable", lambda name: "")
    with pytest.raises(SystemExit, match="out must be in a folder to write to"):
        hunts.main(["gather", str(out / "rows.jsonl"), "--seconds", "9"])
    assert not out.exists()


# ---- the judge of the advice


@pytest.mark.slow
def test_the_drawn_calls_are_of_layers_that_no_record_has(published_records):
    drawn = judge_advice.drawn_calls(judge_advice.SEED)
    assert drawn == judge_advice.frozen_calls(), "unseen_calls.txt is not what the seed draws"
    layers = {case.spec for case in drawn}
    assert len({*drawn}) == 64 and len(layers) == judge_advice.LAYERS
    assert layers.isdisjoint(judge_advice.recorded_layers())
    assert {layer.page_size for layer in layers} == {1, 16, 64}
    for layer in layers:
        assert 1 <= layer.group_size <= 16
        mine = [case for case in drawn if case.spec == layer]
        assert len(mine) == 4 and any(case.lengths == "one_long" for case in mine)
        assert sum("+" in case.lengths for case in mine) == 2
        able = [name for name in judge_advice.BACKENDS if not unsupported(name, layer)]
        assert {"flashinfer-fa2", "flash-attn-3-precomputed"} <= {*able}
    assert judge_advice.drawn_calls("another seed") != drawn


def test_all_backends_of_a_call_stand_together_and_each_module_is_compiled_once():
    calls = judge_advice.frozen_calls()
    keys = judge_advice.process_of(calls, [*judge_advice.BACKENDS]).keys
    assert [*dict.fromkeys(key["call"] for key in keys)] == [case.label for case in calls]
    modules = judge_advice.modules_of(calls, [*judge_advice.BACKENDS])
    names = [name for name, _ in modules]
    assert "vllm-flash-attn-3" not in names and names.count("flashinfer-fa2") == 1
    layers = [read_case(text).spec for name, text in modules if name == "flashinfer-xqa"]
    shapes = {(layer.group_size, layer.page_size) for layer in layers}
    assert len(shapes) == len(layers) > 4
    assert {page for _, page in shapes} == {16, 64}


def test_backends_that_are_not_here_are_named_and_one_must_be(monkeypatch, capsys):
    only = {"flashinfer-xqa": ""}
    monkeypatch.setattr(judge_advice, "unavailable", lambda name: only.get(name, "no library"))
    assert judge_advice.runnable() == ["flashinfer-xqa"]
    assert "not here: vllm-flash-attn-3: no library\n" in capsys.readouterr().err
    only.clear()
    with pytest.raises(SystemExit, match="a backend must be able to run here"):
        judge_advice.runnable()


def test_a_row_of_the_judge_has_its_columns_by_a_timer_of_the_host(tmp_path, monkeypatch):
    tiny = DecodeCase(SPEC, 2, 12, "ragged")
    keys = judge_advice.process_of([tiny], ["sdpa"]).keys
    measure = judge_advice.measurer("cpu", "host")
    (row,) = measured(keys, tmp_path / "rows.jsonl", measure, monkeypatch)
    assert row.keys() >= {"call", "backend", "oracle_error", "plan_us", "kernel_family", *COLUMNS}
    assert (row["call"], row["status"]) == (tiny.label, "ok")
    assert judge_advice.call_once("sdpa", tiny.label, "cpu").endswith(": ok")
    assert "FAILED: flashinfer-fa2 cannot run" in judge_advice.call_once(
        "flashinfer-fa2", tiny.label, "cpu"
    )


@pytest.mark.slow
def test_calls_that_are_whole_are_judged_once(tmp_path, monkeypatch, published_records, capsys):
    capture = Path(shutil.copy(judge_advice.CAPTURE, tmp_path))
    before = judge_advice.rows_in(capture)
    before = [row for row in before if row.get("judged", 1) < judge_advice.JUDGED]
    capture.write_text("".join(f"{json.dumps(row)}\n" for row in before))
    monkeypatch.setattr(judge_advice, "CAPTURE", capture)
    out = tmp_path / "rows.jsonl"
    first, second, third, *_ = judge_advice.frozen_calls()
    names = ("flashinfer-fa2", "flashinfer-fa3", "flash-attn-3-precomputed")
    for call in (first, second, third):
        for number, name in enumerate(names):
            key = {"call": call.label, "backend": name}
            if (call, name) == (second, "flashinfer-fa3"):
                rounds.add(out, key | GPU | {"status": "error", "reason": "nonsense"})
            elif (call, name) != (third, "flashinfer-fa3"):
                rounds.add(out, key | GPU | {"status": "ok", "us": 10.0 + number})
    rounds.add(out, key | GPU | {"gpu_id": "another", "status": "ok", "us": 1.0})
    assert judge_advice.judge(out) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[0].startswith('    ("flashinfer==0.7.2", 2): (1, 0.')
    assert told.out.splitlines()[1].startswith('    ("sglang==0.5.23", 2): (2, 0.')
    assert "2 of 64 calls are whole" in told.err and "left out: 1 rows of GPU another" in told.err
    assert f"no time: {second.label}, flashinfer-fa3: nonsense" in told.err
    *kept, new, newest = judge_advice.rows_in(capture)
    assert kept == before
    assert (new["call"], new["judged"], new["gpu"]) == (first.label, 2, "h200")
    assert newest["us"] == {"flashinfer-fa2": 10.0, "flash-attn-3-precomputed": 12.0}
    with pytest.raises(SystemExit, match="must have no calls of judgement 2"):
        judge_advice.judge(out)


# ---- hunts


def test_rounds_go_forth_and_back_and_arms_that_are_apart_have_their_variables():
    first, second, *_ = hunts.processes_of("caps", {})
    assert [key["arm"] for key in first.keys[:2]] == ["32", "128"]
    assert second.keys == tuple(key | {"round": 1} for key in first.keys[::-1])
    overlays = {f"flashinfer-python==0.6.{n}": Path(f"of-{n}") for n in (17, 18)}
    processes = hunts.processes_of("offsets", overlays)
    paths = [process.environment["PYTHONPATH"].split(os.pathsep)[0] for process in processes]
    assert paths == ["of-18", "of-17", "of-17", "of-18"] * 2
    assert [len(process.keys) for process in processes] == [8] * 8
    variables = [process.environment for process in hunts.processes_of("traced", {})]
    assert variables[:3] == [{"TEARDOWN_CUPTI": "1"}, {"TEARDOWN_CUPTI": "0"}, {}]
    assert variables[3:6] == variables[2::-1]


def test_the_calls_of_the_lanes_are_those_that_the_log_predicts(tmp_path):
    for lane in hunts.LANES.values():
        assert len({*lane.calls}) == len(lane.calls)
        for call in lane.calls:
            if "requests" not in call:
                assert "lens=" in read_case(call).label
    assert len(hunts.LANES["offsets"].calls) == 8
    folders = [hand_made(tmp_path / n, "flashinfer-python", n) for n in ("0.6.17", "0.6.18")]
    given = [f"--overlay=flashinfer-python=={folder.name}={folder}" for folder in folders]
    options = hunts.asked(["offsets", "out", "--seconds", "9", *given])
    assert [*options.overlays.values()] == folders


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(hunts, "DEVICE", "cpu")
    monkeypatch.setattr(hunts, "TIMER", "host")
    monkeypatch.setattr(hunts, "sm_count", lambda device: 132)
    hunts.subject.cache_clear()
    yield
    hunts.subject.cache_clear()


def test_a_gather_is_right_and_its_row_has_the_columns(on_cpu, tmp_path, monkeypatch):
    key = {"lane": "gather", "round": 0, "arm": "24", "call": "3 requests"}
    (row,) = measured([key], tmp_path / "rows.jsonl", hunts.measure_gather, monkeypatch)
    assert row.keys() >= {*key, "oracle_error", *COLUMNS}
    assert (row["status"], row["oracle_error"]) == ("ok", 0.0)


def test_an_arm_is_the_cap_of_splits_or_the_release_that_is_asked_for(monkeypatch):
    asked = Mock(return_value={"status": "ok"})
    monkeypatch.setattr(hunts, "subject", lambda: SimpleNamespace(measure=asked))
    monkeypatch.setattr(vllm, "MOST_SPLITS", 32)
    key = {"arm": "128", "call": hunts.ONE_REQUEST[0]}
    hunts.measure_caps(key)
    assert vllm.MOST_SPLITS == 128
    hunts.measure_offsets(key | {"arm": "0.6.17"})
    (capped,), (released,) = (call.args for call in asked.call_args_list)
    assert (capped.backend, capped.release) == ("vllm-flash-attn-3", "")
    assert (released.backend, released.release) == ("flashinfer-auto", "0.6.17")


@pytest.fixture
def sglangs_kernels(monkeypatch):
    """SGLang's own Triton kernels, out of its wheel, over the few names that they use."""
    wheel = wheel_of("0.5.23")
    packages = ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention")
    for name in (*packages, "sglang.srt", "sglang.srt.utils", "sglang.srt.environ"):
        module = ModuleType(name)
        module.__path__ = [str(wheel / name.replace(".", "/"))] if name in packages else []
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("is_hip", "is_gfx95_supported", "is_gfx1250_supported", "get_device_core_count"):
        setattr(sys.modules["sglang.srt.utils"], name, lambda *_: 0)
    sys.modules["sglang.srt.environ"].envs = None
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(tl.extra.cuda, name, lambda: None)
    yield
    for name in [name for name in sys.modules if name.startswith(f"{packages[-1]}.")]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning:triton")
@pytest.mark.parametrize("text", ["heads=8/2 lens=300,51x2", "heads=4/4 lens=200,3"])
def test_sglangs_own_triton_decode_is_called_as_it_must_be(on_cpu, sglangs_kernels, text):
    # The interpreter has no bfloat16.
    case = read_case(f"dtype=float16 page=1 {text}")
    work, judge = hunts.subject().prepared(case)
    outputs = [hunts.triton_call(work, splits)().clone() for splits in (8, 32)]
    assert all(judge.check(output).passed for output in outputs)


def test_host_times_are_taken_before_and_after_traces(on_cpu, tmp_path, monkeypatch):
    backend = Mock()
    traced = Mock()
    monkeypatch.setattr(hunts, "create", lambda *_, **__: backend)
    monkeypatch.setattr(hunts, "build_workload", Mock())
    monkeypatch.setattr(hunts, "trace_kernels", traced)
    keys = [
        {"lane": "traced", "arm": arm, "call": "heads=8/2 lens=9"} for arm in ("X=1", "no traces")
    ]
    rows = measured(keys, tmp_path / "rows.jsonl", hunts.measure_traced, monkeypatch)
    assert traced.call_count == hunts.TRACES_BEFORE[-1]
    for row in rows:
        assert row["traces_before"] == [*hunts.TRACES_BEFORE]
        assert len(row["plan_us"]) == len(row["launch_us"]) == len(hunts.TRACES_BEFORE)


def test_show_compares_the_rounds_that_both_arms_have(capsys):
    rows = []
    for number in range(3):
        for arm, us in (("32", 15.0), ("128", 10.0)):
            key = {"lane": "caps", "round": number, "arm": arm, "call": hunts.ONE_REQUEST[0]}
            rows.append({**key, **GPU, "status": "ok", "us": us + number / 100})
    rows.append({**rows[0], "round": 3, "us": 99.0})
    rows.append({**rows[0], "arm": "128", "round": 3, "status": "error", "reason": "nonsense"})
    traced = {"lane": "traced", "arm": "X=1", "call": "", **GPU, "status": "ok"}
    times = {"traces_before": [0, 6], "plan_us": [100.0, 110.0], "launch_us": [6.0, 8.0]}
    hunts.show([*rows, *({**traced, **times, "round": number} for number in range(3))])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "caps, NVIDIA H200 0badcafe"
    assert told[1].startswith(f"  {hunts.ONE_REQUEST[0]}: 32 over 128: 1.500 (1.")
    assert told[1].endswith("slower, 3 rounds; 15.01 over 10.01 us")
    assert told[2] == f"  no time: round 3, 128, {hunts.ONE_REQUEST[0]}: nonsense"
    assert "X=1, plan_us after 6 over before: 1.100" in told[4]
    assert "X=1, launch_us after 6 over before: 1.333" in told[5]
