"""Ratios of paired rounds: right where the answer is known, honest where there is too little."""

import math
from collections import Counter
from dataclasses import astuple

import numpy as np
import pytest

from attnlib.measure.stats import (
    CONFIDENCE,
    ERROR,
    LOOKS,
    aa_noise,
    gap_table,
    judge,
    judge_table,
    paired_gap,
    paired_ratio,
)

TRUTH, NAN = 1.5, float("nan")


def experiment(seed, rounds=8):
    """Two backends, one TRUTH times as slow, with 2 % noise each and a drift that both share."""
    rng = np.random.default_rng(seed)
    drift = np.exp(rng.normal(0, 0.3, rounds))
    noise = np.exp(rng.normal(0, 0.02, (2, rounds)))
    return TRUTH * 100 * drift * noise[0], 100 * drift * noise[1]


@pytest.mark.parametrize(
    ("numerators", "denominators", "ratio"),
    [
        ([3.0], [2.0], 1.5),
        ([2.0, 8.0], [1.0, 2.0], math.sqrt(8)),
        ([1.0, 1.0, 8.0], [1.0, 1.0, 1.0], 2.0),
    ],
)
def test_the_ratio_is_the_geometric_mean_over_pairs(numerators, denominators, ratio):
    found = paired_ratio(numerators, denominators)
    assert found.ratio == pytest.approx(ratio)
    assert found.pairs == len(numerators)


def test_the_interval_holds_the_ratio_and_the_truth_however_the_gpu_drifted():
    found = paired_ratio(*experiment(3))
    assert found.low < found.ratio < found.high and found.low < TRUTH < found.high
    assert found.high / found.low < 1.1
    inverse = paired_ratio(*reversed(experiment(3)))
    bounds = (1 / inverse.ratio, 1 / inverse.high, 1 / inverse.low)
    assert bounds == pytest.approx((found.ratio, found.low, found.high))
    agreed = paired_ratio([30.0, 60.0, 90.0], [20.0, 40.0, 60.0])
    assert (agreed.ratio, agreed.low, agreed.high) == pytest.approx((1.5, 1.5, 1.5))


# Three rounds are what the published studies have.
@pytest.mark.parametrize("rounds", [3, 20])
def test_the_interval_holds_the_truth_about_as_often_as_it_claims(rounds):
    intervals = [paired_ratio(*experiment(seed, rounds)) for seed in range(400)]
    held = sum(found.low <= TRUTH <= found.high for found in intervals) / len(intervals)
    assert held == pytest.approx(CONFIDENCE, abs=0.05)


@pytest.mark.parametrize(("paired", "value"), [(paired_ratio, 3.0), (paired_gap, 2.0)])
def test_one_pair_gives_no_interval_and_rounds_that_do_not_pair_are_refused(paired, value):
    assert astuple(paired([3.0], [1.0])) == pytest.approx((value, NAN, NAN, 1), nan_ok=True)
    for left, right in (([1.0, 2.0], [1.0]), ([], [])):
        counts = f"got {len(left)} and {len(right)}"
        with pytest.raises(ValueError, match=f"s and .* must be equally many, .*{counts}"):
            paired(left, right)


ROUNDS, SAMPLES = 8, 30
PROCESS_DRIFT, SAMPLE_NOISE = 0.01, 0.007


def processes(rng, true_us):
    """Samples [rounds, samples]: 1 % drift from process to process, 0.7 % noise within one."""
    drift = rng.normal(0, PROCESS_DRIFT, (ROUNDS, 1))
    noise = rng.normal(0, SAMPLE_NOISE, (ROUNDS, SAMPLES))
    return true_us * np.exp(drift + noise)


def pooled_test_finds_a_difference(a, b):
    """What most scripts do: Welch's test over all samples as if they were independent."""
    error = math.sqrt(a.var(ddof=1) / a.size + b.var(ddof=1) / b.size)
    return abs(a.mean() - b.mean()) / error > 1.96


