"""Ratios of paired rounds: right where the answer is known, honest where there is too little."""

import math
from functools import partial

import numpy as np
import pytest

from attnlib.measure.stats import (
    CONFIDENCE,
    LONG_MARGIN,
    SHORT_MARGIN,
    judge_ratios,
    judge_savings,
    mean_interval,
    tally,
    why_inconclusive,
)

LOOKS = (4, 8, 16, 24)
TRUTH = 1.5
JUST_SLOWER = 1.0205
"""Beyond the margin of a long call by next to nothing, where `same` is wrong most easily."""
RIGHT = {
    1.0: ("same", "not slower"),
    1.05: ("slower",),
    0.95: ("faster", "not slower"),
    JUST_SLOWER: ("slower",),
    # Savings.
    0.0: (),
    5.0: ("faster",),
}
"""The verdicts that are right, by the true ratio, or by the microseconds that are saved."""
TRUTHS = [(1.0,), (JUST_SLOWER,), (1.0, 1.05, 0.95)]


def experiment(seed, rounds=8):
    """Two backends, one TRUTH times as slow, with 2 % noise each and a drift that both share."""
    rng = np.random.default_rng(seed)
    drift = np.exp(rng.normal(0, 0.3, rounds))
    noise = np.exp(rng.normal(0, 0.02, (2, rounds)))
    return TRUTH * 100 * drift * noise[0], 100 * drift * noise[1]


def judged(pair, **options):
    (row,) = judge_ratios([pair], **options)
    return row


def test_the_interval_holds_the_truth_however_the_gpu_drifted_and_has_no_favourite_side():
    a, b = experiment(3)
    result = judged((a, b))
    inverse = judged((b, a))
    assert result.low < TRUTH < result.high
    assert result.high / result.low < 1.1
    bounds = (1 / inverse.ratio, 1 / inverse.high, 1 / inverse.low)
    assert bounds == pytest.approx((result.ratio, result.low, result.high))


# Rows with fewer than three get no verdict.
@pytest.mark.parametrize("rounds", [3, 20])
def test_the_interval_holds_the_truth_about_as_often_as_it_claims(rounds):
    intervals = [judged(experiment(seed, rounds)) for seed in range(400)]
    held = sum(result.low <= TRUTH <= result.high for result in intervals) / len(intervals)
    assert held == pytest.approx(CONFIDENCE, abs=0.05)


@pytest.mark.parametrize("judge", [judge_ratios, judge_savings])
def test_one_round_decides_nothing_and_rounds_that_do_not_pair_are_refused(judge):
    (result,) = judge([([3.0], [1.0])])
    assert result.verdict == "inconclusive"
    assert result.rounds == 1
    assert math.isnan(result.low)
    assert math.isnan(result.high)
    assert judge([]) == []
    for left, right in (
        ([1.0, 2.0], [1.0]),
        ([], []),
        ([0.0], [1.0]),
        ([1.0], [math.nan]),
    ):
        with pytest.raises(ValueError, match="the same number of times above 0, at least one, got"):
            judge([(left, right)])


@pytest.mark.parametrize(
    "numerators, us, word",
    [
        ([2.0, 2.01, 1.99], 100.0, "slower"),
        ([0.5, 0.501, 0.499], 100.0, "faster"),
        ([1.001, 1.0, 0.999], 100.0, "same"),
        ([0.9, 1.0, 1.1], 100.0, "inconclusive"),
        ([1.03, 1.031, 1.029], 100.0, "slower"),
        ([1.03, 1.031, 1.029], 10.0, "same"),
        ([0.97, 0.969, 0.971], 10.0, "same"),
    ],
)
def test_a_verdict_needs_an_interval_and_an_effect_beyond_the_margin(numerators, us, word):
    result = judged(([us * each for each in numerators], [us] * 3))
    margin = SHORT_MARGIN if us < 30 else LONG_MARGIN
    assert result.verdict == word
    assert result.margin == margin


