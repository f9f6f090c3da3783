"""Engines in the worker: real processes with a stand-in inside, and whatever can go wrong."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.records import measure as measured

from attnlib.kinds.base import Bench
from attnlib.kinds.engine import measure
from attnlib.kinds.engine.case import ARMS, SIDE_BY_SIDE, EngineCase
from attnlib.kinds.engine.group import EngineEndedError, EngineGroup
from attnlib.kinds.engine.measure import EngineSubject
from attnlib.kinds.item import Item
from attnlib.run import rows
from attnlib.run.frame import frame_of

ROOT = Path(__file__).resolve().parents[2]
CASE = EngineCase("llama-3.1-8b", 2, 300, output_len=3)
ENGINE = """
import json, os, subprocess, sys, time
FUSED, folder = "sglang-fused", json.load(open(sys.argv[1]))["model"]
assert json.load(open(folder + "/config.json"))["num_hidden_layers"] in (32, 64)
with open(os.environ["STARTS"], "a") as file:
    set_here = (value for name, value in os.environ.items() if name.startswith("ATTNLIB_SGLANG_"))
    file.write(" ".join(set_here) + "\\n")
print("loading", file=sys.stderr)
{start}
print('{{"ready": true}}', flush=True)
for line in sys.stdin:
    question = json.loads(line)
    {case}
    us = [10.0 + n for n in range(question["steps"] - (question["timer"] == "ahead"))]
    result = {{"error": 0.01, "digest": "same", "run_us": us}}
    with open(os.environ["STARTS"] + ".asked", "a") as file:
        file.write(question["timer"] + "\\n")
    if question["timer"] == "profiler":
        result["kernels"] = [{{"name": "FlashAttnFwdSm90", "launches": 32.0, "gpu_us": 3.0}}]
    arms = {{arm: dict(result) for arm in question["arms"]}}
    words = [pair for arm in question["arms"].values() for pair in arm.items()]
    calls = {{f"{{kind}}={{value}}": 1 for kind, value in words}}
    print(*(f"attnlib runs {{word}}" for word in calls), sep="\\n", file=sys.stderr)
    {answer}
    print(json.dumps({{"arms": arms, "calls": calls}}), flush=True)
"""
CHILD = "import time; time.sleep(100)"
LEAVES = f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True); "
LEAVES += "open(os.environ['CHILD'], 'w').write(str(child.pid))"


def gone(pid, within=5.0):
    """Whether a process ends, or has ended and nobody has question how."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def subject(monkeypatch, tmp_path):
    """A subject whose engine is the stand-in with these lines of code in it."""
    made = []

    monkeypatch.setattr(measure.torch.cuda, "device_count", lambda: 2)

    def make(device="cuda", release="0.5.11", **code):
        path = tmp_path / "engine.py"
        path.write_text(ENGINE.format(**{"start": "", "case": "", "answer": ""} | code))
        monkeypatch.setattr(measure, "COMMAND", (sys.executable, str(path)))
        monkeypatch.setattr("attnlib.engines.points.installed_version", lambda name: release)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("ATTNLIB_SGLANG_CAPTURE", "a user's own")
        for name in ("STARTS", "CHILD"):
            monkeypatch.setenv(name, str(tmp_path / name))
        made.append(EngineSubject(Bench(device, {}, {})))
        return made[-1]

    yield make
    for engines in made:
        engines._close()


def starts(tmp_path):
    """The variables of each engine that was started."""
    return (tmp_path / "STARTS").read_text().splitlines()


def item(backend="sglang", timer="host", case=CASE):
    return Item(backend, timer, case)


def test_one_engine_serves_all_arms_that_take_turns_and_all_cases(subject, tmp_path):
    engines = subject()
    for case in (CASE, replace(CASE, batch_size=4)):
        for arm in CASE.in_turns("sglang"):
            fields = engines.measure(item(arm, case=case))
            assert (fields["status"], fields["run_us"]) == ("ok", (10.0, 11.0, 12.0))
            word = f"{ARMS[arm].variable}={ARMS[arm].value}"
            assert fields["reported_backend"] == f"{word}, in turns, outputs same"
            assert (fields["oracle_error"], fields["oracle_budget"]) == (0.01, measure.BUDGET)
            assert engines.measure(item(arm, "ahead", case))["run_us"] == (10.0, 11.0)
    assert starts(tmp_path) == ["sglang once"]
    asked = (tmp_path / "STARTS.asked").read_text().split()
    assert asked == ["host", "ahead"] * 2, "an arm after another, each timer is asked once"


