"""The difference of two profiles: kernels gone, new, slower, faster, launched more or less often.

| word | means |
|---|---|
| `gone`, `new` | only the first profile ran it, only the second |
| `slower`, `faster` | its time per call differs by more than 2 %, and the middle halves of the |
| | calls do not overlap |
| `same` | its time per call lies within 2 % |
| `inconclusive` | beyond 2 %, but the calls of the two overlap: profile more calls |
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from ..measure.spans import per_call
from ..measure.stats import LONG_MARGIN
from .cards import SHORT, Card, Shown, in_words
from .profile import Profile

NO_VERDICT = (
    "Two profiles show what changed. Whether one is faster needs several rounds in fresh processes."
)
MIDDLE_HALF = (25, 75)
FORMATS = ("g", "g", SHORT, SHORT, SHORT)
"""Of the numbers of a table's row."""


@dataclass(frozen=True, eq=False, repr=False)
class Difference(Shown):
    """From profile `a` to profile `b`; `changes` are the rows of `table`, not rounded."""

    a: Profile
    b: Profile
    changes: pd.DataFrame

    def table(self) -> pd.DataFrame:
        """A row per name: its word, launches and us per call in a and b, b - a; largest first."""
        return self.changes.round(3)

    def totals(self) -> list[tuple[str, float, float]]:
        """Each quantity of the whole call, in a and in b."""
        a = self.a
        b = self.b
        rows = f"{a.row_word}s"
        totals = [(rows, a.launches, b.launches)]
        if a.is_of_gpu:
            totals = [
                (rows, a.launches, b.launches),
                ("launches by the host", a.host_launches, b.host_launches),
            ]
        return [
            *totals,
            (f"time of {rows}, us", a.time_us, b.time_us),
            (f"gaps between {rows}, us", a.gap_us, b.gap_us),
            ("until the call returns, us (no tracing)", median(a.host_us), median(b.host_us)),
            ("a call in a loop, us (no tracing)", a.wall_us, b.wall_us),
        ]

    def card(self) -> Card:
        """The changes, and what they come to for the whole call."""
        table = self.table()
        numbers = table.columns.drop([self.a.row_word, "change"])
        forms = dict(zip(numbers, FORMATS, strict=True))
        tally = table.change.value_counts()
        changes = ", ".join(f"{count} {word}" for word, count in tally.items()) or "nothing ran"
        notes = [self.a.note, self.b.note, NO_VERDICT]
        facts = []
        for name, a, b in self.totals():
            words = f"{_said(a)} to {_said(b)}"
            if a:
                words += f" ({b / a:.2f} x)"
            facts.append((name, words))
        return Card(
            title=f"{self.a.name} (a) to {self.b.name} (b), {self.a.row_word}s: {changes}",
            notes=[note for note in dict.fromkeys(notes) if note],
            facts=facts,
            table=in_words(table, forms),
            caption=f"{self.a.row_word}s of a call, times in microseconds",
            footer=f"a: {self.a.origin}; b: {self.b.origin}",
        )


def compare(a: Profile, b: Profile) -> Difference:
    """What changed from profile `a` to profile `b`, name by name (`measure.spans.short_name`).

    Parameters
    ----------
    a, b : Profile
        What `attnlib.profile` returned: both of kernels or both of operators, of one GPU.

    Returns
    -------
    Difference
        `.table()` has a row per name: its word (see the module), launches and microseconds per
        call in each, and their difference, the largest first.

    Raises
    ------
    TypeError
        For what is no profile.
    ValueError
        For kernels against operators, and for profiles of two GPUs.

    Examples
    --------
    >>> import attnlib, torch
    >>> x = torch.ones(8)
    >>> relu = attnlib.profile(torch.relu, x, device="cpu")
    >>> exp = attnlib.profile(torch.exp, x, device="cpu")
    >>> table = attnlib.compare(relu, exp).table().set_index("CPU operator")
    >>> table.change["aten::relu"], table.change["aten::exp"]
    ('gone', 'new')
    """
    _require_profiles(a, b)
    times_a = per_call(a.work, a.calls)
    times_b = per_call(b.work, b.calls)
    launches_a = _launches(a)
    launches_b = _launches(b)
    rows: list[dict[str, Any]] = []
    for name in times_a | times_b:
        before = times_a.get(name, [])
        after = times_b.get(name, [])
        rows.append(
            {
                a.row_word: name,
                "change": _word(before, after),
                f"{a.launch_word} a": launches_a.get(name, 0.0),
                f"{a.launch_word} b": launches_b.get(name, 0.0),
                "us a": _mean(before),
                "us b": _mean(after),
                "b - a": _mean(after) - _mean(before),
            }
        )
    rows.sort(key=lambda row: row[a.row_word])
    rows.sort(key=lambda row: -abs(row["b - a"]))
    columns = [a.row_word, "change", f"{a.launch_word} a", f"{a.launch_word} b"]
    columns += ["us a", "us b", "b - a"]
    return Difference(a, b, pd.DataFrame(rows, columns=columns))


def _require_profiles(a: Profile, b: Profile) -> None:
    """TypeError or ValueError for what cannot be compared."""
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, Profile):
            got = type(given).__name__
            raise TypeError(f"{name} must be a Profile (attnlib.profile), got {got}")
    if a.device != b.device:
        kinds = f"a is of {a.row_word}s, b of {b.row_word}s"
        raise ValueError(f"a and b must both be of kernels or of operators: {kinds}")
    if a.machine != b.machine:
        raise ValueError(f"a and b must be of one GPU, got {a.machine} and {b.machine}")


def _launches(profile: Profile) -> dict[str, float]:
    """Launches per call, by name."""
    counts = Counter(span.name for span in profile.work)
    return {name: count / profile.calls for name, count in counts.items()}


def _mean(times: Sequence[float]) -> float:
    if times:
        return float(np.mean(times))
    return 0.0


def _said(number: float) -> str:
    """A count as it is, a time with a decimal."""
    return f"{number:g}" if number == round(number) else f"{number:,.1f}"


def _word(before: Sequence[float], after: Sequence[float]) -> str:
    """What became of a name, from its times in each call of a and of b."""
    if not before:
        return "new"
    if not after:
        return "gone"
    least = np.finfo(float).tiny
    ratio = np.mean(after) / max(np.mean(before), least)
    if 1 / (1 + LONG_MARGIN) <= ratio <= 1 + LONG_MARGIN:
        return "same"
    low_a, high_a = np.percentile(before, MIDDLE_HALF)
    low_b, high_b = np.percentile(after, MIDDLE_HALF)
    if low_b > high_a:
        return "slower"
    return "faster" if high_b < low_a else "inconclusive"
