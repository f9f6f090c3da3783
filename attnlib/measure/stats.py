"""Statistics over rounds. The unit is the round (a fresh process), not the sample.

Samples of one process share its clocks, its memory layout and its luck; only another process shows
another. So a round is its median, a case is the median of its rounds, and a ratio of two backends
is taken round by round: exp(mean(log(a_r / b_r))), with a bootstrap interval over rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """A geometric-mean ratio of paired rounds with its bootstrap interval."""

    ratio: float
    low: float
    high: float
    pairs: int


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> Ratio:
    """Ratio of round medians, paired by position; ValueError if the lengths differ or are 0.

    With one pair there is no spread to resample: low and high are NaN, not a false certainty.
    """
    if len(numerators) != len(denominators) or not len(numerators):
        raise ValueError(
            f"numerators and denominators must be equally many, at least one, "
            f"got {len(numerators)} and {len(denominators)}"
        )
    logs = np.log(np.asarray(numerators, float) / np.asarray(denominators, float))
    ratio = float(np.exp(logs.mean()))
    if len(logs) == 1:
        return Ratio(ratio, float("nan"), float("nan"), 1)
    rng = np.random.default_rng(seed)
    means = logs[rng.integers(0, len(logs), (RESAMPLES, len(logs)))].mean(axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.exp(np.percentile(means, [tail, 100 - tail]))
    return Ratio(ratio, float(low), float(high), len(logs))