def test_a_record_is_published_with_every_step_and_loaded_with_them(subject, make_record):
    fields = subject().measure(item(timer="profiler"))
    table = rows.table_of([make_record(item=item(timer="profiler"), **fields)])
    assert rows.decode(rows.encode(table)).equals(table)
    (row,) = frame_of(table, rows.items_of(table)).itertuples()
    assert (row.steps_us, row.kernels[0].launches, row.model) == (
        (10.0, 11.0, 12.0),
        32.0,
        CASE.model,
    )
    assert measured(item()).status == "refused", "no SGLang in this process"


def test_each_attention_backend_and_each_arm_of_an_offline_engine_has_a_process(subject, tmp_path):
    engines = subject()
    for arm in ("sglang-layer", "sglang-guarded", "sglang-fa2", "sglang-planned"):
        assert engines.measure(item(arm))["status"] == "ok"
    offline = replace(CASE, driver="offline")
    fields = [engines.measure(item(arm, case=offline)) for arm in ("sglang", "sglang-eager")]
    assert starts(tmp_path) == ["sglang layer", "sglang once raise", "fa2", "sglang", "eager"]
    assert [one["status"] for one in fields] == ["incorrect"] * 2, "its error counts tokens"
    assert fields[0]["reported_backend"] == "metadata=sglang, outputs same"


def test_a_traced_process_is_not_timed_again(subject, tmp_path):
    engines = subject()
    assert engines.measure(item())["kernels"] == ()
    traced = engines.measure(item(timer="profiler"))
    assert (traced["kernel_family"], traced["kernels"][0]["launches"]) == ("flash-attn-3", 32.0)
    assert len(starts(tmp_path)) == 1
    assert engines.measure(item(case=replace(CASE, batch_size=4)))["status"] == "ok"
    assert len(starts(tmp_path)) == 2


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ({"answer": "arms[FUSED]['digest'] = 'other'"}, "incorrect", "bit by bit, same, got oth"),
        ({"answer": "arms[FUSED]['error'] = float('inf')"}, "incorrect", "error inf over budget"),
        ({"answer": 'print(\'{"refused": "too long"}\', flush=True); continue'}, "refused", "long"),
        ({"answer": "arms[FUSED]['run_us'] = []"}, "refused", "the host must run ahead of"),
        ({"case": "raise MemoryError('no room')"}, "error", "status 1; MemoryError: no room$"),
        ({"case": "print('ValueError: first\\nlast', file=sys.stderr); sys.exit(1)"},)
        + ("error", "status 1; ValueError: first / last"),
        ({"case": "os.kill(os.getpid(), 9)"}, "crashed", "status 137; loading"),
        ({"case": "time.sleep(60)"}, "timeout", "no answer after 0.5 s; loading"),
        ({"start": "raise SystemExit('attnlib: sglang must be')"}, "error", "attnlib: sglang must"),
        ({"start": "time.sleep(60)"}, "timeout", "no answer after"),
    ],
)
def test_what_goes_wrong_in_an_engine_is_a_record_that_says_how(
    subject, monkeypatch, code, status, reason
):
    monkeypatch.setattr(measure, "START_S", 0.3 if "start" in code and status == "timeout" else 20)
    monkeypatch.setattr(measure, "CASE_S", 0.5 if status == "timeout" else 20)
    timer = "ahead" if "run_us" in str(code) else "host"
    fields = subject(**code).measure(item("sglang-fused", timer))
    assert fields["status"] == status and not fields.get("run_us")
    assert re.search(reason, fields["reason"]), fields["reason"]


def test_an_engine_that_fails_a_case_is_started_anew_and_one_that_cannot_start_is_not(
    subject, tmp_path
):
    engines = subject(case="if question['lens'][0] == 300: sys.exit(3)")
    assert engines.measure(item())["status"] == "error"
    assert engines.measure(item(case=replace(CASE, kv_len=200)))["status"] == "ok"
    assert len(starts(tmp_path)) == 2
    broken = subject(start="sys.exit(4)")
    assert {
        broken.measure(item(arm))["status"] for arm in (*SIDE_BY_SIDE["fa3"], "sglang-layer")
    } == {"error"}
    assert len(starts(tmp_path)) == 4, "one for the schedule in layers, which is alone"


