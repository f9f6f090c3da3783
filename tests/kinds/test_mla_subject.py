"""MLA calls in the worker: judged, timed, named; refused where they cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.subject_fakes import OracleBackend, measure, measure_with

from attnlib.core import backends
from attnlib.core.spec import MlaSpec
from attnlib.kinds import call
from attnlib.kinds.base import Bench
from attnlib.kinds.call import Workload
from attnlib.kinds.cost import mla_cost
from attnlib.kinds.item import Item
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.mla.measure import MlaSubject, attend_mla, build_mla_workload

SPARSE = MlaCase(MlaSpec(16, 70, 64, "fp8-656"), 3, 300, "ragged")
SHAPES = {
    "flashinfer-mla-fa2": MlaSpec(16, 70),
    "flashinfer-mla-fa3": MlaSpec(16, 70),
    "flashmla-dense": MlaSpec(16),
    "flashmla-sparse-fp8": SPARSE.spec,
}


ITEM = Item("flashmla-sparse-fp8", "host", SPARSE)
MINE = OracleBackend(attend_mla)


def test_a_right_output_gets_times_and_its_bytes(monkeypatch) -> None:
    record = measure_with(MINE, ITEM, monkeypatch)
    assert record.status == "ok", record.reason
    assert record.run_us and record.plan_us
    assert (record.kernel_family, record.oracle_rows) == ("flashmla-sparse", 48)
    assert record.work_per_call == mla_cost(SPARSE).io_bytes


def test_a_wrong_output_gets_no_time(monkeypatch) -> None:
    record = measure_with(replace(MINE, factor=1.1), ITEM, monkeypatch)
    assert (record.status, record.run_us) == ("incorrect", ())
    assert "over budget" in record.reason


def test_another_kernel_than_the_pinned_one_is_an_error(monkeypatch) -> None:
    record = measure_with(replace(MINE, family="mla-fa2"), ITEM, monkeypatch)
    assert record.status == "error"
    assert "asked for flashmla-sparse, but mla-fa2 ran" in record.reason


def test_a_refusal_is_recorded_with_its_reason(monkeypatch) -> None:
    record = measure_with(replace(MINE, missing="install it"), ITEM, monkeypatch)
    assert (record.status, record.reason) == ("refused", "install it")


def test_an_unknown_backend_lists_those_there_are() -> None:
    record = measure(Item("fa3", "host", SPARSE), "cpu")
    assert record.status == "error"
    assert "must be one of flashinfer-mla-fa2" in record.reason


def test_a_cache_that_does_not_fit_is_refused_with_its_size(monkeypatch) -> None:
    monkeypatch.setattr(call, "MEMORY_GIB_UNKNOWN", 1e-4)
    record = measure_with(MINE, ITEM, monkeypatch)
    assert record.status == "refused"
    assert "KV needs" in record.reason


@pytest.mark.gpu
@pytest.mark.parametrize("timer", ["graph", "graph-cold", "eager"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_backend_is_measured_by_every_timer(name: str, timer: str) -> None:
    if reason := backends.unavailable(name):
        pytest.skip(reason)
    record = measure(Item(name, timer, MlaCase(SHAPES[name], 8, 4096)), "cuda")
    assert record.status == "ok", record.reason
    assert record.kernel_family == backends.TABLE[name].family
    assert record.run_us and record.plan_us


def test_the_subject_keeps_the_tensors_of_its_last_case() -> None:
    kept = MlaSubject(Bench("cpu", {}, {}))
    work, oracle = kept._workload(SPARSE)
    assert kept._workload(SPARSE) == (work, oracle)
    assert isinstance(work, Workload)
    assert torch.equal(work.kv, build_mla_workload(SPARSE, device="cpu").kv)
