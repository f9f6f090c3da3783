"""Statistics over rounds. The unit is the round (a fresh process), not the sample.

Samples of one process share its clocks and its memory layout, so a round is reduced to its median.
Two sides are compared round by round: the log ratio of their times, or the difference of them.

A table with few rounds per row knows little about the noise of one row, but a lot about the noise
of all rows. So the variance of a row is moderated: it is pulled towards the typical variance of the
table, as far as the rows' variances agree with each other (Smyth 2004, empirical Bayes), and
Student's t has that many more degrees of freedom. A table with one row uses its own variance only.

`low` and `high` are always the 95 % interval of that row. The verdict of a table with several rows
is stricter: Holm's steps keep the chance of any wrong verdict in the table near 5 %
(simulated in tests/measure/test_stats.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.spec import require_type

CONFIDENCE = 0.95
SHORT_US = 30.0
"""Calls below this are short."""
SHORT_MARGIN = 0.04
"""The effect that is worth a verdict in a short call: two processes with the same code differ by up
to 3 % (95th percentile of A/A records)."""
LONG_MARGIN = 0.02
"""The same in longer calls, where they differ by 1 to 2 %."""
LEAST_ROUNDS = 3
"""Rounds of a row that gets a verdict. With two, a wrong verdict in a table is up to three times as
likely as it may be, where rows differ in noise or share a term of their round."""
DRAWS = 4000
"""Resamples of a bootstrap."""

FASTER = "faster"
SLOWER = "slower"
SAME = "same"
INCONCLUSIVE = "inconclusive"
NOT_SLOWER = "not slower"

ALL_ALIKE = 1e9
"""Degrees of freedom of a prior that replaces the variance of every row."""
SPANS = "the interval spans the margin"
Floats = NDArray[np.float64]
Pair = tuple[Sequence[float], Sequence[float]]
Word = Callable[[int, float, float], str]
"""The verdict of a row (its number) whose interval has these ends."""


@dataclass(frozen=True)
class Ratio:
    """Time of side a over time of side b: geometric mean over rounds, interval, verdict on a.

    With one round there is no spread to judge by: `low` and `high` are NaN. With fewer than
    `LEAST_ROUNDS` the verdict is inconclusive.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    margin: float
    verdict: str


@dataclass(frozen=True)
class Saving:
    """Microseconds that the new side saves: mean over rounds, interval, verdict on the new side."""

    saved: float
    low: float
    high: float
    rounds: int
    verdict: str


@dataclass(frozen=True)
class _Means:
    """Mean of each row, its standard error (NaN for one value), and the degrees of freedom."""

    mean: Floats
    error: Floats
    freedom: Floats

    def interval(self, confidence: float) -> tuple[Floats, Floats]:
        """Student's t interval of each row."""
        from scipy.special import stdtrit  # scipy takes a while to import

        quantile = (1 + confidence) / 2
        reach = stdtrit(self.freedom, quantile) * self.error
        return self.mean - reach, self.mean + reach

    def with_interval(self, confidence: float) -> Floats:
        """Mean, low and high of each row, [rows, 3]."""
        return np.stack([self.mean, *self.interval(confidence)], axis=1)


def why_inconclusive(rounds: int) -> str:
    """Why a row of so many rounds has no verdict."""
    if rounds >= LEAST_ROUNDS:
        return SPANS
    counted = "1 round" if rounds == 1 else f"{rounds} rounds"
    return f"{counted}: no verdict, it needs {LEAST_ROUNDS}"


def tally(verdicts: Iterable[str], rounds: Iterable[int]) -> str:
    """How many rows have each verdict, the most first; of those that are inconclusive why.

    Examples
    --------
    >>> tally(["same", "inconclusive", "inconclusive"], [4, 2, 2])
    '2 inconclusive (2 rounds: no verdict, it needs 3), 1 same'
    """
    words: Counter[str] = Counter()
    for verdict, count in zip(verdicts, rounds, strict=True):
        why = f" ({why_inconclusive(count)})" if verdict == INCONCLUSIVE else ""
        words[verdict + why] += 1
    return ", ".join(f"{count} {word}" for word, count in words.most_common())


def margin_of(us: float) -> float:
    """The smallest effect that is worth a verdict in a call of `us` microseconds."""
    return SHORT_MARGIN if us < SHORT_US else LONG_MARGIN


def geometric_mean(ratios: Any) -> Any:
    """Of a Series of ratios a number; of a DataFrame a Series, a mean for each column."""
    return np.exp(np.log(ratios).mean())


