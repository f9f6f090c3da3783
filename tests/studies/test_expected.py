"""Checks that are data: each says confirmed, refuted or partly of records made to be so."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd
import pytest
from support.frames import ran
from support.ledger import judged, row, verdict

from attnlib.kinds.decode.case import DecodeCase
from attnlib.run.frame import AUTO, FA2, FA3, GRAPH_AUTO
from attnlib.studies import expected
from attnlib.studies.auto_resolution.study import RESOLUTION_CASES
from attnlib.studies.evidence import MissingRecordsError
from attnlib.studies.fa3_decode_regression.study import (
    AFFECTED,
    BEFORE,
    FIXED,
    HEADLINE,
    NEWEST,
    REGRESSED,
    WIDE,
)

RELEASES = (BEFORE, REGRESSED, FIXED, NEWEST)
LONG = [case for case in HEADLINE if case.kv_len >= 8192]
KERNELS = {FA3: "PrefillWithKVCacheKernel"}
Factor = Callable[[DecodeCase], float]


def rows(
    cases: Iterable[DecodeCase], backend: str, release: str, factor: Factor, **more: object
) -> list[dict]:
    """Two rounds of one backend and release, each `factor` times 100 us and exactly so."""
    kernel = KERNELS.get(backend, "BatchPrefillWithPagedKVCacheKernel")
    told = {"release": release, "kernel_family": "fa2", "kernels": ran(kernel, "Merge", "Merge")}
    return [
        row(case, backend, 100.0 * factor(case), round=n, **(told | more))
        for case in dict.fromkeys(cases)
        for n in (0, 1)
    ]


def by_place(cases: tuple[DecodeCase, ...], factors: dict[int, float], rest: float) -> Factor:
    """A factor for some places in `cases`, `rest` for the others."""
    chosen = {cases[place]: factor for place, factor in factors.items()}
    return lambda case: chosen.get(case, rest)


def regression(factor: Factor, **by_release: Factor) -> pd.DataFrame:
    """fa2 at 1, everything else at `factor`, in all four releases; fa3 over the wide grid."""
    cases = (*HEADLINE, *WIDE)
    found = rows(cases, FA2, REGRESSED, lambda _: 1.0) + rows(cases, FA3, REGRESSED, factor)
    for release in RELEASES:
        for backend in (AUTO, GRAPH_AUTO):
            found += rows(HEADLINE, backend, release, by_release.get(release, factor))
        if release != REGRESSED:
            found += rows(HEADLINE, FA2, release, lambda _: 1.0)
    return pd.DataFrame(found)


def resolution(family: Callable[[str, DecodeCase], str]) -> pd.DataFrame:
    """What `auto` ran, by release and case."""
    found = []
    for release in (BEFORE, *AFFECTED, FIXED, NEWEST):
        for case in RESOLUTION_CASES:
            how = {"kernel_family": family(release, case)}
            found += rows([case], AUTO, release, lambda _: 1.0, **how)[:1]
    return pd.DataFrame(found)


SLOW, EVEN = regression(lambda _: 5.0), regression(lambda _: 1.0)
MIXED = regression(
    lambda case: 1.0 if case in (HEADLINE[0], WIDE[3]) else 5.0, **{BEFORE: lambda _: 1.0}
)
FA3_EVERYWHERE, FA2_EVERYWHERE = resolution(lambda *_: "fa3"), resolution(lambda *_: "fa2")
AS_IT_WAS = resolution(
    lambda release, case: (
        "fa3" if release in AFFECTED or case.spec.dtype.startswith("float8") else "fa2"
    )
)


@pytest.mark.parametrize(
    ("claim", "slow", "mixed", "even"),
    [
        ("prior-to-064", "confirmed", "partly", "refuted"),
        ("upgrade-resolves", "refuted", "partly", "confirmed"),
        ("cuda-graph-wrapper", "confirmed", "partly", "refuted"),
        ("root-cause", "confirmed", "partly", "refuted"),
        ("fa3-is-slow", "confirmed", "partly", "refuted"),
        ("less-optimal-somewhere", "confirmed", "confirmed", "refuted"),
        ("pin-backend-fa2", "confirmed", "partly", "refuted"),
    ],
)
def test_a_check_of_times_says_each_word(claim, slow, mixed, even):
    assert [verdict(claim, frame) for frame in (SLOW, MIXED, EVEN)] == [slow, mixed, even]


@pytest.mark.parametrize(
    ("claim", "fa3", "history", "fa2"),
    [
        ("auto-defaults-to-fa3", "confirmed", "partly", "refuted"),
        ("auto-fa3-since-06", "partly", "confirmed", "partly"),
        ("hopper-falls-to-fa3", "confirmed", "confirmed", "refuted"),
        ("new-auto-is-fa2", "refuted", "partly", "confirmed"),
        ("auto-is-fa3-or-fa2", "confirmed", "confirmed", "confirmed"),
    ],
)
def test_a_check_of_kernels_says_each_word(claim, fa3, history, fa2):
    frames = (FA3_EVERYWHERE, AS_IT_WAS, FA2_EVERYWHERE)
    assert [verdict(claim, frame) for frame in frames] == [fa3, history, fa2]


def test_a_third_backend_refutes_that_there_are_two():
    assert verdict("auto-is-fa3-or-fa2", resolution(lambda *_: "cudnn")) == "refuted"


@pytest.mark.parametrize(
    ("figure", "word"), [(5.0, "confirmed"), (5.9, "confirmed"), (2.0, "refuted"), (9.0, "refuted")]
)
def test_a_figure_is_held_to_a_quarter_either_way(figure, word):
    assert verdict("fa3-5x-slower", SLOW, figure) == word


def test_a_figure_that_only_some_shapes_reach_holds_partly():
    frame = regression(by_place(HEADLINE, {1: 5.0, 4: 30.0}, 1.2))
    assert HEADLINE[1] in LONG and HEADLINE[4] in LONG
    assert verdict("fa3-5x-slower", frame, 5.0) == "partly"
    assert verdict("fa3-5x-slower", frame, 12.0) == "partly", "inside the range, at no shape"


def test_short_sequences_have_no_say_in_a_claim_about_long_ones():
    short = {place: 1.0 for place, case in enumerate(HEADLINE) if case not in LONG}
    assert verdict("fa3-5x-slower", regression(by_place(HEADLINE, short, 5.0))) == "confirmed"


@pytest.mark.parametrize("claim", ["fa3-is-slow", "less-optimal-somewhere"])
def test_one_round_leaves_a_claim_open(claim):
    assert verdict(claim, SLOW[SLOW["round"] == 0]) == "open"


@pytest.mark.parametrize("claim", ["fa3-kernel-name", "fa2-kernel-name"])
def test_a_kernel_name_is_the_whole_name(claim):
    assert verdict(claim, SLOW) == "confirmed"
    longer = SLOW.kernels.map(lambda kernels: ran(f"FP8{kernels[0].name}"))
    assert verdict(claim, SLOW.assign(kernels=longer)) == "refuted"
    other = SLOW.kernels.where(SLOW["round"] == 0, pd.Series([ran("X")] * len(SLOW)))
    assert verdict(claim, SLOW.assign(kernels=other)) == "partly"


def test_a_pin_that_ran_something_else_is_refuted():
    other = SLOW.kernel_family.where(SLOW["round"] == 0, "fa3")
    assert verdict("pin-backend-fa2", SLOW.assign(kernel_family=other)) == "refuted"


def test_what_ran_is_the_family_or_what_went_wrong_oldest_release_first():
    failed = AS_IT_WAS.status.where(AS_IT_WAS.release != NEWEST, "error")
    found = judged("auto-is-fa3-or-fa2", AS_IT_WAS.assign(status=failed).iloc[::-1])
    assert (
        found.measured == "error: 0.7.2.post1; fa2: 0.5.3, 0.6.4; fa3: 0.6.0, 0.6.1, 0.6.2, 0.6.3"
    )


def test_a_release_that_is_not_on_record_is_noticed():
    with pytest.raises(MissingRecordsError, match=r"flashinfer-auto: 4 of 8 records in 0\.6\.4, 0"):
        judged("new-auto-is-fa2", AS_IT_WAS[AS_IT_WAS.release != FIXED])


def test_blackwell_is_read_in_the_rules_and_stands_on_no_record():
    found = judged("sm100-never-fa3", FA2_EVERYWHERE)
    assert (found.verdict, found.records) == ("not measurable here", ())
    assert "give fa2 there" in found.reason


ENTRY = {
    "study": "fa3_decode_regression",
    "cases": "headline",
    "backend": FA3,
    "release": REGRESSED,
    "expect": "slower",
    "over": FA2,
    "says": "It is {counts}.",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cases": "tail"}, "cases in the check of x must be one of all, .*headline.*, got 'tail'"),
        ({"study": "none"}, "study in the check of x must be one of .*, got 'none'"),
        ({"expect": "swifter"}, "expect in the check of x must be one of slower, .*'swifter'"),
        ({"backend": "fa4"}, "backend in the check of x must be one of .*, got 'fa4'"),
        ({"over": "fa4"}, "backend in the check of x must be one of .*, got 'fa4'"),
        ({"release": "9.9"}, "release in the check of x must be measured, flashinfer-fa3==9.9"),
        ({"says": "{mean}"}, "says in the check of x must be one of figure, .*, got 'mean'"),
        ({"tells": "so"}, "check of x must be one of study, .*, got 'tells'"),
        ({"kernel": "K"}, "check of x must have one of expect, ran and kernel"),
        ({"over": None}, "check of x must have over if it has expect, and only then"),
        ({"study": None}, "check of x must have study, it has cases"),
    ],
)
def test_an_unknown_word_is_refused_with_the_claims_name(change, message):
    entry = {name: value for name, value in (ENTRY | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        expected.expected("x", entry)