@pytest.mark.parametrize(
    ("machine", "tp", "reason"),
    [
        ({"release": ""}, 1, "or later, got none: pip install sglang==0.5.23"),
        ({"release": "0.5.10"}, 1, "must be 0.5.11 or later, got 0.5.10"),
        ({"device": "cpu"}, 1, "an engine needs a CUDA GPU"),
        ({}, 4, "tp 4 needs as many GPUs, here is 2"),
    ],
)
def test_what_a_machine_lacks_is_refused_and_nothing_is_started(
    subject, tmp_path, machine, tp, reason
):
    fields = subject(**machine).measure(item(case=replace(CASE, driver="offline", tp=tp)))
    assert fields["status"] == "refused" and re.search(reason, fields["reason"])
    assert not (tmp_path / "STARTS").exists()


def test_an_arm_that_did_not_run_is_an_error(subject):
    engines = subject(answer="calls = {'metadata=sglang': 5, 'metadata=eager': 0}")
    assert engines.measure(item())["status"] == "ok"
    with pytest.raises(RuntimeError, match="must have run metadata=eager, it counted"):
        engines.measure(item("sglang-eager"))


def test_unknown_arms_timers_and_another_release_are_named(subject):
    with pytest.raises(RuntimeError, match="release must be sglang 0.5.16, imported was none"):
        subject(release="0.5.17").measure(replace(item(), release="0.5.16"))
    with pytest.raises(ValueError, match="backend must be one of sglang, sglang-eager"):
        subject().measure(item("sglang-quick"))
    with pytest.raises(ValueError, match="timer must be one of host, ahead, profiler, got 'graph'"):
        subject().measure(item(timer="graph"))
    with pytest.raises(ValueError, match="must be host for the driver offline"):
        subject().measure(item(timer="profiler", case=replace(CASE, driver="offline")))


@pytest.mark.parametrize("how", ["closed", "crashed", "hangs", "ended"])
def test_nothing_that_an_engine_started_is_left_when_it_ends(subject, tmp_path, monkeypatch, how):
    monkeypatch.setattr(measure, "CASE_S", 0.5 if how == "hangs" else 20)
    end = {"crashed": "os.kill(os.getpid(), 11)", "hangs": "time.sleep(60)", "ended": "sys.exit()"}
    engines = subject(start=LEAVES, case=end.get(how, ""))
    engines.measure(item())
    engines._close()
    assert gone(int((tmp_path / "CHILD").read_text()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_engine_dies_with_the_worker_whose_group_is_killed(tmp_path, number):
    started = f"{LEAVES}; print('{{}}', flush=True); time.sleep(100)"
    code = (
        "import os, signal, sys, time; from attnlib.kinds.engine.group import EngineGroup\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"code = 'import os, subprocess, sys, time; ' + {started!r}\n"
        "EngineGroup((sys.executable, '-c', code), os.environ).answer(20)\n"
        "print('up', flush=True); time.sleep(100)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CHILD": str(tmp_path / "CHILD")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", code], env=env, **streams) as worker:
        assert worker.stdout.readline() == b"up\n"
        os.killpg(worker.pid, number)
    assert gone(int((tmp_path / "CHILD").read_text()))


def test_an_engine_that_closed_its_stdin_is_ended_too():
    code = "import os, time; os.close(0); print('{}', flush=True); time.sleep(100)"
    group = EngineGroup((sys.executable, "-c", code), {**os.environ, "PYTHONPATH": str(ROOT)})
    assert group.answer(20) == {}
    group.send({})
    group.send({})
    assert group.close() == 128 + signal.SIGKILL


def test_an_arm_that_the_log_of_an_offline_engine_does_not_tell_of_is_no_record(subject):
    engines, offline = subject(), item(case=replace(CASE, driver="offline"))
    engines.measure(offline)
    engines._engine.log = lambda: "attnlib is on: metadata=sglang"
    with pytest.raises(RuntimeError, match="must have run metadata=sglang, it counted"):
        engines.measure(offline)


def test_a_question_to_an_engine_that_has_ended_is_answered_by_its_end():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    group = EngineGroup((sys.executable, "-c", "pass"), env)
    group._guard.wait(20)
    group.send({})
    with pytest.raises(EngineEndedError, match="the engine ended, status 0; it said nothing"):
        group.answer(20)