@pytest.mark.parametrize(
    "ratio, spread, word",
    [
        (1.0, 0.001, "not slower"),
        (1.015, 0.001, "not slower"),
        (0.95, 0.001, "faster"),
        (1.04, 0.001, "slower"),
        (1.0, 0.05, "inconclusive"),
        (1.0195, 0.001, "inconclusive"),
    ],
)
def test_not_slower_than_a_margin_needs_an_interval_that_ends_below_it(ratio, spread, word):
    logs = np.log(ratio) + spread * np.array([-1.0, 1.0, -1.0, 1.0])
    result = judged((np.exp(logs), [1.0] * 4), not_slower=0.02)
    assert result.verdict == word
    assert result.margin == 0.02


def assert_rarely_wrong(tables, draw_table, judge):
    """Of `tables` tables drawn at random, about one in twenty or fewer has any wrong verdict.

    `draw_table` draws the truth of each row and its pair of times.
    """
    rng = np.random.default_rng(7)
    wrong = 0
    error = 1 - CONFIDENCE
    for _ in range(tables):
        truths, pairs = draw_table(rng)
        rows = zip(truths, judge(pairs), strict=True)
        decided = [(truth, row.verdict) for truth, row in rows if row.verdict != "inconclusive"]
        wrong += any(verdict not in RIGHT[truth] for truth, verdict in decided)
    # More than two standard errors above 5 % would show a wrong rule.
    assert wrong / tables <= error + 2 * math.sqrt(error / tables)


def drawing(truths, rows, sigma, rounds):
    """Draws tables of calls of 100 us whose ratios are of `truths`, with noise `sigma`."""

    def draw_table(rng):
        drawn = rng.choice(truths, rows)
        a, b = 100 * np.exp(
            rng.normal(
                0,
                sigma,
                (
                    2,
                    rows,
                    rounds,
                ),
            )
        )
        return drawn, list(zip(a * drawn[:, None], b, strict=True))

    return draw_table


@pytest.mark.parametrize("sigma", [0.01, 0.05])
@pytest.mark.parametrize("truths", TRUTHS)
@pytest.mark.parametrize(
    "rows, not_slower",
    [
        (1, 0.0),
        (6, 0.0),
        (6, 0.02),
    ],
)
def test_about_one_table_in_twenty_or_fewer_has_a_wrong_verdict(sigma, truths, rows, not_slower):
    judge = partial(judge_ratios, not_slower=not_slower)
    assert_rarely_wrong(200, drawing(truths, rows, sigma, 4), judge)


def unequal(rows, rounds, spread=0.9):
    """Draws tables of calls of 100 us, none faster, whose noise differs from row to row."""

    def draw_table(rng):
        sigma = 0.006 * np.exp(rng.normal(0, spread, rows))[:, None]
        a, b = 100 * np.exp(sigma * rng.normal(0, 1, (2, rows, rounds)))
        return np.ones(rows), list(zip(a, b, strict=True))

    return draw_table


@pytest.mark.parametrize("rounds", [3, 4])
@pytest.mark.parametrize(("rows", "tables"), [(40, 200), (200, 60)])
def test_large_tables_of_unequal_noise_have_few_wrong_verdicts(rows, tables, rounds):
    rng = np.random.default_rng(11)
    draw_table = unequal(rows, rounds)
    wrong = 0
    for _ in range(tables):
        truths, pairs = draw_table(rng)
        words = {row.verdict for row in judge_ratios(pairs)}
        wrong += bool(words & {"faster", "slower"})
    # Near 5 %: an estimate of each row's variance from three rounds costs some of it.
    assert wrong / tables <= 0.09 + 2 * math.sqrt(0.09 / tables)