def share(effect, finds):
    """How often `finds` says yes of two backends, one slower by `effect`, over 500 experiments."""
    rng = np.random.default_rng(7)
    pairs = ((processes(rng, 100 * (1 + effect)), processes(rng, 100.0)) for _ in range(500))
    return sum(finds(a, b) for a, b in pairs) / 500


@pytest.mark.parametrize(
    ("effect", "words", "least", "most"),
    [
        pytest.param(0.0, ("faster", "slower"), 0, 0.05, id="equal backends are rarely told apart"),
        pytest.param(0.01, ("slower",), 0, 0.05, id="an effect below the margin is not found"),
        pytest.param(0.03, ("slower",), 0.8, 1, id="3 percent are found in four of five studies"),
    ],
)
def test_how_often_a_verdict_finds_an_effect(effect, words, least, most):
    def found(a, b):
        return judge(np.median(a, axis=1), np.median(b, axis=1), noise=0.0).word in words

    assert least <= share(effect, found) <= most


def test_a_test_on_pooled_samples_calls_equal_backends_different_most_of_the_time():
    assert share(0.0, pooled_test_finds_a_difference) > 0.5


@pytest.mark.parametrize(
    ("numerators", "noise", "word"),
    [
        ([2.0, 2.01, 1.99], 0.0, "slower"),
        ([0.5, 0.501, 0.499], 0.0, "faster"),
        ([1.001, 1.0, 0.999], 0.0, "same"),
        ([0.9, 1.0, 1.1], 0.0, "ambiguous"),
        ([1.03, 1.031, 1.029], 0.0, "slower"),
        ([1.03, 1.031, 1.029], 0.05, "same"),
        ([2.0], 0.0, "ambiguous"),
    ],
)
def test_a_verdict_needs_interval_and_margin_both(numerators, noise, word):
    found = judge(numerators, [1.0] * len(numerators), noise=noise)
    assert (found.word, found.margin) == (word, max(0.02, noise))


def test_the_aa_noise_is_the_95th_percentile_whichever_side_is_slower():
    ratios = [1.0] * 18 + [1.04, 1 / 1.04]
    assert aa_noise(ratios) == pytest.approx(0.04, rel=0.1)
    assert aa_noise(ratios) == pytest.approx(aa_noise([1 / r for r in ratios]))
    with pytest.raises(ValueError, match="ratios must be at least 8 A/A pairs, got 3"):
        aa_noise(ratios[:3])


def test_a_percentile_bootstrap_of_three_rounds_would_claim_far_too_much():
    rng, held = np.random.default_rng(3), 0
    for seed in range(400):
        a, b = experiment(seed, 3)
        means = np.log(a / b)[rng.integers(0, 3, (1000, 3))].mean(axis=1)
        low, high = np.percentile(means, [2.5, 97.5])
        held += low <= math.log(TRUTH) <= high
    assert held / 400 < 0.8


def test_a_gap_is_the_mean_difference_with_students_interval():
    found = paired_gap([10.0, 12.0, 14.0], [9.0, 9.0, 9.0])
    reach = 4.302653 * 2 / math.sqrt(3)
    assert astuple(found) == pytest.approx((3.0, 3 - reach, 3 + reach, 3))


@pytest.mark.parametrize(
    ("ratio", "spread", "word"),
    [
        (1.0, 0.001, "not slower"),
        (1.015, 0.001, "not slower"),
        (0.99, 0.001, "not slower"),
        (0.95, 0.001, "faster"),
        (1.04, 0.001, "slower"),
        (1.0, 0.05, "ambiguous"),
        (1.0195, 0.001, "ambiguous"),
    ],
)
def test_not_slower_than_a_margin_needs_an_interval_that_ends_below_it(ratio, spread, word):
    logs = np.log(ratio) + spread * np.array([-1.0, 1.0, -1.0, 1.0])
    found = judge(np.exp(logs), [1.0] * 4, noise=0.5, not_slower=0.02)
    assert (found.word, found.margin) == (word, 0.02)


