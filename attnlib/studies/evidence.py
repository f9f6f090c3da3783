"""What records say of a claim: cases for and against it, and the vote they take.

| verdict | when |
|---|---|
| confirmed | all that is decided speaks for the claim |
| refuted | all that is decided speaks against it |
| partly | some of each |
| open | more than half is undecided, or records are missing: nothing to say yet |
| not measurable here | no GPU on record can show it |

A timed case is decided by `measure.stats.judge` over paired rounds, so one round decides nothing.
`claim_checks` puts the questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ..kinds.decode.case import DecodeCase
from ..measure import stats
from ..run.frame import decode_rows, paired_times, release_order

CONFIRMED, REFUTED, PARTLY = "confirmed", "refuted", "partly"
NOT_HERE, OPEN = "not measurable here", "open"
VERDICTS = (CONFIRMED, REFUTED, PARTLY, NOT_HERE, OPEN)
ABOUT = 1.25
"""What "approximately" allows: a quarter either way."""
NOISE = 0.0
"""An A/A floor is one machine's, and the reference machine has none: `stats.MIN_EFFECT` holds."""


class MissingRecordsError(ValueError):
    """The study lacks records that a check stands on."""


@dataclass(frozen=True)
class Finding:
    """What a check found; `value` is the median over cases of a ratio, `low` to `high` its range.

    With one case the range is its 95 % interval, and None for a single round. `records` are the ids
    that it stands on.
    """

    verdict: str
    reason: str
    measured: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """Cases with the verdict of `judge` on each, and the records they stand on."""

    verdicts: tuple[stats.Verdict, ...]
    records: tuple[str, ...]

    def __add__(self, other: Judged) -> Judged:
        return Judged(self.verdicts + other.verdicts, self.records + other.records)

    def count(self, *words: str) -> int:
        """Cases whose verdict is one of `words`."""
        return sum(verdict.word in words for verdict in self.verdicts)

    @property
    def counts(self) -> str:
        """The verdicts in words, `slower in 6, same in 1 of 7 shapes`."""
        counted = Counter(verdict.word for verdict in self.verdicts).most_common()
        said = ", ".join(f"{word} in {count}" for word, count in counted)
        return f"{said} of {len(self.verdicts)} shapes"

    @property
    def ratios(self) -> pd.Series:
        """The cases' ratios."""
        return pd.Series([verdict.ratio.ratio for verdict in self.verdicts])

    def finding(self, verdict: str, reason: str) -> Finding:
        """A Finding with the spread of the ratios."""
        if len(self.verdicts) == 1:
            return self._of_one_case(verdict, reason)
        low, value, high = (float(x) for x in self.ratios.quantile([0, 0.5, 1]))
        measured = f"{low:.2f} to {high:.2f} x, median {value:.2f}"
        return Finding(verdict, reason, measured, value, low, high, self.records)

    def _of_one_case(self, verdict: str, reason: str) -> Finding:
        ratio = self.verdicts[0].ratio
        if ratio.pairs == 1:
            measured = f"{ratio.ratio:.2f} x, one round"
            return Finding(verdict, reason, measured, ratio.ratio, records=self.records)
        measured = f"{ratio.ratio:.2f} x, {ratio.low:.2f} to {ratio.high:.2f}"
        return Finding(verdict, reason, measured, ratio.ratio, ratio.low, ratio.high, self.records)


def vote(support: int, against: int, undecided: int = 0) -> str:
    """The verdict of so many cases, by the table above. ValueError without a case."""
    cases = support + against + undecided
    if not cases:
        raise ValueError("a verdict must stand on at least one case, got none")
    if 2 * undecided > cases:
        return OPEN
    if not against:
        return CONFIRMED
    return PARTLY if support else REFUTED


def figure_word(values: Sequence[float], figure: float) -> str:
    """The verdict on a claimed figure, of a case's value each.

    Those about as large (`ABOUT`) vote for it, the others against. With none it is `partly` while
    it lies between the smallest and the largest, else refuted.
    """
    near = sum(figure / ABOUT <= value <= figure * ABOUT for value in values)
    if near:
        return vote(near, len(values) - near)
    return PARTLY if min(values) <= figure <= max(values) else REFUTED


def judge_rows(rows: pd.DataFrame, pair: tuple[str, str]) -> Judged:
    """Verdict of `pair[0]` over `pair[1]`, case by case, and the rows' records."""
    verdicts = [
        stats.judge(above, below, noise=NOISE) for _, above, below in paired_times(rows, *pair)
    ]
    return Judged(tuple(verdicts), tuple(rows.id))


def judge_cases(
    frame: pd.DataFrame, cases: Sequence[DecodeCase], pair: tuple[str, str], release: str
) -> Judged:
    """Verdict of `pair[0]` over `pair[1]` in one release, case by case, as `case_rows` has them."""
    rows = decode_rows(case_rows(frame, cases, pair, release))
    judged = judge_rows(rows, pair)
    if not judged.verdicts:
        raise MissingRecordsError(f"{' and '.join(pair)} of {release} have no round that is ok")
    return judged


def case_rows(
    frame: pd.DataFrame, cases: Sequence[DecodeCase], backends: Sequence[str], release: str
) -> pd.DataFrame:
    """Records of timer `graph`, whatever their status.

    Raises MissingRecordsError unless every case has every backend in each of its rounds.
    """
    named = frame.backend.isin(backends) & (frame.release == release) & (frame.timer == "graph")
    rows = frame[named & frame.case.isin(cases)]
    rounds = rows.groupby("case", sort=False)["round"].nunique()
    if len(rounds) < len(set(cases)) or len(rows) != len(backends) * rounds.sum():
        raise MissingRecordsError(
            f"{' and '.join(backends)} of {release}: {len(rows)} records of {len(set(cases))} "
            f"shapes, a shape lacks one"
        )
    return rows


def ran_rows(
    frame: pd.DataFrame, cases: Sequence[DecodeCase], backend: str, releases: Sequence[str]
) -> pd.DataFrame:
    """Records of `backend`, oldest release first; `ran` is the traced family, or what went wrong.

    Raises MissingRecordsError unless every case is on record in every release.
    """
    named = (frame.backend == backend) & frame.release.isin(releases)
    rows = frame[named & frame.case.isin(cases)]
    have, want = len(rows.drop_duplicates(["case", "release"])), len(cases) * len(releases)
    if have != want:
        raise MissingRecordsError(f"{backend}: {have} of {want} records in {', '.join(releases)}")
    order = {release: place for place, release in enumerate(release_order(frame))}
    ran = rows.kernel_family.where(rows.status == "ok", rows.status)
    return rows.assign(ran=ran).sort_values("release", key=lambda r: r.map(order), kind="stable")
