"""Statistics over rounds. The unit is the round (a fresh process), not the sample.

Samples of one process share its clocks, its memory layout and its luck. So a round is its median,
and a ratio of two backends is taken round by round: exp(mean(log(a_r / b_r))), with the interval of
Student's t over the log ratios. DESIGN.md says why no bootstrap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

CONFIDENCE = 0.95
ERROR, LOOKS = 0.05, (4, 8, 16, 24)
"""The chance that any verdict of a table is wrong, and the rounds after which verdicts are asked
for: all even, so that A B B A cancels the order."""
MIN_AA_PAIRS = 8
MIN_EFFECT = 0.02
"""Below 2 % nobody should change a backend, whatever the interval says."""


@dataclass(frozen=True)
class Ratio:
    """A geometric-mean ratio of paired rounds with its interval, of 95 % unless asked for more."""

    ratio: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Gap:
    """A mean difference of paired rounds with its interval, in the unit of what was paired, of 95 %
    unless asked for more."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def word(self) -> str:
        """`faster` (saved) or `slower` where the interval excludes 0, else `ambiguous`."""
        if self.low > 0:
            return "faster"
        return "slower" if self.high < 0 else "ambiguous"


@dataclass(frozen=True)
class Verdict:
    """What rounds allow to say of a ratio: `faster`, `slower`, `same` or `ambiguous`.

    `margin` is the effect below which a difference is not worth a word (0.02 is 2 %); of one who
    asked for no more, `not slower` than that stands for `same`.
    """

    word: str
    ratio: Ratio
    margin: float


Told = TypeVar("Told", Gap, Verdict)


def judge(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    noise: float,
    not_slower: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Verdict on numerators against denominators, paired rounds; `noise` is the machine's A/A.

    `faster` and `slower` need an interval that excludes 1 and an effect beyond the margin, the
    larger of `MIN_EFFECT` and `noise`; `same` needs the whole interval inside the margin. All else
    is `ambiguous` and asks for more rounds. `not_slower` (0.02 is 2 %) asks for non-inferiority:
    it is the margin, and an interval that ends below 1 + margin is `not slower`.
    """
    ratio = paired_ratio(numerators, denominators, confidence=confidence)
    margin = not_slower or max(MIN_EFFECT, noise)
    low, high = 1 / (1 + margin), 1 + margin
    if ratio.high < 1 and ratio.ratio < low:
        word = "faster"
    elif ratio.low > 1 and ratio.ratio > high:
        word = "slower"
    elif not_slower and ratio.high <= high:
        word = "not slower"
    else:
        word = "same" if low <= ratio.low and ratio.high <= high else "ambiguous"
    return Verdict(word, ratio, margin)


def judge_table(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    noise: float,
    not_slower: float = 0.0,
    looks: int = 1,
) -> list[Verdict]:
    """`judge` on all rows of a table, so that any verdict is wrong at most `ERROR` of the time.

    Holm's steps: with n rows still open each is asked at `ERROR` / (`looks` n), until no more are
    decided. `looks` is how often verdicts are asked for while rounds are added (Bonferroni). That
    the rate holds, direction and `same` included, is simulated in tests/measure/test_stats.py.
    """
    return _by_holm(
        lambda row, sure: judge(*pairs[row], noise=noise, not_slower=not_slower, confidence=sure),
        len(pairs),
        looks,
    )


def gap_table(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Gap]:
    """`paired_gap` of all rows of a table, by Holm's steps too: that any interval which excludes 0
    does so on the wrong side happens at most `ERROR` of the time."""
    return _by_holm(lambda row, sure: paired_gap(*pairs[row], confidence=sure), len(pairs))


def _by_holm(ask: Callable[[int, float], Told], count: int, looks: int = 1) -> list[Told]:
    """What `ask` says of each row at the confidence that Holm's steps leave it."""
    found, left, before = dict[int, Told](), list(range(count)), count + 1
    while left and len(left) < before:
        before, sure = len(left), 1 - ERROR / (looks * len(left))
        found |= {row: ask(row, sure) for row in left}
        left = [row for row in left if found[row].word == "ambiguous"]
    return [found[row] for row in range(count)]


def aa_noise(ratios: Sequence[float]) -> float:
    """The A/A noise: 95 % of ratios of a backend against itself lie within 1 +- this.

    `ratios` are of one backend over itself: of clusters (rounds of an item), one mean of each.
    ValueError for fewer than `MIN_AA_PAIRS`: a percentile of a handful is a guess.
    """
    if len(ratios) < MIN_AA_PAIRS:
        raise ValueError(f"ratios must be at least {MIN_AA_PAIRS} A/A pairs, got {len(ratios)}")
    effects = np.expm1(np.abs(np.log(np.asarray(ratios, float))))
    return float(np.percentile(effects, 100 * CONFIDENCE))


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, confidence: float = CONFIDENCE
) -> Ratio:
    """Ratio of round medians, paired by position; ValueError if the lengths differ or are 0.

    With one pair there is no spread to judge by: low and high are NaN, not a false certainty.
    """
    above, below = _paired("numerators and denominators", numerators, denominators)
    logs = np.log(above / below)
    ratio = float(np.exp(logs.mean()))
    reach = float(np.exp(_reach(logs, confidence)))
    return Ratio(ratio, ratio / reach, ratio * reach, len(logs))


def paired_gap(
    minuends: Sequence[float], subtrahends: Sequence[float], *, confidence: float = CONFIDENCE
) -> Gap:
    """Difference of round medians, paired by position: Student's t over the rounds' differences.

    ValueError if the lengths differ or are 0; with one pair low and high are NaN.
    """
    left, right = _paired("minuends and subtrahends", minuends, subtrahends)
    gaps = left - right
    mean, reach = float(gaps.mean()), _reach(gaps, confidence)
    return Gap(mean, mean - reach, mean + reach, len(gaps))


def _paired(names: str, left: Sequence[float], right: Sequence[float]) -> list[np.ndarray]:
    if len(left) != len(right) or not len(left):
        raise ValueError(
            f"{names} must be equally many, at least one, got {len(left)} and {len(right)}"
        )
    return [np.asarray(left, float), np.asarray(right, float)]


def _reach(values: np.ndarray, confidence: float = CONFIDENCE) -> float:
    """Half the interval of a mean by Student's t; NaN for one value."""
    freedom = len(values) - 1
    if not freedom:
        return float("nan")
    return _student_t(freedom, confidence) * float(values.std(ddof=1) / np.sqrt(len(values)))


@cache
def _student_t(freedom: int, confidence: float) -> float:
    """The quantile of Student's t that bounds `confidence` on both sides."""
    # SciPy takes a while to import, its `stats` a second; not all that import this ask for it.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))
