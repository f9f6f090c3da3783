"""Diagnose a trace of a server, or what got slower from one to another.

Of two traces, steps of one kind are compared by their medians. What does the same is one row,
whatever its name: attention, its schedule, merge, metadata and indexer; every other kernel is
matched by its name. The time of a step is that from its first work to the end of its last, as
traced.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..core.backends.table import family_of, role_of
from ..draw import charts, style
from ..draw.cards import Card, Shown, in_words
from ..measure.spans import busy_us
from ..measure.stats import FASTER, SLOWER
from ..measure.steps import Step
from .diagnosis import Diagnosis, calls_in, read_diagnosis, times_by
from .patterns import PATTERNS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS, ROW_INCHES, LONGEST_NAMES = 12, 0.3, 80
NO_PART: dict[str, Any] = {"us": 0.0, "launches": 0.0, "kernels": {}}
FORMATS = {"before": ",.1f", "after": ",.1f", "after - before": "+,.1f", "ratio": ".2f"}
ATTENTION = "attention"
WHOLE, BUSY, BEFORE, WITHIN = "whole step", "GPU busy", "idle before the first layer", "idle later"


@dataclass(frozen=True, eq=False, repr=False)
class TraceChange(Shown):
    """From the trace of `before` to that of `after`. ValueError if no kind of step is in both."""

    before: Diagnosis
    after: Diagnosis

    def __post_init__(self) -> None:
        if not self.kinds:
            names = [
                ", ".join(sorted({step.kind for step in side.steps})) or "none"
                for side in (self.before, self.after)
            ]
            raise ValueError(
                "before and after must both have steps of one kind with known attention, "
                f"got {names[0]} and {names[1]}"
            )

    @property
    def kinds(self) -> list[str]:
        """The kinds of steps that both traces have."""
        after = {step.kind for step in self.after.steps}
        kinds = dict.fromkeys(step.kind for step in self.before.steps)
        return [kind for kind in kinds if kind in after]

    def table(self) -> pd.DataFrame:
        """A row per kind of step and part: microseconds a step before and after, largest change
        first, then what launched it how often."""
        return self.rows.round(3)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The table, not rounded."""
        rows = []
        for kind in self.kinds:
            a, b = (
                _parts([step for step in side.steps if step.kind == kind])
                for side in (self.before, self.after)
            )
            names = dict.fromkeys([*a, *b])
            part_rows = [_row(kind, n, a.get(n, NO_PART), b.get(n, NO_PART)) for n in names]
            head = [row for row in part_rows if row["part"] in (WHOLE, BUSY, BEFORE, WITHIN)]
            kernels = [row for row in part_rows if row not in head]
            rows += head + sorted(kernels, key=lambda row: -abs(row["after - before"]))
        return pd.DataFrame(rows)

    def figure(self) -> "Figure":
        """The change of each part, a bar each, the largest of each kind of step."""
        rows = self.rows.groupby("step", sort=False).head(MOST_ROWS).reset_index(drop=True)
        title = f"{self._name(self.before)} to {self._name(self.after)}"
        size = (9, 1.2 + ROW_INCHES * len(rows))
        words = ("after - before, us a step (as traced)", "")
        figure, (axis,) = charts.panels([title], size, self.origin, words)
        words_of = [SLOWER if us > 0 else FASTER for us in rows["after - before"]]
        colors = [charts.VERDICTS[word].color for word in words_of]
        bars = axis.barh(range(len(rows)), rows["after - before"], color=colors)
        axis.bar_label(bars, fmt="{:+,.1f}", padding=3, fontsize=7)
        axis.margins(x=0.15)
        charts.categories(axis, "y", rows.step + ": " + rows.part.map(charts.shorten))
        axis.axvline(0, **style.RULE)
        return figure

    @property
    def origin(self) -> str:
        """Who traced both, and which GPUs."""
        return f"before: {self.before.origin}; after: {self.after.origin}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        rows = json.loads(self.rows.to_json(orient="records"))
        sides = {"before": self.before.to_dict(), "after": self.after.to_dict()}
        return {"changes": rows, "patterns": self.patterns, **sides}

    @property
    def patterns(self) -> dict[str, list[str]]:
        """Known patterns that came with `after`, that went, that both show, and that one trace
        shows and the other cannot: why."""
        told: dict[str, list[str]] = {"new": [], "gone": [], "in both": []}
        sides = (self.before, self.after)
        for pattern in PATTERNS:
            a, b = (len(s.patterns) and pattern.name in {*s.patterns.pattern} for s in sides)
            word, other = ("new", "before") if b else ("gone", "after")
            lacks = (self.before if b else self.after).lacks
            blind = [name for name in lacks if name in ("decode steps", *pattern.needs)]
            if a and b:
                told["in both"].append(pattern.name)
            elif (a or b) and blind:
                why = f"{pattern.name} (no {', '.join(blind)})"
                told.setdefault(f"unseen in {other}", []).append(why)
            elif a or b:
                told[word].append(pattern.name)
        return told

    def card(self) -> Card:
        """Steps, the parts that changed most, and the patterns."""
        whole = self.rows[self.rows.part == WHOLE]
        title = ", ".join(
            self._per_call(row.step)
            or f"{row.step} {row.before:,.0f} to {row.after:,.0f} us ({row.ratio:.2f} x)"
            for row in whole.itertuples()
        )
        shown = self.rows.groupby("step", sort=False).head(MOST_ROWS)
        kernels = shown.kernels.map(lambda names: charts.shorten(names, LONGEST_NAMES))
        patterns = [
            (f"pattern {word}", name) for word, names in self.patterns.items() for name in names
        ]
        return Card(
            title=f"{self._name(self.before)} to {self._name(self.after)}: {title}",
            notes=self._notes(),
            facts=patterns,
            table=in_words(shown.assign(kernels=kernels), FORMATS),
            caption="microseconds a step, medians over the steps of a kind, as traced",
            footer=self.origin,
        )

    def _notes(self) -> list[str]:
        notes = ["Two traces show what changed; a profiler slows both, and no verdict is given."]
        sides = {"before": self.before.blind(), "after": self.after.blind()}
        for note in dict.fromkeys([*sides["before"], *sides["after"]]):
            where = [name for name, said in sides.items() if note in said]
            notes.append(note if len(where) > 1 else f"{where[0]}: {note}")
        for kind in self.kinds:
            if self._per_call(kind):
                words = "other layers, or cut steps: their times do not compare"
                notes.append(f"Attention calls of {kind} steps differ ({words}).")
            sizes = [
                sorted({step.batch_size for step in side.steps if step.kind == kind} - {0})
                for side in (self.before, self.after)
            ]
            if all(sizes) and sizes[0] != sizes[1]:
                notes.append(f"Batch sizes of {kind} differ: {sizes[0]} and {sizes[1]}.")
        alone = {step.kind for step in (*self.before.steps, *self.after.steps)} - {*self.kinds}
        if alone:
            notes.append(f"Steps of {', '.join(sorted(alone))} are in one trace alone.")
        if self.before.trace.gpu != self.after.trace.gpu:
            notes.append("The traces are of different GPUs.")
        return notes

    def _per_call(self, kind: str) -> str:
        """Times per attention call of a kind of step whose calls differ; else empty."""
        sides = (self.before, self.after)
        calls = [median(calls_in(s) for s in side.steps if s.kind == kind) for side in sides]
        if calls[0] == calls[1]:
            return ""
        (row,) = self.rows[(self.rows.step == kind) & (self.rows.part == ATTENTION)].itertuples()
        a, b = (us / count for us, count in zip((row.before, row.after), calls, strict=True))
        words = f"{kind}: attention {a:,.1f} to {b:,.1f} us per call"
        return f"{words}, {calls[0]:g} to {calls[1]:g} calls a step"

    def _name(self, side: Diagnosis) -> str:
        return os.path.basename(side.trace.path)


