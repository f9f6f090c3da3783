"""Ratios of paired rounds: right where the answer is known, honest where there is too little."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attnlib.measure.stats import CONFIDENCE, paired_ratio

TRUTH = 1.5


def experiment(seed: int, rounds: int = 8) -> tuple[np.ndarray, np.ndarray]:
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
def test_the_ratio_is_the_geometric_mean_over_pairs(numerators, denominators, ratio) -> None:
    found = paired_ratio(numerators, denominators)
    assert found.ratio == pytest.approx(ratio)
    assert found.pairs == len(numerators)


def test_rounds_that_agree_leave_no_interval() -> None:
    found = paired_ratio([30.0, 60.0, 90.0], [20.0, 40.0, 60.0])
    assert (found.ratio, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_holds_the_ratio_and_the_truth_however_the_gpu_drifted() -> None:
    found = paired_ratio(*experiment(3))
    assert found.low < found.ratio < found.high
    assert found.low < TRUTH < found.high
    assert found.high / found.low < 1.1


# Three rounds are what the published studies have.
@pytest.mark.parametrize("rounds", [3, 20])
def test_the_interval_holds_the_truth_about_as_often_as_it_claims(rounds) -> None:
    intervals = [paired_ratio(*experiment(seed, rounds)) for seed in range(400)]
    held = sum(found.low <= TRUTH <= found.high for found in intervals) / len(intervals)
    assert held == pytest.approx(CONFIDENCE, abs=0.05)


def test_swapping_the_sides_inverts_ratio_and_interval() -> None:
    one, other = experiment(1)
    found, inverse = paired_ratio(one, other), paired_ratio(other, one)
    assert inverse.ratio == pytest.approx(1 / found.ratio)
    assert (inverse.low, inverse.high) == pytest.approx((1 / found.high, 1 / found.low), rel=1e-3)


def test_the_same_rounds_give_the_same_interval() -> None:
    assert paired_ratio(*experiment(2)) == paired_ratio(*experiment(2))


def test_one_pair_gives_no_interval_rather_than_a_false_one() -> None:
    found = paired_ratio([3.0], [2.0])
    assert found.ratio == 1.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.parametrize(("numerators", "denominators"), [([1.0, 2.0], [1.0]), ([], [])])
def test_rounds_that_do_not_pair_are_refused(numerators, denominators) -> None:
    counts = f"got {len(numerators)} and {len(denominators)}"
    with pytest.raises(ValueError, match=f"numerators and denominators must .*{counts}"):
        paired_ratio(numerators, denominators)
