"""Records made up for a view, and the published ones in replay mode."""

import pytest
from support.explorer_records import FA2, FA3, QWEN, keep, keep_ceilings, publish, timed

TIMES = {FA2: (100.0, 110.0, 105.0), FA3: (300.0, 330.0, 318.0)}


@pytest.fixture
def demo(make_record, monkeypatch, replayed):
    """A study of Qwen3-0.6B: three rounds of fa2 and fa3 of one case, `TIMES`, with ceilings."""
    publish(monkeypatch, "demo", QWEN, backends=(FA2, FA3))
    keep_ceilings(make_record, "demo")
    for backend, times in TIMES.items():
        for round_, us in enumerate(times):
            family = {"kernel_family": backend[-3:], "round": round_}
            keep(make_record, "demo", timed(backend, QWEN), us, **family)
    return TIMES
