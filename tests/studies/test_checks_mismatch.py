"""The checks about metadata that does not fit: each says its words of records made to be so."""

from itertools import product

import pandas as pd
import pytest
from support.ledger import judged

from attnlib.kinds.mismatch.case import MISMATCHES, predict_splits
from attnlib.studies.evidence import MissingRecordsError
from attnlib.studies.metadata_mismatch.checks import HARMLESS, LENGTHS

OVERRUNS = {m.name for m in MISMATCHES if predict_splits(m, num_sms=132).overrun}


def ran(wrong, *, without=""):
    """Every mismatch past the guard and with it; those of `wrong` give wrong output past it."""
    names = [each.name for each in MISMATCHES if each.name != without]
    frame = pd.DataFrame(product(names, (False, True)), columns=["name", "guard"])
    past = frame.name.isin(wrong) & ~frame.guard
    told = {"status": "ok", "num_sms": 132, "oracle_error": 22.0}
    told["id"] = frame.name + " " + frame.guard.astype(str)
    return frame.assign(reported_backend=past.map({True: "wrong", False: HARMLESS}), **told)


@pytest.mark.parametrize(
    ("check", "wrong", "verdict"),
    [
        ("stale-metadata", set(), "partly"),
        ("stale-metadata", set(LENGTHS), "confirmed"),
        ("out-of-bounds", OVERRUNS, "confirmed"),
        ("out-of-bounds", set(sorted(OVERRUNS)[:1]), "partly"),
        ("out-of-bounds", {"batch-grown"}, "refuted"),
    ],
)
def test_outputs_past_the_guard_decide(check, wrong, verdict):
    finding = judged(check, ran(wrong))
    assert finding.verdict == verdict
    assert finding.records and not [name for name in finding.records if name.endswith("True")]


def test_a_mismatch_that_was_not_run_leaves_its_claim_open():
    with pytest.raises(MissingRecordsError, match="lengths-shrunk"):
        judged("stale-metadata", ran(set(), without="lengths-shrunk"))
