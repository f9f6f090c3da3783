"""The worker, in this process and on the CPU: no check, no time, and every failure has a name."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from math import nan
from unittest.mock import Mock

import pytest
import torch
from support.records import found, measure, right_row

from attnlib.core import AttnSpec
from attnlib.core.backends import TABLE
from attnlib.core.backends.sdpa import Sdpa
from attnlib.measure import timer
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.decode.measure import DecodeSubject, build_workload
from attnlib.measure.calls.form import Item
from attnlib.run import worker
from attnlib.run.worker import Worker

CASE = DecodeCase(
    AttnSpec(4, 2, 16, 4),
    batch_size=3,
    kv_len=20,
    lengths="ragged",
)
ITEM = Item("sdpa", "host", CASE)
JOB = {"study": "demo", "round": 0, "device": "cpu", "command": "repeat me"}


def with_spec(**fields):
    return replace(ITEM, case=replace(CASE, spec=replace(CASE.spec, **fields)))


def sdpa_raises(monkeypatch, error):
    monkeypatch.setattr(Sdpa, "run", Mock(side_effect=error))


def test_a_right_output_gets_times_an_oracle_and_a_pedigree():
    record = measure(ITEM)
    assert record.status == "ok"
    assert record.reason == ""
    assert record.study == "demo"
    assert record.round == 0
    assert record.item == ITEM
    assert len(record.run_us) == len(record.plan_us) == timer.PLAN_SAMPLES
    assert 0 < record.oracle_error <= record.oracle_budget
    again = measure(replace(ITEM, release=torch.__version__))
    assert again.oracle_error == record.oracle_error, "so does another worker, of this release"
    assert record.oracle_rows == 3 * 4
    assert record.work_per_call == CASE.cost.io_bytes
    assert record.reported_backend == "sdpa"
    assert record.kernel_family == ""
    assert record.kernels == ()
    assert record.versions["torch"] == torch.__version__
    assert record.machine["gpu_id"] == "cpu"
    assert record.command == "repeat me"
    assert record.started_at.endswith("+00:00")


@pytest.mark.parametrize(
    "factor, error",
    [
        (1.1, pytest.approx(0.1, abs=0.02)),
        (nan, None),
    ],
)
def test_a_wrong_output_is_incorrect_and_has_no_times(monkeypatch, factor, error):
    honest = Sdpa.run
    monkeypatch.setattr(Sdpa, "run", lambda self, *inputs: honest(self, *inputs) * factor)
    record = measure(ITEM)
    assert record.status == "incorrect"
    assert record.run_us == ()
    assert record.plan_us == ()
    assert record.oracle_error == error
    assert f"over budget {record.oracle_budget:.3g}" in record.reason


@pytest.mark.parametrize(
    "error, status, reason",
    [
        (OSError("no\n  '/opt/engine/lib/kernel.so'"), "error", "OSError: no 'kernel.so'"),
        (RuntimeError("CUDA error: lost"), "crashed", "RuntimeError: CUDA error: lost"),
        (torch.OutOfMemoryError("CUDA is full"), "error", "OutOfMemoryError: CUDA is full"),
    ],
    ids=["one line without folders", "a lost CUDA context", "no memory left"],
)
def test_an_exception_of_the_backend_has_its_type_and_words(monkeypatch, error, status, reason):
    sdpa_raises(monkeypatch, error)
    record = measure(ITEM)
    assert record.status == status
    assert record.reason == reason
    assert record.run_us == ()


def test_a_compilers_complaint_is_told_however_long_its_command_line(monkeypatch):
    log = f"Ninja build failed: nvcc {'-DX ' * 400}\nprefill.cu(7): error: no such trait\nmore"
    sdpa_raises(monkeypatch, RuntimeError(log))
    reason = measure(ITEM).reason
    assert re.match(
        r"RuntimeError: Ninja build failed: nvcc .*\(7\): error: no such trait$", reason
    )
    assert len(reason) < 1000


FP8 = {"kv_dtype": "float8_e4m3fn"}
LONG = replace(ITEM, case=replace(CASE, kv_len=2**26, lengths="fixed"))


@pytest.mark.parametrize(
    "item, status, words",
    [
        (with_spec(**FP8), "refused", r"SDPA takes no FP8 tensors, got bfloat16/float8_e4m3fn$"),
        (replace(ITEM, backend="flashinfer-fa2"), "refused", "not installed|needs a CUDA GPU"),
        (LONG, "refused", r"KV needs 24\.0 GiB, limit 3\.0 GiB$"),
        (replace(ITEM, backend="fa9"), "error", "one of sdpa, "),
        (replace(ITEM, timer="cupti"), "error", "one of graph, graph-cold, graph-behind, eager"),
        *(
            (replace(ITEM, timer=name), "error", f"timer '{name}' needs a CUDA GPU")
            for name in timer.RUN_TIMERS
            if name != "host"
        ),
        (replace(ITEM, release="0.0.1"), "error", r"must be torch 0\.0\.1, imported was \d"),
    ],
)
def test_what_cannot_be_measured_as_asked_is_never_replaced(
    without_gpu, monkeypatch, item, status, words
):
    if item == LONG:
        monkeypatch.setattr(DecodeSubject, "build", lambda *a, **k: pytest.fail("was built"))
    record = measure(item)
    assert record.status == status
    assert record.run_us == ()
    assert re.search(words, record.reason)


def test_a_kernel_family_that_was_pinned_and_did_not_run_gets_no_time(monkeypatch):
    monkeypatch.setitem(TABLE, "sdpa", replace(TABLE["sdpa"], family="fa3"))
    record = measure(ITEM)
    assert record.status == "error"
    assert record.run_us == ()
    assert record.reason.endswith("asked for fa3, but none ran")


def test_neighbours_of_one_case_share_its_tensors(monkeypatch):
    build = Mock(side_effect=build_workload)
    monkeypatch.setattr(DecodeSubject, "build", build)
    own = Worker(JOB)
    other = with_spec(head_dim=32)
    statuses = [own.measure(item)["status"] for item in (ITEM, ITEM, other, ITEM)]
    assert statuses == ["ok"] * 4
    assert [call.args for call in build.call_args_list] == [
        (CASE,),
        (other.case,),
        (CASE,),
    ]


def test_a_record_is_on_disk_before_its_item_is_called_done(tmp_path, monkeypatch):
    seen = []
    progress = tmp_path / "progress"
    monkeypatch.setattr(worker.store, "keep", lambda row: seen.append(progress.read_text()))
    job = tmp_path / "job.json"
    job.write_text(
        json.dumps(
            {
                **JOB,
                "items": [ITEM.to_dict()],
                "progress": str(progress),
            }
        )
    )
    assert worker.main([str(job)]) == 0
    assert seen == ["start\n"]


KEEPS = """
import json, sys
from attnlib.run import store, worker
store.keep(json.loads(sys.stdin.read()))
print({"pandas", "torch", "matplotlib"} & {*sys.modules})
"""


def test_to_keep_a_record_a_worker_waits_for_no_library():
    row = json.dumps(right_row())
    done = subprocess.run(
        [sys.executable, "-c", KEEPS],
        input=row,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "set()\n" and len(found()) == 1, done.stderr
