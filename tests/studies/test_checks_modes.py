"""The checks about pinning fa2: each says its words of records made to be so."""

import pandas as pd
import pytest
from support.ledger import judged, row

from attnlib.studies.auto_resolution import checks as auto_resolution
from attnlib.studies.engine_modes import study as engine_modes
from attnlib.studies.engine_modes.tables import FA2, FA3, usual_timer
from attnlib.studies.evidence import MissingRecordsError

CASES = {case.mode: case for case in engine_modes.ONE_OF_EACH if case.mask != "tree"}
EVEN = dict.fromkeys(CASES, 1.0)


def records(*times):
    """Three rounds of (case, backend, factor, kernel family), each 100 us times the factor."""
    return pd.DataFrame(
        row(case, f"flashinfer-prefill-{name}", 100.0 * factor, round=n, kernel_family=family)
        | {"timer": usual_timer(case.mode), "release": engine_modes.PINNED}
        for case, name, factor, family in times
        for n in range(3)
    )


def measured(factors):
    """fa2 at `factors` of fa3's time, mode by mode."""
    of_fa2 = [(CASES[mode], FA2, factor, FA2) for mode, factor in factors.items()]
    return records(*((CASES[mode], FA3, 1.0, FA3) for mode in factors), *of_fa2)


@pytest.mark.parametrize(
    ("check", "factors", "verdict"),
    [
        ("all-prefill-backends", dict.fromkeys(CASES, 0.5), "confirmed"),
        ("all-prefill-backends", EVEN | {"draft_extend": 0.5}, "partly"),
        ("all-prefill-backends", EVEN, "refuted"),
        ("gain-not-everywhere", dict.fromkeys(CASES, 0.5), "refuted"),
        ("gain-not-everywhere", dict.fromkeys(CASES, 0.5) | {"prefill_ragged": 2.0}, "confirmed"),
    ],
)
def test_times_by_mode_decide(check, factors, verdict):
    finding = judged(check, measured(factors))
    assert finding.verdict == verdict and finding.records


@pytest.mark.parametrize(
    "mode", ["prefill", "decode", "prefill-verify", "draft-extend", "dllm-extend"]
)
def test_what_a_release_passes_to_its_wrappers_is_read_in_both(mode, monkeypatch):
    name = f"paged-{mode}" if mode in ("prefill", "decode") else mode
    before = "auto" if mode in ("decode", "prefill-verify") else "fa2"
    finding = judged(name, records())
    assert finding.verdict == "confirmed" and f"0.5.8 passes {before} (SGLang" in finding.reason
    monkeypatch.setattr(auto_resolution, "AFTER", auto_resolution.BEFORE)
    assert judged(name, records()).verdict == ("refuted" if before == "auto" else "confirmed")


@pytest.mark.parametrize("check", ["all-prefill-backends", "gain-not-everywhere"])
def test_one_round_decides_nothing(check):
    frame = measured(dict.fromkeys(CASES, 0.5))
    assert judged(check, frame[frame["round"] == 0]).verdict == "open"


def test_a_mode_that_was_not_measured_leaves_its_claim_open():
    factors = {mode: 1.0 for mode in CASES if mode != "draft_extend"}
    with pytest.raises(MissingRecordsError, match="no round"):
        judged("all-prefill-backends", measured(factors))
