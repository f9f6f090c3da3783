"""One attention call in the worker, kind by kind: judged, timed, named, refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.subject_fakes import OracleBackend, measure, measure_with

from attnlib.core import backends
from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds import call
from attnlib.kinds.base import Bench
from attnlib.kinds.cost import extend_cost, mla_cost
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import MODES, ExtendCase
from attnlib.kinds.extend.measure import ExtendSubject, attend_extend
from attnlib.kinds.item import Item
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.mla.measure import MlaSubject, attend_mla
from attnlib.run.record import Record

VERIFY = ExtendCase(DecodeCase(AttnSpec(4, 2, 16, 4), 3, 40, "ragged"), "target_verify", 5)
SPARSE = MlaCase(MlaSpec(16, 70, 64, "fp8-656"), 3, 300, "ragged")
EXTEND = (Item("flashinfer-prefill-fa2", "host", VERIFY), OracleBackend(attend_extend))
MLA = (Item("flashmla-sparse-fp8", "host", SPARSE), OracleBackend(attend_mla))
both = pytest.mark.parametrize(("item", "mine"), [EXTEND, MLA], ids=["extend", "mla"])


@pytest.mark.parametrize(
    ("item", "mine", "family", "rows", "cost"),
    [(*EXTEND, "fa2", 3 * 5 * 4, extend_cost), (*MLA, "flashmla-sparse", 48, mla_cost)],
)
def test_a_right_output_gets_times_and_its_bytes(
    item: Item, mine: OracleBackend, family: str, rows: int, cost: Any, monkeypatch
) -> None:
    record = measure_with(mine, item, monkeypatch)
    assert record.status == "ok", record.reason
    assert record.run_us and record.plan_us
    assert (record.kernel_family, record.oracle_rows) == (family, rows)
    assert record.work_per_call == cost(item.case).io_bytes
    assert Record.from_json(record.to_json()) == record


@both
def test_a_wrong_output_gets_no_time(item, mine, monkeypatch) -> None:
    record = measure_with(replace(mine, factor=1.1), item, monkeypatch)
    assert (record.status, record.run_us) == ("incorrect", ())
    assert "over budget" in record.reason


@both
def test_another_kernel_than_the_pinned_one_is_an_error(item, mine, monkeypatch) -> None:
    record = measure_with(replace(mine, family="fa3"), item, monkeypatch)
    pinned = backends.TABLE[item.backend].family
    assert record.status == "error" and f"asked for {pinned}, but fa3 ran" in record.reason


def test_a_backend_that_may_choose_is_recorded_with_what_it_ran(monkeypatch) -> None:
    item = replace(EXTEND[0], backend="flashinfer-prefill-auto")
    record = measure_with(replace(EXTEND[1], family="fa3"), item, monkeypatch)
    assert (record.status, record.kernel_family) == ("ok", "fa3")


@both
@pytest.mark.parametrize("why", [{"missing": "install it"}, {"refusal": "takes no {mask}"}])
def test_a_refusal_is_recorded_with_its_reason(item, mine, why, monkeypatch) -> None:
    record = measure_with(replace(mine, **why), item, monkeypatch)
    mask = getattr(item.case, "mask", "causal")
    assert (record.status, record.reason) == ("refused", next(iter(why.values())).format(mask=mask))


@pytest.mark.parametrize(
    ("case", "first"), [(VERIFY, "flashinfer-prefill-auto"), (SPARSE, "flashinfer-mla-fa2")]
)
def test_an_unknown_backend_lists_those_there_are(case, first) -> None:
    record = measure(Item("flashinfer-fa2", "host", case), "cpu")
    assert record.status == "error" and f"must be one of {first}" in record.reason


@both
def test_a_cache_that_does_not_fit_is_refused_with_its_size(item, mine, monkeypatch) -> None:
    monkeypatch.setattr(call, "MEMORY_GIB_UNKNOWN", 1e-6)
    record = measure_with(mine, item, monkeypatch)
    assert record.status == "refused" and "KV needs" in record.reason


@pytest.mark.parametrize(
    ("subject", "case", "other"),
    [
        (ExtendSubject, VERIFY, replace(VERIFY, mask="causal")),
        (MlaSubject, SPARSE, replace(SPARSE, seed=1)),
    ],
)
def test_a_subject_keeps_the_tensors_of_its_last_case(subject, case, other) -> None:
    kept = subject(Bench("cpu", {}, {}))
    work, judge = kept._workload(case)
    assert kept._workload(case) == (work, judge)
    assert torch.equal(work.q, subject.build(case, device="cpu").q)
    assert kept._workload(other)[0].case == other


def gpu_case(mode: str) -> ExtendCase:
    ragged = mode == "prefill_ragged"
    cached = DecodeCase(AttnSpec(8, 2, 128, 1 if ragged else 16), 4, 600)
    return ExtendCase(cached, mode, 600 if ragged else 8)


SHAPES = {
    "flashinfer-mla-fa2": MlaSpec(16, 70),
    "flashinfer-mla-fa3": MlaSpec(16, 70),
    "flashmla-dense": MlaSpec(16),
    "flashmla-sparse-fp8": SPARSE.spec,
}
ON_A_GPU = [(name, gpu_case(mode)) for name in backends.EXTEND_BACKENDS for mode in MODES]
ON_A_GPU += [(name, MlaCase(spec, 8, 4096)) for name, spec in SHAPES.items()]


@pytest.mark.gpu
@pytest.mark.parametrize("timer", ["graph", "graph-cold", "eager", "profiler"])
@pytest.mark.parametrize(("name", "case"), ON_A_GPU, ids=lambda x: getattr(x, "key", x))
def test_every_backend_is_measured_by_every_timer_or_refused(name, case, timer) -> None:
    if reason := backends.unavailable(name):
        pytest.skip(reason)
    record = measure(Item(name, timer, case), "cuda")
    mask = getattr(case, "mask", "causal")
    if reason := backends.unsupported(name, case.spec, mask=mask):
        assert (record.status, record.reason) == ("refused", reason)
        assert isinstance(case, ExtendCase)
        return
    assert record.status == "ok", record.reason
    assert record.kernel_family == backends.TABLE[name].family or name.endswith("auto")
    assert record.run_us and record.plan_us
