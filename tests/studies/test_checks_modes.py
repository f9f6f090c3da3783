"""The checks about pinning fa2: each says its words of records made to be so."""

from itertools import chain

import pandas as pd
import pytest
from support.ledger import judged, row

from attnlib.studies.engine_modes import study as engine_modes
from attnlib.studies.engine_modes.tables import AUTO, FA2, FA3, usual_timer
from attnlib.studies.evidence import MissingRecordsError

CASES = {case.mode: case for case in engine_modes.ONE_OF_EACH if case.mask != "tree"}
TREE = engine_modes.MASKED[1]
EVEN = dict.fromkeys(CASES, 1.0)


def records(case, name, factor, *, family=""):
    """Three rounds of a backend, each `factor` times 100 us and exactly so."""
    ran = {"kernel_family": family or name, "timer": usual_timer(case.mode)}
    backend = f"flashinfer-prefill-{name}"
    return [row(case, backend, 100.0 * factor, round=n, **ran) for n in range(3)]


def measured(factors):
    """fa2 at `factors` of fa3's time, mode by mode."""
    found = [records(CASES[mode], FA3, 1.0) for mode in factors]
    found += [records(CASES[mode], FA2, factor) for mode, factor in factors.items()]
    return pd.DataFrame(list(chain(*found)))


def verified(causal, tree):
    """`auto` at these multiples of fa2's time under each mask; a third shape has no `auto`."""
    alone = engine_modes.VERIFIES[0]
    found = [records(case, FA2, 1.0) for case in (CASES["target_verify"], TREE, alone)]
    found += [records(CASES["target_verify"], AUTO, causal, family="fa3")]
    found += [records(TREE, AUTO, tree, family="fa2")]
    return pd.DataFrame(list(chain(*found)))


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
    assert finding.verdict == verdict
    assert finding.records


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


def test_a_mode_that_was_not_measured_leaves_its_claim_open():
    factors = {mode: 1.0 for mode in CASES if mode != "draft_extend"}
    with pytest.raises(MissingRecordsError, match="no round"):
        judged("all-prefill-backends", measured(factors))


def test_verification_without_auto_leaves_its_claim_open():
    with pytest.raises(MissingRecordsError, match="auto and fa2"):
        judged("prefill-verify", measured(EVEN))