def test_two_rounds_decide_nothing_and_do_not_share_the_error():
    clear = ([200.0, 201.0], [100.0, 100.1])
    assert judged(clear).verdict == "inconclusive" and judged(clear).low > 1
    barely = np.exp(np.log(1.05) + 0.004 * np.array([-1, 1, -1, 1]))
    alone = judged((barely, np.ones(4)))
    beside = judge_ratios([(barely, np.ones(4)), *[clear] * 50])
    assert (alone.verdict, beside[0].verdict) == ("slower", "slower")
    assert {row.verdict for row in beside[1:]} == {"inconclusive"}
    (saving,) = judge_savings([([20.0, 20.1], [10.0, 10.1])])
    assert saving.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("us", "widened", "margin"),
    [(10.0, True, 0.04), (10.0, False, 0.02), (100.0, True, 0.02), (100.0, False, 0.02)],
)
def test_a_margin_that_was_asked_for_is_widened_for_short_calls_alone(us, widened, margin):
    times = ([us * 1.03, us * 1.031, us * 1.029, us * 1.03], [us] * 4)
    result = judged(times, not_slower=0.02, widened=widened)
    assert result.margin == margin
    assert result.verdict == ("not slower" if margin == 0.04 else "slower")
    wide = judged(times, not_slower=0.1, widened=widened)
    assert wide.margin == 0.1


@pytest.mark.parametrize("truths", TRUTHS[:2])
def test_looking_again_and_again_gives_no_more_wrong_tables(truths):
    def judge(pairs):
        """Each row's verdict of the first look that has one."""
        by_look = [
            judge_ratios([(a[:n], b[:n]) for a, b in pairs], looks=len(LOOKS)) for n in LOOKS
        ]
        rows = zip(*by_look, strict=True)
        return [next((v for v in row if v.verdict != "inconclusive"), row[-1]) for row in rows]

    assert_rarely_wrong(300, drawing(truths, 3, 0.02, LOOKS[-1]), judge)


def test_about_one_table_in_twenty_or_fewer_has_a_wrong_saving():
    def draw_table(rng):
        saved = np.repeat([0.0, 5.0], [8, 2])
        before, after = 50 + rng.normal(0, 1, (2, 10, 4))
        return saved, list(zip(before + saved[:, None], after, strict=True))

    assert_rarely_wrong(300, draw_table, judge_savings)


def test_a_row_is_judged_with_what_the_table_knows_of_noise():
    rng = np.random.default_rng(5)
    steady = [(2 * np.exp(rng.normal(0, 0.001, 4)), np.ones(4)) for _ in range(7)]
    doubtful = (
        np.exp(np.log(1.05) + 0.02 * np.array([-1, 1, -1, 1])),
        np.ones(4),
    )
    alone = judged(doubtful)
    among = judge_ratios([doubtful, *steady])[0]
    assert among.ratio == alone.ratio == pytest.approx(1.05)
    assert among.high - among.low < alone.high - alone.low


def test_a_saving_is_the_mean_difference_with_students_interval():
    (result,) = judge_savings(
        [
            (
                [10.0, 12.0, 14.0],
                [9.0, 9.0, 9.0],
            )
        ]
    )
    reach = 4.302653 * 2 / math.sqrt(3)
    assert (
        result.saved,
        result.low,
        result.high,
    ) == pytest.approx((3.0, 3 - reach, 3 + reach))
    assert result.verdict == "inconclusive"


def test_the_interval_of_a_mean_over_batches_holds_the_truth_about_as_often_as_it_claims():
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        ratios = np.exp(rng.normal(0.05, 0.2, 200))
        low, high = mean_interval(ratios)
        held += low <= np.exp(0.05) <= high
    assert held / 200 == pytest.approx(CONFIDENCE, abs=0.04)
    assert all(math.isnan(end) for end in mean_interval([1.5]))


def test_why_a_row_is_inconclusive_is_said_by_its_rounds():
    verdicts = ["same", "inconclusive", "inconclusive", "inconclusive"]
    told = tally(verdicts, [4, 2, 2, 4])
    assert told == (
        "2 inconclusive (2 rounds: no verdict, it needs 3), 1 same, "
        "1 inconclusive (the interval spans the margin)"
    )
    assert why_inconclusive(1).startswith("1 round: ")