def test_more_confidence_asks_for_a_wider_interval():
    low, high = (judge(*experiment(3), noise=0, confidence=c).ratio for c in (0.95, 0.999))
    assert high.low < low.low and high.high > low.high and high.ratio == low.ratio


JUST_SLOWER = 1.0205
"""Beyond the margin by next to nothing, where `same` is wrong most easily."""
TRUTHS = {1.0: ("same", "not slower"), 1.05: ("slower",), 0.95: ("faster", "not slower")}
TRUTHS |= {JUST_SLOWER: ("slower",)}


@pytest.mark.parametrize("sigma", [0.005, 0.01, 0.05])
@pytest.mark.parametrize("truths", [(1.0,), (JUST_SLOWER,), tuple(TRUTHS)])
@pytest.mark.parametrize(("rows", "tables", "not_slower"), [(1, 300, 0.0), (6, 120, 0.02)])
@pytest.mark.parametrize("looks", [LOOKS, LOOKS[:1]])
def test_no_more_tables_than_stated_have_a_wrong_verdict(
    sigma, truths, rows, tables, not_slower, looks
):
    rng, wrong, right = np.random.default_rng(7), 0, 0
    for _ in range(tables):
        truth = rng.choice(truths, rows)
        times = np.exp(rng.normal(0, sigma, (2, rows, looks[-1]))) * [
            truth[:, None],
            np.ones((rows, 1)),
        ]
        seen = [looks[0]] * rows
        for look in looks:
            pairs = [(a[:n], b[:n]) for a, b, n in zip(*times, seen, strict=True)]
            said = judge_table(pairs, noise=0.0, not_slower=not_slower, looks=len(looks))
            is_open = [verdict.word == "ambiguous" for verdict in said]
            after = looks[min(looks.index(look) + 1, len(looks) - 1)]
            seen = [after if left else n for left, n in zip(is_open, seen, strict=True)]
        held = [v.word in TRUTHS[t] for v, t in zip(said, truth, strict=True)]
        wrong += any(not ok and not left for ok, left in zip(held, is_open, strict=True))
        right += sum(held) / rows
    # So many are drawn that more than two standard errors above it would show a wrong rule.
    assert wrong / tables <= ERROR + 2 * math.sqrt(ERROR / tables)
    if sigma == 0.005 and len(looks) > 1 and JUST_SLOWER not in truths:
        assert right / tables > 0.9, "and rounds end with a verdict"


def test_a_table_asks_more_of_a_row_than_the_row_alone_and_less_once_others_are_decided():
    rng = np.random.default_rng(5)
    sure = [(np.exp(rng.normal(0, 0.001, 4)) * 2, np.ones(4)) for _ in range(7)]
    doubtful = (np.exp(np.log(1.05) + 0.02 * np.array([-1, 1, -1, 1])), np.ones(4))
    alone, among, open_ones = (
        judge_table([doubtful, *others], noise=0.0)[0] for others in ([], sure, [doubtful] * 7)
    )
    assert (alone.word, among.word, open_ones.word) == ("slower", "slower", "ambiguous")
    assert alone.ratio == among.ratio, "sure rows are out of its way"
    assert judge_table([], noise=0.0) == []


def test_gaps_of_a_table_lie_beside_zero_wrongly_no_oftener_than_once_in_twenty_tables():
    rng, tables, truth = np.random.default_rng(6), 400, np.repeat([0.0, 5.0], [8, 2])
    wrong = Counter()
    for _ in range(tables):
        pairs = [(gap + rng.normal(0, 1, 4), rng.normal(0, 1, 4)) for gap in truth]
        for name, gaps in (("table", gap_table(pairs)), ("row", [paired_gap(*p) for p in pairs])):
            sides = [gap.low > 0 for gap in gaps], [gap.high < 0 for gap in gaps]
            wrong[name] += any(sides[0][:8]) or any(sides[1])
    assert wrong["table"] / tables <= ERROR + 2 * math.sqrt(ERROR / tables)
    assert wrong["row"] / tables > 0.2, "rows alone are wrong oftener"
    assert gap_table([]) == []
