"""The checks about pinning fa2: each says its words of records made to be so."""

import pandas as pd
import pytest
from support.ledger import judged, row

from attnlib.studies.engine_modes import study as engine_modes
from attnlib.studies.engine_modes.tables import AUTO, FA2, FA3, usual_timer
from attnlib.studies.evidence import MissingRecordsError

CASES = {case.mode: case for case in engine_modes.ONE_OF_EACH if case.mask != "tree"}
TREE = engine_modes.MASKED[1]
EVEN = dict.fromkeys(CASES, 1.0)


def records(*times):
    """Three rounds of (case, backend, factor, kernel family), each 100 us times the factor."""
    return pd.DataFrame(
        row(case, f"flashinfer-prefill-{name}", 100.0 * factor, round=n, kernel_family=family)
        | {"timer": usual_timer(case.mode)}
        for case, name, factor, family in times
        for n in range(3)
    )


def measured(factors):
    """fa2 at `factors` of fa3's time, mode by mode."""
    of_fa2 = [(CASES[mode], FA2, factor, FA2) for mode, factor in factors.items()]
    return records(*((CASES[mode], FA3, 1.0, FA3) for mode in factors), *of_fa2)


def verified(causal, tree):
    """`auto` at these multiples of fa2's time under each mask; a third shape has no `auto`."""
    verify, alone = CASES["target_verify"], engine_modes.VERIFIES[0]
    of_fa2 = [(case, FA2, 1.0, FA2) for case in (verify, TREE, alone)]
    return records(*of_fa2, (verify, AUTO, causal, FA3), (TREE, AUTO, tree, FA2))


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
    ("causal", "tree", "verdict"),
    [(2.0, 2.0, "confirmed"), (2.0, 1.0, "partly"), (1.0, 1.0, "refuted")],
)
def test_a_pin_for_verification_gains_where_auto_is_slower(causal, tree, verdict):
    finding = judged("prefill-verify", verified(causal, tree))
    assert finding.verdict == verdict
    assert "under a causal mask auto runs fa3" in finding.reason
    assert "under a tree mask auto runs fa2" in finding.reason
    assert len(finding.records) == 12, "the shape without auto has no say"


@pytest.mark.parametrize("check", ["all-prefill-backends", "gain-not-everywhere"])
def test_one_round_decides_nothing(check):
    frame = measured(dict.fromkeys(CASES, 0.5))
    assert judged(check, frame[frame["round"] == 0]).verdict == "open"


def test_a_mode_or_an_auto_that_was_not_measured_leaves_its_claim_open():
    factors = {mode: 1.0 for mode in CASES if mode != "draft_extend"}
    with pytest.raises(MissingRecordsError, match="no round"):
        judged("all-prefill-backends", measured(factors))
    with pytest.raises(MissingRecordsError, match="auto and fa2"):
        judged("prefill-verify", measured(EVEN))