def mean_interval(ratios: Any) -> tuple[float, float]:
    """95 % interval of the geometric mean of ratios of batches, drawn as the batches were.

    A percentile bootstrap over the batches: it says how much the mean would move with another draw
    of them, not how well each was measured. NaN for fewer than two batches.

    Parameters
    ----------
    ratios : sequence of float
        One of each batch, above 0.

    Examples
    --------
    >>> low, high = mean_interval([1.0] * 90 + [2.0] * 10)
    >>> round(low, 2), round(high, 2)
    (1.03, 1.12)
    """
    logs = np.log(np.asarray(ratios, float))
    if len(logs) < 2:
        return float("nan"), float("nan")
    draw = np.random.default_rng(0)
    picked = draw.integers(0, len(logs), (DRAWS, len(logs)))
    means = np.exp(logs[picked].mean(axis=1))
    lower = (1 - CONFIDENCE) / 2
    upper = (1 + CONFIDENCE) / 2
    low, high = np.quantile(means, [lower, upper])
    return float(low), float(high)


def judge_ratios(
    pairs: Sequence[Pair],
    *,
    not_slower: float = 0.0,
    widened: bool = False,
    looks: int = 1,
) -> list[Ratio]:
    """Ratio and verdict of each row of a table, judged together (Holm).

    `faster` and `slower` need an interval that excludes 1 and an effect beyond the margin
    (`margin_of` the shorter of both medians). `same` needs the whole interval inside the margin.
    Everything else is `inconclusive`, and so is a row of fewer than `LEAST_ROUNDS` rounds.

    Parameters
    ----------
    pairs : sequence of (times of a, times of b)
        A row each: times of both sides, in one unit, round by round.
    not_slower : float
        Asks for non-inferiority: 0.02 (2 %) becomes the margin, and a row whose interval ends below
        1 + margin is `not slower`. 0 asks for none.
    widened : bool
        Whether `not_slower` is at least `margin_of` the row: short calls differ more.
    looks : int
        How often the table is judged while more rounds are measured, this time included: the chance
        of a wrong verdict is shared among them (Bonferroni).

    Returns
    -------
    list of Ratio
        In the order of `pairs`: ratio, low, high (95 % interval), rounds, margin, verdict.

    Raises
    ------
    ValueError
        For no sequence, and for a pair with different numbers of times on both sides, or with none.

    Examples
    --------
    >>> import attnlib
    >>> [row] = attnlib.judge_ratios([([40.0, 41.0, 40.5], [20.0, 20.3, 20.1])])
    >>> row.verdict, round(row.ratio, 2)
    ('slower', 2.01)
    """
    require_type("pairs", pairs, Sequence, such_as="[(times_of_a, times_of_b)]")
    of_rows = []
    log_ratios = []
    for a, b in map(_paired, pairs):
        shorter = min(median(a), median(b))
        usual = margin_of(shorter)
        asked = max(not_slower, usual) if widened else not_slower
        of_rows.append(asked if not_slower else usual)
        log_ratios.append(np.log(a / b))
    edges = np.log1p(of_rows)
    means = _moderated(log_ratios)

    def word(
        row: int,
        low: float,
        high: float,
    ) -> str:
        mean = means.mean[row]
        edge = edges[row]
        if high < 0 and mean < -edge:
            return FASTER
        if low > 0 and mean > edge:
            return SLOWER
        if not_slower and high <= edge:
            return NOT_SLOWER
        is_inside = -edge <= low and high <= edge
        return SAME if is_inside else INCONCLUSIVE

    verdicts = _by_holm(
        means=means,
        rows=_rows_with_rounds(log_ratios),
        word=word,
        looks=looks,
    )
    ratios = []
    ends = np.exp(means.with_interval(CONFIDENCE))
    for row, (ratio, low, high) in enumerate(ends.tolist()):
        judged = Ratio(
            ratio=ratio,
            low=low,
            high=high,
            rounds=len(log_ratios[row]),
            margin=of_rows[row],
            verdict=verdicts[row],
        )
        ratios.append(judged)
    return ratios