def diagnose(
    path: str | os.PathLike[str], after: str | os.PathLike[str] = "", **shape: Any
) -> Diagnosis | TraceChange:
    """Read a trace (`measure.trace_file`) and look for what is known to slow attention.

    With a second trace, `after`, what changed from the first one to it. `shape` tells what a trace
    does not, for the gains on record: `heads="32/8"`, `kv_len=8192`, any of `patterns.STATED`.
    ValueError for a file that is no trace, in one line, for an unknown name, and for two traces
    without a kind of step that both have.
    """
    diagnosis = read_diagnosis(path, shape)
    return TraceChange(diagnosis, read_diagnosis(after, shape)) if after else diagnosis


def _parts(steps: Sequence[Step]) -> dict[str, dict[str, Any]]:
    """Part of a step -> its microseconds (median), launches (median) and the kernels in it."""
    idle, known = [s.idle_ahead_us for s in steps], [s for s in steps if not s.begins]
    length = [s.body[-1].end_us - s.work[0].start_us for s in steps]
    busy = [busy_us(s.work) for s in steps]
    later = [max(0.0, a - b - c) for a, b, c in zip(length, busy, idle, strict=True)]
    before = [s.idle_ahead_us for s in known] or [math.nan]
    parts = {
        name: NO_PART | {"us": median(us)}
        for name, us in {WHOLE: length, BUSY: busy, BEFORE: before, WITHIN: later}.items()
    }
    kernels: dict[str, dict[str, None]] = {}
    for name in dict.fromkeys(span.name for step in steps for span in step.work):
        kernels.setdefault(_part_of(name), {})[name] = None
    for part, times in times_by(steps, lambda span: _part_of(span.name)).items():
        us, launches = median(map(sum, times)), median(map(len, times))
        parts[part] = {"us": us, "launches": launches, "kernels": kernels[part]}
    return parts


def _part_of(kernel: str) -> str:
    """The row that a kernel is counted in: attention, its role beside attention, or its name."""
    return ATTENTION if family_of(kernel) else role_of(kernel) or kernel


def _row(kind: str, part: str, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """One part of a kind of step, before (a) and after (b)."""
    counts = f"{a['launches']:g}"
    if a["launches"] != b["launches"]:
        counts += f" to {b['launches']:g}"
    names = [", ".join(side["kernels"]) or "none" for side in (a, b)]
    kernels = names[0] if names[0] == names[1] else f"{names[0]} to {names[1]}"
    if part in names or kernels == "none":  # the part is that kernel, or a time and no kernel
        kernels = ""
    return {
        "step": kind,
        "part": part,
        "before": a["us"],
        "after": b["us"],
        "after - before": b["us"] - a["us"],
        "ratio": b["us"] / a["us"] if a["us"] else None,
        "launches": counts if a["launches"] or b["launches"] else "",
        "kernels": kernels,
    }
