"""Evidence: how cases vote, and when records are not enough to say anything."""

import pandas as pd
import pytest
from support.ledger import row

from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.studies import evidence

CASES = tuple(DecodeCase(AttnSpec(8, 2, 128, 16), 4, kv_len) for kv_len in (1024, 2048))
PAIR = ("flashinfer-auto==0.6.3", "flashinfer-fa2==0.6.3")
AUTO = "flashinfer-auto"


def frame(*ratios, rounds=3, **more):
    """Both backends of PAIR for each case, `ratios` apart, in rounds that differ by a little."""
    told = {"release": "0.6.3", "kernel_family": "fa2"} | more
    return pd.DataFrame(
        [
            row(case, backend, 100.0 * slower * (1 + round_ / 100), round=round_, **told)
            for case, ratio in zip(CASES, ratios, strict=True)
            for backend, slower in ((AUTO, ratio), ("flashinfer-fa2", 1.0))
            for round_ in range(rounds)
        ]
    )


def judged(rows):
    return evidence.judge_cases(rows, CASES, PAIR)


@pytest.mark.parametrize(
    ("counts", "word"),
    [
        ((3, 0, 0), "confirmed"),
        ((3, 0, 3), "confirmed"),
        ((0, 3, 1), "refuted"),
        ((1, 3, 0), "partly"),
        ((1, 0, 2), "open"),
        ((0, 0, 1), "open"),
    ],
)
def test_cases_for_against_and_undecided_vote(counts, word):
    assert evidence.vote(*counts) == word


def test_each_case_is_judged_by_its_own_rounds():
    found = judged(frame(5.0, 1.0))
    assert (found.count("slower"), found.count("same")) == (1, 1)
    assert len(found.records) == 12
    assert found.counts == "slower in 1, same in 1 of 2 shapes"
    with pytest.raises(ValueError, match="at least one case"):
        evidence.vote(0, 0)


def test_a_finding_has_the_median_and_the_range_of_its_cases_and_of_one_its_interval():
    rows = frame(5.0, 3.0)
    found = judged(rows).finding("confirmed", "so")
    assert (found.low, found.value, found.high) == pytest.approx((3.0, 4.0, 5.0))
    assert found.measured == "3.00 to 5.00 x, median 4.00"
    rows.loc[(rows.backend == AUTO) & (rows["round"] == 0), "run_us"] *= 1.1
    found = evidence.judge_cases(rows, CASES[:1], PAIR).finding("confirmed", "so")
    assert found.low < found.value < found.high


def test_one_round_decides_nothing_and_has_no_interval():
    rows = frame(5.0, 3.0, rounds=1)
    assert judged(rows).count("ambiguous") == 2
    finding = evidence.judge_cases(rows, CASES[:1], PAIR).finding("open", "one round")
    assert (finding.low, finding.high, finding.measured) == (None, None, "5.00 x, one round")


@pytest.mark.parametrize("lost", [[0], [5], [11], range(6)])
def test_a_missing_record_and_a_missing_case_are_noticed(lost):
    left = rf"0\.6\.3: {12 - len(lost)} records of 2 shapes, one lacks some"
    with pytest.raises(evidence.MissingRecordsError, match=left):
        judged(frame(5.0, 1.0).drop(index=lost))


def test_what_failed_is_on_record_but_cannot_be_judged():
    rows = frame(5.0, 1.0)
    rows.loc[rows.kv_len == CASES[0].kv_len, ["status", "run_us"]] = ["crashed", float("nan")]
    assert len(judged(rows).verdicts) == 1
    with pytest.raises(evidence.MissingRecordsError, match="no round that both are ok in"):
        judged(rows.assign(status="crashed"))