def judge_savings(pairs: Sequence[Pair]) -> list[Saving]:
    """What each row of a table saves; a pair is (times before, times after), round by round.

    `faster` or `slower` where the interval excludes 0, else `inconclusive`, as with fewer than
    `LEAST_ROUNDS` rounds. Noise grows with the length of a call, so variances are shared over the
    rows relative to the time before.
    Raises ValueError as `judge_ratios`.
    """
    of_rows = []
    shares = []
    for before, after in map(_paired, pairs):
        unit = before.mean()
        of_rows.append(unit)
        shares.append((before - after) / unit)
    units = np.array(of_rows)
    relative = _moderated(shares)
    means = _Means(
        mean=relative.mean * units,
        error=relative.error * units,
        freedom=relative.freedom,
    )

    def word(
        row: int,
        low: float,
        high: float,
    ) -> str:
        if low > 0:
            return FASTER
        return SLOWER if high < 0 else INCONCLUSIVE

    verdicts = _by_holm(means, _rows_with_rounds(shares), word)
    savings = []
    ends = means.with_interval(CONFIDENCE)
    for row, (saved, low, high) in enumerate(ends.tolist()):
        saving = Saving(
            saved=saved,
            low=low,
            high=high,
            rounds=len(shares[row]),
            verdict=verdicts[row],
        )
        savings.append(saving)
    return savings


def _paired(pair: Pair) -> tuple[Floats, Floats]:
    a, b = (np.asarray(side, float) for side in pair)
    times = np.concatenate((a, b))
    are_times = (times > 0) & (times < np.inf)
    is_paired = 0 < len(a) == len(b)
    if not is_paired or not are_times.all():
        raise ValueError(
            f"both sides of a pair must have the same number of times above 0, at least one, "
            f"got {a.tolist()} and {b.tolist()}"
        )
    return a, b


def _rows_with_rounds(rows: Sequence[Floats]) -> list[int]:
    """The numbers of the rows that have the rounds for a verdict."""
    return [row for row, values in enumerate(rows) if len(values) >= LEAST_ROUNDS]


def _by_holm(
    means: _Means,
    rows: Sequence[int],
    word: Word,
    looks: int = 1,
) -> list[str]:
    """The verdict of each row by Holm's steps; of those that are not in `rows` `inconclusive`.

    With n undecided rows each is judged at confidence 1 - 5 % / n / looks, until a step decides no
    more.
    """
    verdicts = [INCONCLUSIVE] * len(means.mean)
    undecided = list(rows)
    while undecided:
        error = (1 - CONFIDENCE) / len(undecided) / looks
        low, high = means.interval(1 - error)
        for row in undecided:
            verdicts[row] = word(row, low[row], high[row])
        still = [row for row in undecided if verdicts[row] == INCONCLUSIVE]
        if len(still) == len(undecided):
            break
        undecided = still
    return verdicts


def _moderated(rows: Sequence[Floats]) -> _Means:
    """Mean, moderated standard error and degrees of freedom of each row."""
    counts = np.array([len(row) for row in rows], float)
    freedom = counts - 1
    variance = np.full(len(rows), np.nan)
    for place, row in enumerate(rows):
        if len(row) > 1:
            variance[place] = row.var(ddof=1)
    several = freedom > 0
    own = variance[several]
    if len(own) > 1 and np.median(own) > 0:
        prior, extra = _prior(own, freedom[several])
        total = freedom * variance + extra * prior
        variance = total / (freedom + extra)
        freedom = np.minimum(freedom + extra, freedom.sum())
    mean = np.array([row.mean() for row in rows])
    error = np.sqrt(variance / counts)
    return _Means(mean, error, freedom)


def _prior(variance: Floats, freedom: Floats) -> tuple[float, float]:
    """The typical variance of a table, and how many degrees of freedom it is worth.

    Smyth (2004), section 6.2: moments of the log variances, as in limma's `fitFDist`. If the
    variances differ no more than by chance, all rows share the pooled one.
    """
    from scipy.special import digamma, zeta  # trigamma is zeta(2, x), its slope -2 zeta(3, x)

    least = 1e-5 * np.median(variance)  # a row may not vary at all
    logs = np.log(np.maximum(variance, least))
    logs += np.log(freedom / 2) - digamma(freedom / 2)
    by_chance = zeta(2, freedom / 2).mean()
    between = logs.var(ddof=1) - by_chance
    if between <= 0:
        return float(np.average(variance, weights=freedom)), ALL_ALIKE
    # Newton's method for trigamma(half) = between
    half = 0.5 + 1 / between
    for _ in range(10):  # eight are enough for any
        now = zeta(2, half)
        slope = 2 * zeta(3, half)
        half -= now * (1 - now / between) / slope
    log_typical = logs.mean() + digamma(half) - np.log(half)
    return float(np.exp(log_typical)), float(2 * half)
