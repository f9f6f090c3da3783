"""One attention call in the worker, kind by kind: judged, timed, named, refused."""

from itertools import product

import pytest
from support.backend_calls import EXTEND_FAKED, takes
from support.records import measure
from support.workloads import extend_case

from attnlib.core import backends
from attnlib.core.spec import EXTEND_MODES, AttnSpec, MlaSpec
from attnlib.measure.calls import call
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.form import Item
from attnlib.measure.calls.mla.case import MlaCase

VERIFY = ExtendCase(DecodeCase(AttnSpec(4, 2, 64, 16), 3, 40, "ragged"), "target_verify", 5)
SPARSE = MlaCase(MlaSpec(16, 70, 64, "fp8-656"), 3, 300, "ragged")


@pytest.mark.parametrize(
    "name, case, family, rows",
    [
        ("flashinfer-prefill-fa2", VERIFY, "fa2", 3 * 5 * 4),
        ("flashinfer-prefill-auto", VERIFY, "fa3", 3 * 5 * 4),
        ("flashmla-sparse-fp8", SPARSE, "flashmla-sparse", 3 * 16),
    ],
)
def test_a_right_output_gets_times_and_its_bytes(name, case, family, rows, libraries, monkeypatch):
    monkeypatch.setattr(call, "kernel_family", lambda names, family_of: family)
    record = measure(Item(name, "host", case))
    assert record.status == "ok", record.reason
    assert record.run_us and record.plan_us
    assert record.kernel_family == family
    assert record.oracle_rows == rows
    assert record.work_per_call == case.cost.io_bytes


def test_a_mask_that_a_backend_lacks_gets_no_time(libraries):
    record = measure(Item("flashinfer-prefill-fa3", "host", VERIFY))
    assert record.status == "refused"
    assert record.run_us == ()
    assert "takes no custom mask, got tree" in record.reason


SHAPES = {
    "flashinfer-mla-fa2": MlaSpec(16, 70),
    "flashinfer-mla-fa3": MlaSpec(16, 70),
    "flashmla-dense": MlaSpec(16),
    "flashmla-sparse-fp8": SPARSE.spec,
}
CACHED = DecodeCase(AttnSpec(8, 2, 128, 16), 4, 600)
CASES = [extend_case(CACHED, mode, q_len=8) for mode in EXTEND_MODES]
ON_A_GPU = [pair for pair in product(EXTEND_FAKED, CASES) if takes(*pair)]
ON_A_GPU += [(name, MlaCase(spec, 8, 4096)) for name, spec in SHAPES.items()]


@pytest.mark.gpu
@pytest.mark.parametrize("timer", ["graph", "graph-cold", "eager", "profiler"])
@pytest.mark.parametrize(
    "name, case",
    ON_A_GPU,
    ids=lambda x: getattr(x, "key", x),
)
def test_every_backend_is_measured_by_every_timer_or_refused(name, case, timer):
    if reason := backends.unavailable(name):
        pytest.skip(reason)
    record = measure(Item(name, timer, case), "cuda")
    mask = getattr(case, "mask", "causal")
    if reason := backends.unsupported(name, case.spec, mask=mask):
        assert record.status == "refused"
        assert record.reason == reason
        assert isinstance(case, ExtendCase)
        return
    assert record.status == "ok", record.reason
    assert record.kernel_family == backends.TABLE[name].family or name.endswith("auto")
    assert record.run_us and record.plan_us
