"""The checks about metadata that does not fit: each says its words of records made to be so."""

import pandas as pd
import pytest
from support.ledger import judged

from attnlib.kinds.mismatch.case import MISMATCHES, predict_splits
from attnlib.studies.evidence import MissingRecordsError
from attnlib.studies.metadata_mismatch.checks import HARMLESS, LENGTHS, ONE_GPU

OVERRUNS = {m.name for m in MISMATCHES if predict_splits(m, num_sms=132).overrun}


def ran(wrong: set[str], *, without: str = "") -> pd.DataFrame:
    """Every mismatch past the guard and with it; those of `wrong` give wrong output past it."""
    rows = [
        {
            "id": f"{mismatch.name} {guard}",
            "name": mismatch.name,
            "guard": guard,
            "status": "ok",
            "reported_backend": "wrong" if mismatch.name in wrong and not guard else HARMLESS,
            "oracle_error": 22.0,
            "num_sms": 132,
        }
        for mismatch in MISMATCHES
        for guard in (False, True)
        if mismatch.name != without
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("check", "wrong", "verdict"),
    [
        ("stale-metadata", set(), "partly"),
        ("stale-metadata", set(LENGTHS), "confirmed"),
        ("out-of-bounds", OVERRUNS, "confirmed"),
        ("out-of-bounds", set(sorted(OVERRUNS)[:1]), "partly"),
        ("out-of-bounds", {"batch-grown"}, "refuted"),
        ("single-gpu-unaffected", {"head-counts"}, "confirmed"),
        ("single-gpu-unaffected", {"lengths-grown"}, "partly"),
        ("single-gpu-unaffected", set(ONE_GPU), "refuted"),
    ],
)
def test_outputs_past_the_guard_decide(check, wrong, verdict):
    finding = judged(check, ran(wrong))
    assert finding.verdict == verdict
    assert finding.records and not [name for name in finding.records if name.endswith("True")]


def test_there_are_mismatchs_that_overrun_buffers_and_others():
    assert 1 < len(OVERRUNS) < len(MISMATCHES)


@pytest.mark.parametrize("check", ["stale-metadata", "single-gpu-unaffected"])
def test_a_mismatch_that_was_not_run_leaves_its_claim_open(check):
    with pytest.raises(MissingRecordsError, match="lengths-shrunk"):
        judged(check, ran(set(), without="lengths-shrunk"))
