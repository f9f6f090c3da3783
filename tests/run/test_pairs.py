"""Pairs of rounds: which are judged, and how strictly. The loop is tested by its two callers."""

from dataclasses import replace

import pytest

from attnlib.run.pairs import Comparison

BOTH = ("0.6.3", "0.6.4")
NEW_US = (10.3, 11.2, 10.5, 11.0)
"""Over 10 us: slower at 95 %, not decided at 98.75 %, which each of four looks has."""


def records_of(make_record, study, new_us):
    item = make_record().item
    for number, us in enumerate(new_us):
        for release, time in zip(BOTH, (10.0, us), strict=True):
            sample = {"run_us": (time,), "plan_us": ()}
            yield make_record(
                study=study, round=number, item=replace(item, release=release), **sample
            )


@pytest.mark.parametrize(
    ("study", "looks", "verdict"),
    [
        ("searched", (4, 8, 16, 24), "ambiguous"),
        ("searched", (4,), "slower"),
        ("a study", (4, 8, 16, 24), "slower"),
    ],
)
def test_looks_share_the_error_and_the_rounds_of_a_study_are_one_look(
    make_record, study, looks, verdict
):
    comparison = Comparison("searched", BOTH, looks)
    comparison.take(records_of(make_record, study, NEW_US))
    (ratio,) = comparison.verdicts().values()
    assert (ratio.verdict, ratio.rounds) == (verdict, 4)


def test_an_item_before_its_first_look_has_no_verdict(make_record):
    comparison = Comparison("searched", BOTH, (4, 8))
    comparison.take(records_of(make_record, "searched", NEW_US[:3]))
    assert comparison.verdicts() == {} and len(comparison.undecided()) == 1
