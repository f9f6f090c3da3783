"""What records say of a claim: cases for and against it, and the vote they take.

| verdict | when |
|---|---|
| confirmed | all that is decided speaks for the claim |
| refuted | all that is decided speaks against it |
| partly | some of each |
| open | more than half is undecided, or records are missing |
| not measurable here | no record can show it, or it names no shape that one could be of |

A timed case is decided by `judge_ratios` over paired rounds, so one round decides nothing.
A side of a comparison is a backend, or a backend of one release: `flashinfer-fa2==0.6.3`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from inspect import signature

import pandas as pd

from ..kinds.cases import Case
from ..measure.stats import Ratio
from ..run.frame import good_rows, over

CONFIRMED, REFUTED, PARTLY = "confirmed", "refuted", "partly"
NOT_HERE, OPEN = "not measurable here", "open"
ABOUT = 1.25
"""What "approximately" allows: a quarter either way."""


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
class Check:
    """A public function of a study's `checks.py`, and the studies whose records it reads.

    It takes the records, one below the other, and the claim's figure if it compares with that.
    Raises MissingRecordsError where records lack.
    """

    studies: tuple[str, ...]
    function: Callable[..., Finding]

    @property
    def needs_figure(self) -> bool:
        """Whether it compares with a figure."""
        return len(signature(self.function).parameters) > 1

    def find(self, frame: pd.DataFrame, figure: float | None) -> Finding:
        """What the records say."""
        return self.function(frame, figure) if self.needs_figure else self.function(frame)


@dataclass(frozen=True)
class Judged:
    """Cases with the verdict on each, and the records they stand on."""

    verdicts: tuple[Ratio, ...]
    records: tuple[str, ...]

    def __add__(self, other: "Judged") -> "Judged":
        return Judged(self.verdicts + other.verdicts, self.records + other.records)

    def count(self, *words: str) -> int:
        """Cases whose verdict is one of `words`."""
        return sum(verdict.verdict in words for verdict in self.verdicts)

    @property
    def counts(self) -> str:
        """The verdicts in words, `slower in 6, same in 1 of 7 shapes`."""
        counted = Counter(verdict.verdict for verdict in self.verdicts).most_common()
        said = ", ".join(f"{word} in {count}" for word, count in counted)
        return f"{said} of {len(self.verdicts)} shapes"

    @property
    def ratios(self) -> pd.Series:
        """The cases' ratios."""
        return pd.Series([verdict.ratio for verdict in self.verdicts])

    def vote(self, *words: str) -> str:
        """`vote` of the cases: those of `words` for it, those that are decided else against."""
        support, undecided = self.count(*words), self.count("ambiguous")
        return vote(support, len(self.verdicts) - support - undecided, undecided)

    def somewhere(self, *words: str) -> str:
        """Confirmed by one case of `words`; refuted if there is none, nor one undecided."""
        return CONFIRMED if self.count(*words) else OPEN if self.count("ambiguous") else REFUTED

    def finding(self, verdict: str, reason: str) -> Finding:
        """A Finding with the spread of the ratios; of one case with its interval."""
        one = self.verdicts[0]
        if len(self.verdicts) == 1 and one.rounds == 1:
            return Finding(
                verdict, reason, f"{one.ratio:.2f} x, one round", one.ratio, records=self.records
            )
        if len(self.verdicts) > 1:
            low, value, high = (float(x) for x in self.ratios.quantile([0, 0.5, 1]))
            measured = f"{low:.2f} to {high:.2f} x, median {value:.2f}"
        else:
            low, value, high = one.low, one.ratio, one.high
            measured = f"{value:.2f} x, {low:.2f} to {high:.2f}"
        return Finding(verdict, reason, measured, value, low, high, self.records)


def together(parts: Iterable[Judged]) -> Judged:
    """The cases of all of `parts`."""
    return sum(parts, Judged((), ()))


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


def counted(rows: pd.DataFrame, holds: Iterable[bool], says: str, measured: str = "") -> Finding:
    """The vote of records, each for the claim or against it; `{held}` in `says` is how many."""
    held = sum(map(bool, holds))
    reason = says.replace("{held}", f"{held} of {len(rows)}")
    return Finding(vote(held, len(rows) - held), reason, measured, records=tuple(rows.id))


def near(values: Iterable[float], figure: float) -> int:
    """How many of `values` are about as large as `figure` (`ABOUT`)."""
    return sum(figure / ABOUT <= value <= figure * ABOUT for value in values)


def figure_word(values: Sequence[float], figure: float) -> str:
    """The verdict on a figure at the cases that its claim names: those that are `near` vote."""
    held = near(values, figure)
    return vote(held, len(values) - held)


def of_sides(frame: pd.DataFrame, *sides: str, timer: str = "graph") -> pd.DataFrame:
    """Records of `sides` with this timer, whatever their status; `backend` is the side's name."""
    rows = frame[(frame.timer == timer) & ~frame.repeat]
    named = {side: side.partition("==")[::2] for side in sides}
    found = [
        rows[(rows.backend == backend) & (rows.release == (release or rows.release))]
        for backend, release in named.values()
    ]
    return pd.concat([part.assign(backend=s) for s, part in zip(named, found, strict=True)])


def needed(rows: pd.DataFrame, cases: Sequence[Case], backends: Sequence[str]) -> pd.DataFrame:
    """The rows of `backends` at `cases`, in the frame's order.

    Raises MissingRecordsError unless every case has every backend in each of its rounds.
    """
    found = rows[rows.backend.isin(backends) & rows.case.isin(cases)].sort_index(kind="stable")
    rounds = found.groupby("case", sort=False)["round"].nunique()
    if len(rounds) < len(set(cases)) or len(found) != len(backends) * rounds.sum():
        raise MissingRecordsError(
            f"{' and '.join(backends)}: {len(found)} records of {len(set(cases))} shapes, "
            f"one lacks some"
        )
    return found


def judge_rows(rows: pd.DataFrame, pair: tuple[str, str]) -> Judged:
    """`pair[0]` over `pair[1]`, case by case; MissingRecordsError where they share no round."""
    columns = [field.name for field in fields(Ratio)]
    verdicts = tuple(Ratio(**row) for row in over(rows, *pair)[columns].to_dict("records"))
    if not verdicts:
        raise MissingRecordsError(f"{' and '.join(pair)} have no round that both are ok in")
    return Judged(verdicts, tuple(rows.id))


def judge_cases(
    frame: pd.DataFrame, cases: Sequence[Case], pair: tuple[str, str], *, timer: str = "graph"
) -> Judged:
    """Verdict of one side over the other, case by case; MissingRecordsError as `needed` does."""
    rows = needed(of_sides(frame, *pair, timer=timer), cases, pair)
    return judge_rows(good_rows(rows, timer), pair)
