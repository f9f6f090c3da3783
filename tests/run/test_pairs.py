"""Pairs of rounds: which are judged, and how strictly. The loop is tested by its two callers."""

from dataclasses import replace

import pytest
from support.records import ITEM, right_row

from attnlib.run import rows
from attnlib.run.frame import frame_of
from attnlib.run.pairs import Comparison

BOTH = ("0.6.3", "0.6.4")
NEW_US = (10.3, 11.2, 10.5, 11.0)
"""Over 10 us: slower at 95 %, not decided at 98.75 %, which each of four looks has."""


def frame_with(study, new_us):
    made = []
    for number, us in enumerate(new_us):
        for release, time in zip(BOTH, (10.0, us), strict=True):
            item = replace(ITEM, release=release)
            made.append(
                right_row(
                    item,
                    study=study,
                    round=number,
                    run_us=(time,),
                    plan_us=(),
                )
            )
    table = rows.table_of(made)
    return frame_of(table, rows.items_of(table))


def compare(looks):
    return Comparison(
        "searched",
        BOTH,
        looks,
        pairs={replace(ITEM, release=""): []},
    )


@pytest.mark.parametrize(
    "study, looks, verdict",
    [
        ("searched", (4, 8, 16, 24), "inconclusive"),
        ("searched", (4,), "slower"),
        ("a study", (4, 8, 16, 24), "slower"),
    ],
)
def test_looks_share_the_error_and_the_rounds_of_a_study_are_one_look(study, looks, verdict):
    comparison = compare(looks)
    comparison.take(frame_with(study, NEW_US))
    (ratio,) = comparison.verdicts().values()
    assert ratio.verdict == verdict
    assert ratio.rounds == 4


def test_an_item_before_its_first_look_has_no_verdict():
    comparison = compare((4, 8))
    comparison.take(frame_with("searched", NEW_US[:3]))
    assert comparison.verdicts() == {}
    assert len(comparison.undecided()) == 1


def test_as_many_rounds_found_later_take_the_place_of_the_first_and_fewer_do_not():
    comparison = compare((4,))
    for study, new_us in (
        ("first", NEW_US),
        ("later", NEW_US),
        ("short", NEW_US[:3]),
    ):
        comparison.take(frame_with(study, new_us))
    (pairs,) = comparison.pairs.values()
    assert {row.study for pair in pairs for row in pair} == {"later"}
