"""Calls with several queries a request in the worker: judged, timed, named, refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.subject_fakes import OracleBackend, measure, measure_with

from attnlib.core import backends
from attnlib.core.spec import AttnSpec
from attnlib.kinds import call
from attnlib.kinds.base import Bench
from attnlib.kinds.cost import extend_cost
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import MODES, ExtendCase
from attnlib.kinds.extend.measure import ExtendSubject, attend_extend, build_extend_workload
from attnlib.kinds.item import Item
from attnlib.run.record import Record

VERIFY = ExtendCase(DecodeCase(AttnSpec(4, 2, 16, 4), 3, 40, "ragged"), "target_verify", 5)


ITEM = Item("flashinfer-prefill-fa2", "host", VERIFY)
MINE = OracleBackend(attend_extend)


def test_a_right_output_gets_times_and_its_bytes(monkeypatch) -> None:
    record = measure_with(MINE, ITEM, monkeypatch)
    assert record.status == "ok", record.reason
    assert record.run_us and record.plan_us
    assert (record.kernel_family, record.oracle_rows) == ("fa2", 3 * 5 * 4)
    assert record.work_per_call == extend_cost(VERIFY).io_bytes
    assert Record.from_json(record.to_json()) == record


def test_a_wrong_output_gets_no_time(monkeypatch) -> None:
    record = measure_with(replace(MINE, factor=1.1), ITEM, monkeypatch)
    assert (record.status, record.run_us) == ("incorrect", ())
    assert "over budget" in record.reason


def test_another_kernel_than_the_pinned_one_is_an_error(monkeypatch) -> None:
    record = measure_with(replace(MINE, family="fa3"), ITEM, monkeypatch)
    assert record.status == "error"
    assert "asked for fa2, but fa3 ran" in record.reason


def test_a_backend_that_may_choose_is_recorded_with_what_it_ran(monkeypatch) -> None:
    item = replace(ITEM, backend="flashinfer-prefill-auto")
    record = measure_with(replace(MINE, family="fa3"), item, monkeypatch)
    assert (record.status, record.kernel_family) == ("ok", "fa3")


def test_a_refusal_is_recorded_with_its_reason(monkeypatch) -> None:
    record = measure_with(replace(MINE, refusal="takes no {mask}"), ITEM, monkeypatch)
    assert (record.status, record.reason) == ("refused", "takes no tree")


def test_an_unknown_backend_lists_those_there_are() -> None:
    record = measure(Item("flashinfer-fa2", "host", VERIFY), "cpu")
    assert record.status == "error"
    assert "must be one of flashinfer-prefill-auto" in record.reason


def test_keys_and_values_that_do_not_fit_are_refused_with_their_size(monkeypatch) -> None:
    monkeypatch.setattr(call, "MEMORY_GIB_UNKNOWN", 1e-6)
    record = measure_with(MINE, ITEM, monkeypatch)
    assert record.status == "refused"
    assert "KV needs" in record.reason


def test_the_subject_keeps_the_tensors_of_its_last_case() -> None:
    kept = ExtendSubject(Bench("cpu", {}, {}))
    work, oracle = kept._workload(VERIFY)
    assert kept._workload(VERIFY) == (work, oracle)
    other = replace(VERIFY, mask="causal")
    assert kept._workload(other)[0].case == other
    assert torch.equal(work.q, build_extend_workload(VERIFY, device="cpu").q)


def gpu_case(mode: str) -> ExtendCase:
    ragged = mode == "prefill_ragged"
    cached = DecodeCase(AttnSpec(8, 2, 128, 1 if ragged else 16), 4, 600)
    return ExtendCase(cached, mode, 600 if ragged else 8)


@pytest.mark.gpu
@pytest.mark.parametrize("timer", ["graph", "graph-cold", "eager", "profiler"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", backends.EXTEND_BACKENDS)
def test_every_mode_is_measured_by_every_timer_or_refused(name: str, mode: str, timer: str) -> None:
    case = gpu_case(mode)
    if reason := backends.unavailable(name):
        pytest.skip(reason)
    record = measure(Item(name, timer, case), "cuda")
    if reason := backends.unsupported(name, case.spec, mask=case.mask):
        assert (record.status, record.reason) == ("refused", reason)
        return
    assert record.status == "ok", record.reason
    assert record.kernel_family == backends.TABLE[name].family or name.endswith("auto")
    assert record.run_us and record.plan_us
