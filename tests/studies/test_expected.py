"""Checks that are data: each says confirmed, refuted or partly of records made to be so."""

from itertools import product

import pandas as pd
import pytest
from support.frames import ran
from support.ledger import judged, published, row, verdict

from attnlib.run.frame import AUTO, FA2, FA3
from attnlib.studies import claims, expected
from attnlib.studies.evidence import MissingRecordsError
from attnlib.studies.fa3_decode_regression.study import BEFORE, HEADLINE, LONG, REGRESSED

CHECKS = {name: claims.check_of(claim) for name, claim in published().items()}
DATA = {name: each for name, each in CHECKS.items() if isinstance(each, expected.Expected)}
TIMES = [name for name, check in DATA.items() if check.expect]
RAN = [name for name, check in DATA.items() if check.ran]
NAMES = [name for name, check in DATA.items() if check.kernel]
VERDICTS = {"faster": 0.5, "same": 1.0, "slower": 2.0}
"""Verdict -> a time over another's of which it is said."""


def rows(cases, side, factor, **told):
    """Two rounds of a side at each case, `factor` times 100 us and exactly so."""
    backend, _, release = side.partition("==")
    told |= {"release": release}
    return [row(c, backend, 100.0 * factor(c), round=n, **told) for c in cases for n in (0, 1)]


def timed(check, factor):
    """Both sides of all that a check compares, the first `factor` times the second."""
    found = []
    for above, below in check.pairs:
        for side, times in ((above, factor), (below, lambda _: 1.0)):
            pin = check.pinned.get(side.partition("==")[0], "")
            found += rows(check.asked, side, times, timer=check.timer, kernel_family=pin)
    return pd.DataFrame(found).drop_duplicates("id", ignore_index=True)


def resolved(check, family):
    """What a backend ran, by release and case."""
    (name,) = check.backend
    return pd.DataFrame(
        row(case, name, 100.0, release=release, kernel_family=family(release, case))
        for release, case in product(check.ran, check.asked)
    )


def of(name, frame):
    """The verdict on a claim, by its whole name."""
    figure = published()[name].figure
    return DATA[name].find(frame, figure.value if figure else None).verdict


@pytest.mark.parametrize("name", [name for name in TIMES if "about" not in DATA[name].expect])
def test_a_claim_about_times_holds_where_all_cases_say_so_and_partly_where_some_do(name):
    check = DATA[name]
    for word, factor in VERDICTS.items():
        holds = "confirmed" if {word, "any"} & {*check.expect} else "refuted"
        assert of(name, timed(check, lambda _, us=factor: us)) == holds
    first = check.asked[0]
    some = timed(check, lambda case: 2.0 if case == first else 0.5)
    always = check.somewhere or check.expect == ("any",)
    assert of(name, some) == ("confirmed" if always else "partly")
    once = some[some["round"] == 0]
    assert of(name, once) == ("confirmed" if check.expect == ("any",) else "open")


@pytest.mark.parametrize("name", [name for name in TIMES if "about" in DATA[name].expect])
def test_a_figure_without_a_shape_is_refuted_outside_the_range_and_undecided_inside(name):
    check, figure = DATA[name], published()[name].figure.value
    for factor in (0.5, 2.0):
        assert of(name, timed(check, lambda _, us=figure * factor: us)) == "refuted"
    first, *_ = check.asked
    around = timed(check, lambda case: 0.5 if case == first else 2 * figure)
    assert of(name, around) == "not measurable here"


@pytest.mark.parametrize("name", TIMES)
def test_a_lost_record_leaves_a_claim_open(name):
    frame = timed(DATA[name], lambda _: 2.0)
    with pytest.raises(MissingRecordsError, match="one lacks some"):
        of(name, frame.drop(frame.index[0]))


@pytest.mark.parametrize("name", [name for name in TIMES if DATA[name].pinned])
def test_a_pin_that_ran_something_else_is_refuted(name):
    check = DATA[name]
    frame = timed(check, lambda _: 2.0)
    assert of(name, frame) == "confirmed"
    frame.loc[frame.backend.isin(check.pinned).idxmax(), "kernel_family"] = "fa3"
    assert of(name, frame) == "refuted", "one record is enough"


@pytest.mark.parametrize("name", RAN)
def test_a_claim_about_kernels_holds_where_each_release_ran_what_it_should(name):
    check = DATA[name]
    for place in (0, -1):
        right = {release: told.split(" or ")[place] for release, told in check.ran.items()}
        assert of(name, resolved(check, lambda release, _, ran=right: ran[release])) == "confirmed"
    assert of(name, resolved(check, lambda *_: "cudnn")) == "refuted"
    last = (list(check.ran)[-1], check.asked[-1])
    some = resolved(check, lambda *each: "cudnn" if each == last else right[each[0]])
    assert of(name, some) == ("refuted" if len(some) == 1 else "partly")
    with pytest.raises(MissingRecordsError, match=rf"{AUTO}: \d+ of {len(some)} records in "):
        of(name, some[:-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_name_is_the_whole_name(name):
    check = DATA[name]
    ((side, _),) = check.pairs
    whole, longer = ran(check.kernel, "Merge", "Merge"), ran(f"FP8{check.kernel}")
    frame = pd.DataFrame(rows(check.asked, side, lambda _: 1.0, kernels=whole))
    assert of(name, frame) == "confirmed"
    assert of(name, frame.assign(kernels=[longer] * len(frame))) == "refuted"
    first = frame.kernels.where(frame["round"] == 0, pd.Series([longer] * len(frame)))
    assert of(name, frame.assign(kernels=first)) == "partly"


@pytest.mark.parametrize(
    ("before", "since", "word"), [(5, 5, "confirmed"), (1, 5, "partly"), (1, 1, "refuted")]
)
def test_both_releases_before_the_fix_must_be_slow(before, since, word):
    found = []
    for release, factor in ((BEFORE, before), (REGRESSED, since)):
        found += rows(HEADLINE, f"{AUTO}=={release}", lambda _, us=factor: us)
        found += rows(HEADLINE, f"{FA2}=={release}", lambda _: 1.0)
    assert verdict("prior-to-064", pd.DataFrame(found)) == word


def test_long_sequences_are_those_of_8192_tokens_and_more():
    assert DATA["mini-sglang-99-fa3-5x-slower"].asked == [*LONG]
    assert {case.kv_len >= 8192 for case in LONG} == {True} and len(LONG) < len(HEADLINE)


def test_what_ran_is_the_family_or_what_went_wrong_oldest_release_first():
    check = DATA["sglang-18364-auto-is-fa3-or-fa2"]
    frame = resolved(check, lambda release, _: "fa3" if "0.6.0" <= release < "0.6.4" else "fa2")
    failed = frame.status.mask(frame.release == "0.7.2.post1", "error")
    found = judged("auto-is-fa3-or-fa2", frame.assign(status=failed).iloc[::-1])
    fa3 = "fa3: 0.6.0, 0.6.1, 0.6.2, 0.6.3"
    assert found.measured == f"error: 0.7.2.post1; fa2: 0.5.3, 0.6.4; {fa3}"


def test_blackwell_is_read_in_the_rules_and_stands_on_no_record():
    found = judged("sm100-never-fa3", pd.DataFrame())
    assert (found.verdict, found.records) == ("confirmed", ())
    assert "fa2 there" in found.reason and "No such GPU" in found.reason


ENTRY = {"study": "fa3_decode_regression", "cases": "headline", "backend": FA3, "over": FA2}
ENTRY |= {"release": REGRESSED, "expect": "slower", "says": "It is {counts}."}


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
