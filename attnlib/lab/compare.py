"""The difference of two profiles: kernels gone, new, slower, faster, launched more or less often.

| word | means |
|---|---|
| `gone`, `new` | only the first profile ran it, only the second |
| `slower`, `faster` | its time per call differs by more than 2 %, and the middle halves of the |
| | calls do not overlap |
| `same` | its time per call lies within 2 % |
| `ambiguous` | beyond 2 %, but the calls of the two overlap: profile more calls |
"""

from collections import Counter
from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd

from ..draw.cards import Card, Shown, in_words
from ..measure.spans import per_call
from ..measure.stats import LONG_MARGIN
from .profile import Profile

NO_VERDICT = "Two profiles show what changed; a verdict on speed takes rounds in fresh processes."
MIDDLE_HALF = (25, 75)
FORMATS = ("g", "g", ",.2f", ",.2f", "+,.2f")
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
        a, b = self.a, self.b
        gpu = a.device == "cuda"
        totals = [
            ("kernels" if gpu else "operators", a.launches, b.launches),
            ("launches by the host", a.host_launches, b.host_launches),
            ("their time, us", a.time_us, b.time_us),
            ("gaps between them, us, traced", a.gap_us, b.gap_us),
            ("host time, us, untraced", median(a.host_us), median(b.host_us)),
            ("time per call of many, us, untraced", a.wall_us, b.wall_us),
        ]
        return totals if gpu else [totals[0], *totals[2:]]

    def card(self) -> Card:
        """The changes, and what they come to for the whole call."""
        table = self.table()
        forms = dict(zip(table.columns[2:], FORMATS, strict=True))
        tally = table.change.value_counts()
        changes = ", ".join(f"{count} {word}" for word, count in tally.items()) or "nothing ran"
        facts = []
        for name, a, b in self.totals():
            facts.append((name, f"{a:,.6g} to {b:,.6g}" + (f" ({b / a:.2f} x)" if a else "")))
        return Card(
            title=f"{self.a.name} (a) to {self.b.name} (b), {self.a.row_word}s: {changes}",
            notes=[note for note in dict.fromkeys((self.a.note, self.b.note, NO_VERDICT)) if note],
            facts=facts,
            table=in_words(table, forms),
            caption=f"{self.a.row_word}s of a call, times in microseconds",
            footer=f"a: {self.a.origin}; b: {self.b.origin}",
        )


def compare(a: Profile, b: Profile) -> Difference:
    """What changed from profile `a` to profile `b`, name by name (`trace.short_name`).

    TypeError for what is no profile; ValueError for kernels against operators, and for two GPUs.
    """
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, Profile):
            got = type(given).__name__
            raise TypeError(f"{name} must be a Profile (attnlib.profile), got {got}")
    if a.device != b.device:
        kinds = f"a is of {a.row_word}s, b of {b.row_word}s"
        raise ValueError(f"a and b must both be of kernels or of operators: {kinds}")
    if a.machine != b.machine:
        raise ValueError(f"a and b must be of one GPU, got {a.machine} and {b.machine}")
    times_a, times_b = (per_call(p.work, p.calls) for p in (a, b))
    counts_a, counts_b = (Counter(span.name for span in p.work) for p in (a, b))
    rows = []
    for name in {**times_a, **times_b}:
        word = _word(times_a.get(name), times_b.get(name))
        us_a, us_b = (float(np.mean(times.get(name, 0.0))) for times in (times_a, times_b))
        launches = (counts_a[name] / a.calls, counts_b[name] / b.calls)
        rows.append((name, word, *launches, us_a, us_b, us_b - us_a))
    rows.sort(key=lambda row: (-abs(row[-1]), row[0]))
    counts = [f"{a.launch_word} {side}" for side in "ab"]
    columns = [a.row_word, "change", *counts, "us a", "us b", "b - a"]
    return Difference(a, b, pd.DataFrame(rows, columns=columns))


def _word(before: list[float] | None, after: list[float] | None) -> str:
    """What became of a name, from its times in each call of a and of b."""
    if before is None or after is None:
        return "new" if before is None else "gone"
    ratio = np.mean(after) / max(np.mean(before), np.finfo(float).tiny)
    if 1 / (1 + LONG_MARGIN) <= ratio <= 1 + LONG_MARGIN:
        return "same"
    low_a, high_a = np.percentile(before, MIDDLE_HALF)
    low_b, high_b = np.percentile(after, MIDDLE_HALF)
    if low_b > high_a:
        return "slower"
    return "faster" if high_b < low_a else "ambiguous"
