"""One attention call in the worker, kind by kind: judged, timed, named, refused."""

from dataclasses import replace
from itertools import product

import pytest
from support.backend_calls import takes
from support.subject_fakes import OracleBackend, measure, measure_with
from support.workloads import extend_case

from attnlib.core import backends
from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import MODES, ExtendCase
from attnlib.kinds.extend.measure import attend_extend
from attnlib.kinds.item import Item
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.mla.measure import attend_mla
from attnlib.run.record import Record

VERIFY = ExtendCase(DecodeCase(AttnSpec(4, 2, 16, 4), 3, 40, "ragged"), "target_verify", 5)
SPARSE = MlaCase(MlaSpec(16, 70, 64, "fp8-656"), 3, 300, "ragged")
EXTEND = (Item("flashinfer-prefill-fa2", "host", VERIFY), OracleBackend(attend_extend))
MLA = (Item("flashmla-sparse-fp8", "host", SPARSE), OracleBackend(attend_mla))


@pytest.mark.parametrize(
    ("item", "backend", "family", "rows"),
    [(*EXTEND, "fa2", 3 * 5 * 4), (*MLA, "flashmla-sparse", 48)],
)
def test_a_right_output_gets_times_and_its_bytes(item, backend, family, rows, monkeypatch):
    record = measure_with(backend, item, monkeypatch)
    assert record.status == "ok", record.reason
    assert record.run_us and record.plan_us
    assert (record.kernel_family, record.oracle_rows) == (family, rows)
    assert record.work_per_call == item.case.cost.io_bytes
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize(("item", "backend"), [EXTEND, MLA], ids=["extend", "mla"])
@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"factor": 1.1}, "incorrect", "over budget"),
        ({"family": "fa3"}, "error", "asked for {pinned}, but fa3 ran"),
        ({"missing": "install it"}, "refused", "install it"),
        ({"refusal": "takes no {mask}"}, "refused", "takes no {mask}"),
    ],
)
def test_what_is_wrong_or_refused_gets_no_time(item, backend, changes, status, words, monkeypatch):
    record = measure_with(replace(backend, **changes), item, monkeypatch)
    pinned, mask = backends.TABLE[item.backend].family, getattr(item.case, "mask", "causal")
    assert (record.status, record.run_us) == (status, ())
    assert words.format(pinned=pinned, mask=mask) in record.reason


def test_a_backend_that_may_choose_is_recorded_with_what_it_ran(monkeypatch):
    item = replace(EXTEND[0], backend="flashinfer-prefill-auto")
    record = measure_with(replace(EXTEND[1], family="fa3"), item, monkeypatch)
    assert (record.status, record.kernel_family) == ("ok", "fa3")


SHAPES = {
    "flashinfer-mla-fa2": MlaSpec(16, 70),
    "flashinfer-mla-fa3": MlaSpec(16, 70),
    "flashmla-dense": MlaSpec(16),
    "flashmla-sparse-fp8": SPARSE.spec,
}
CACHED = DecodeCase(AttnSpec(8, 2, 128, 16), 4, 600)
CASES = [extend_case(CACHED, mode, q_len=8) for mode in MODES]
ON_A_GPU = [pair for pair in product(backends.EXTEND_BACKENDS, CASES) if takes(*pair)]
ON_A_GPU += [(name, MlaCase(spec, 8, 4096)) for name, spec in SHAPES.items()]


@pytest.mark.gpu
@pytest.mark.parametrize("timer", ["graph", "graph-cold", "eager", "profiler"])
@pytest.mark.parametrize(("name", "case"), ON_A_GPU, ids=lambda x: getattr(x, "key", x))
def test_every_backend_is_measured_by_every_timer_or_refused(name, case, timer):
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
