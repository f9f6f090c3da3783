"""The checks: each says confirmed, refuted or partly of records made to be so."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd
import pytest
from support.frames import ran

from attnlib.kinds.decode.case import DecodeCase
from attnlib.run.frame import AUTO, FA2, FA3, GRAPH_AUTO
from attnlib.studies import STUDIES
from attnlib.studies.auto_resolution.study import RESOLUTION_CASES
from attnlib.studies.fa3_decode_regression import checks as claim_checks
from attnlib.studies.fa3_decode_regression.checks import CHECKS
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
LONG = [case for case in HEADLINE if case.kv_len >= claim_checks.LONG_KV_LEN]
Factor = Callable[[DecodeCase], float]


def rows(
    cases: Iterable[DecodeCase],
    backend: str,
    release: str,
    factor: Factor,
    *,
    rounds: int = 2,
    **more: object,
) -> list[dict]:
    """Records of one backend and release, each round `factor` times 100 us and exactly so."""
    kernel = "PrefillWithKVCacheKernel" if backend == FA3 else "BatchPrefillWithPagedKVCacheKernel"
    same = {"release": release, "timer": "graph", "status": "ok", "throttled": False}
    same |= {"backend": backend, "gpu_id": "0badcafe", "power_limit_w": 700, "schema": 1}
    return [
        {
            "case": case,
            **case.to_dict(),
            "heads": case.spec.heads,
            "id": f"{backend} {release} {case.label} {round_}",
            "round": round_,
            "run_us": 100.0 * factor(case),
            "kernel_family": "fa2",
            "kernels": ran(kernel, "Merge", "Merge"),
            **same,
            **more,
        }
        for case in dict.fromkeys(cases)
        for round_ in range(rounds)
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
        chosen = by_release.get(release, factor)
        for backend in (AUTO, GRAPH_AUTO):
            found += rows(HEADLINE, backend, release, chosen)
        if release != REGRESSED:
            found += rows(HEADLINE, FA2, release, lambda _: 1.0)
    return pd.DataFrame(found)


def resolution(family: Callable[[str, DecodeCase], str]) -> pd.DataFrame:
    """What `auto` ran, by release and case."""
    found = []
    for release in dict.fromkeys((BEFORE, *AFFECTED, FIXED, NEWEST)):
        for case in RESOLUTION_CASES:
            ran = family(release, case)
            found += rows([case], AUTO, release, lambda _: 1.0, rounds=1, kernel_family=ran)
    return pd.DataFrame(found)


def said(name: str, frame: pd.DataFrame, figure: float | None = None) -> str:
    return CHECKS[name][1](frame, figure).verdict


SLOW, EVEN = regression(lambda _: 5.0), regression(lambda _: 1.0)
MIXED = regression(
    lambda case: 1.0 if case in (HEADLINE[0], WIDE[3]) else 5.0, **{BEFORE: lambda _: 1.0}
)
FA3_EVERYWHERE = resolution(lambda *_: "fa3")
FA2_EVERYWHERE = resolution(lambda *_: "fa2")
AS_IT_WAS = resolution(
    lambda release, case: (
        "fa3" if release in AFFECTED or case.spec.dtype.startswith("float8") else "fa2"
    )
)


@pytest.mark.parametrize(
    ("name", "slow", "mixed", "even"),
    [
        ("slower_before_fix", "confirmed", "partly", "refuted"),
        ("same_since_fix", "refuted", "partly", "confirmed"),
        ("graph_wrapper_slower", "confirmed", "partly", "refuted"),
        ("auto_slower", "confirmed", "partly", "refuted"),
        ("fa3_slower", "confirmed", "partly", "refuted"),
        ("fa3_slower_somewhere", "confirmed", "confirmed", "refuted"),
        ("pin_runs_fa2", "confirmed", "partly", "refuted"),
    ],
)
def test_a_check_of_times_says_each_word(name, slow, mixed, even):
    assert (said(name, SLOW), said(name, MIXED), said(name, EVEN)) == (slow, mixed, even)


@pytest.mark.parametrize(
    ("name", "fa3", "history", "fa2"),
    [
        ("fa3_before_fix", "confirmed", "partly", "refuted"),
        ("fa3_since_06", "partly", "confirmed", "partly"),
        ("fa3_for_every_dtype", "confirmed", "confirmed", "refuted"),
        ("fa2_since_fix", "refuted", "partly", "confirmed"),
        ("only_fa2_or_fa3", "confirmed", "confirmed", "confirmed"),
    ],
)
def test_a_check_of_kernels_says_each_word(name, fa3, history, fa2):
    found = tuple(said(name, frame) for frame in (FA3_EVERYWHERE, AS_IT_WAS, FA2_EVERYWHERE))
    assert found == (fa3, history, fa2)


def test_a_third_backend_refutes_that_there_are_two():
    assert said("only_fa2_or_fa3", resolution(lambda *_: "cudnn")) == "refuted"


@pytest.mark.parametrize(
    ("figure", "word"), [(5.0, "confirmed"), (5.9, "confirmed"), (2.0, "refuted"), (9.0, "refuted")]
)
def test_a_figure_is_held_to_a_quarter_either_way(figure, word):
    assert said("figure_at_long_lengths", SLOW, figure) == word


def test_a_figure_that_only_some_shapes_reach_holds_partly():
    frame = regression(by_place(HEADLINE, {1: 5.0, 4: 30.0}, 1.2))
    assert HEADLINE[1] in LONG and HEADLINE[4] in LONG
    assert said("figure_at_long_lengths", frame, 5.0) == "partly"
    assert said("figure_at_long_lengths", frame, 12.0) == "partly", "inside the range, at no shape"


def test_short_sequences_have_no_say_in_a_claim_about_long_ones():
    short = {place: 1.0 for place, case in enumerate(HEADLINE) if case not in LONG}
    assert said("figure_at_long_lengths", regression(by_place(HEADLINE, short, 5.0)), 5.0) == (
        "confirmed"
    )


def test_one_round_leaves_a_claim_open():
    assert said("fa3_slower", SLOW[SLOW["round"] == 0]) == "open"
    assert said("fa3_slower_somewhere", SLOW[SLOW["round"] == 0]) == "open"


@pytest.mark.parametrize("name", ["fa3_kernel_name", "fa2_kernel_name"])
def test_a_kernel_name_is_the_whole_name(name):
    assert said(name, SLOW) == "confirmed"
    longer = [ran(*(f"FP8{kernel.name}" for kernel in kernels)) for kernels in SLOW.kernels]
    assert said(name, SLOW.assign(kernels=longer)) == "refuted"
    some = [k if r == 0 else ran("X") for k, r in zip(SLOW.kernels, SLOW["round"], strict=True)]
    assert said(name, SLOW.assign(kernels=some)) == "partly"


def test_a_pin_that_ran_something_else_is_refuted():
    other = SLOW.kernel_family.where(SLOW["round"] == 0, "fa3")
    assert said("pin_runs_fa2", SLOW.assign(kernel_family=other)) == "refuted"


def test_blackwell_is_read_in_the_rules_and_stands_on_no_record():
    found = CHECKS["sm100_by_rule"][1](FA2_EVERYWHERE, None)
    assert (found.verdict, found.records) == ("not measurable here", ())
    assert "give fa2 there" in found.reason


def test_every_check_reads_a_study_that_is_there():
    assert {study for studies, _ in CHECKS.values() for study in studies} <= set(STUDIES)
    assert [name for name, (_, check) in CHECKS.items() if not check.__doc__] == []
