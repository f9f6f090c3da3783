"""Diagnose a trace of a server, or what got slower from one to another.

Of two traces, both are read by what both have: marks, launches or shapes that one lacks count in
neither. Steps of one kind are compared, by the times that each trace alone has (`diagnosis.TIMES`);
GPU busy and both idle times add up to the whole step. What does the same is one row, whatever its
name: attention, its schedule, merge, metadata and indexer; every other kernel is matched by name.
"""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..core.backends.table import family_of, role_of
from ..draw import charts, style
from ..draw.cards import Card, Shown, in_words
from ..measure.steps import Step
from .diagnosis import TIMES, Diagnosis, calls_in, read_diagnosis, without
from .patterns import PATTERNS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS, LONGEST_NAMES = 12, 80
NO_PART: dict[str, Any] = {"us": 0.0, "launches": 0.0, "kernels": ()}
FORMATS = {"before": ",.1f", "after": ",.1f", "after - before": "+,.1f", "ratio": ".2f"}
ATTENTION = "attention"
MOST_CHANCE = 0.05
"""That steps lack by chance what they have in the other trace; above it nothing is decided."""
HEAD = {
    "whole step": "us",
    "GPU busy": "us busy",
    "idle before the first layer": "us idle before",
    "idle later": "us idle later",
}
"""First rows of a step -> columns of `Diagnosis.around`."""


@dataclass(frozen=True, eq=False, repr=False)
class TraceChange(Shown):
    """From the trace of `before` to that of `after`. ValueError if no kind of step is in both."""

    before: Diagnosis
    after: Diagnosis

    def __post_init__(self) -> None:
        if not self.kinds:
            names = [", ".join(sorted(side.usual)) or "none" for side in self.compared]
            raise ValueError(
                "before and after must both have steps of one kind with known attention, "
                f"got {names[0]} and {names[1]}"
            )

    @cached_property
    def compared(self) -> list[Diagnosis]:
        """Both, each as if it lacked what the other one does."""
        lacks = {*self.before.lacks, *self.after.lacks}
        return [without(side, lacks) for side in (self.before, self.after)]

    @property
    def kinds(self) -> list[str]:
        """The kinds of steps that both traces have."""
        before, after = self.compared
        return [kind for kind in before.usual if kind in after.usual]

    def table(self) -> pd.DataFrame:
        """A row per kind of step and part: microseconds a step before and after, largest change
        first, then what launched it how often."""
        return self.rows.round(3)

    def figure(self) -> "Figure":
        """The change of each part, a bar each, the largest of each kind of step."""
        rows = self.rows.groupby("step", sort=False).head(MOST_ROWS)
        title = f"{self.before.trace.path} to {self.after.trace.path}"
        words = (f"{', '.join(self.kinds)}: after - before, us a step (as traced)", "")
        figure, (axis,) = charts.panels([title], (9, 1.2 + 0.3 * len(rows)), self.origin, words)
        change = rows["after - before"]
        colors = [style.VERMILION if us > 0 else style.BLUE for us in change]
        bars = axis.barh(range(len(rows)), change, color=colors)
        axis.bar_label(bars, fmt="{:+,.1f}", padding=3, fontsize=7)
        axis.margins(x=0.15)
        steps = rows.step + ": " if len(self.kinds) > 1 else ""
        charts.categories(axis, "y", steps + rows.part.map(charts.shorten))
        axis.axvline(0, **style.RULE)
        return figure

    @property
    def origin(self) -> str:
        """Who traced both, and which GPUs."""
        return f"before: {self.before.origin}; after: {self.after.origin}"

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The table, not rounded."""
        rows = []
        for kind in self.kinds:
            a, b = (_parts(side, kind) for side in self.compared)
            names = dict.fromkeys([*a, *b])
            part_rows = [_row(kind, n, a.get(n, NO_PART), b.get(n, NO_PART)) for n in names]
            head = [row for row in part_rows if row["part"] in HEAD]
            kernels = [row for row in part_rows if row not in head]
            rows += head + sorted(kernels, key=lambda row: -abs(row["after - before"]))
        return pd.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        rows = json.loads(self.rows.to_json(orient="records"))
        sides = {"before": self.before.to_dict(), "after": self.after.to_dict()}
        conclusions = {"patterns": self.patterns, "not decided": self.undecided}
        return {"times": TIMES, "changes": rows, **conclusions, **sides}

    @cached_property
    def undecided(self) -> list[str]:
        """The parts that one trace lacks, where a few more steps might have shown them."""
        names = []
        absent = (self.rows.before == 0) != (self.rows.after == 0)
        for row in self.rows[absent & ~self.rows.part.isin(HEAD)].itertuples():
            shows, lacks = self.compared if row.after == 0 else self.compared[::-1]
            usual = lacks.usual[row.step]
            share = fmean(_runs(step, row.part) for step in shows.usual[row.step])
            once = any(_runs(step, row.part) for step in lacks.steps if step.kind == row.step)
            too_few = len(usual) < 2 or all(step.at_end for step in usual)
            if too_few or once or (1 - share) ** len(usual) > MOST_CHANCE:
                names.append(f"{row.part} ({row.step})")
        return names

    @property
    def patterns(self) -> dict[str, list[str]]:
        """Known patterns that came with `after`, that went, that both show, and that one trace
        cannot show, or shows as it cannot rule them out: why."""
        told: dict[str, list[str]] = {"new": [], "gone": [], "in both": []}
        sides = {"before": self.before, "after": self.after}
        counts = [sum(len(side.usual[kind]) for kind in self.kinds) for side in self.compared]
        shown = {name: side.shown() for name, side in sides.items()}
        shown_in_kinds = [side.shown(self.kinds) for side in self.compared]
        for pattern in PATTERNS:
            known = {"decode steps", *pattern.needs}
            lacks = {name: [n for n in side.lacks if n in known] for name, side in sides.items()}
            alike = [pattern.name in names for names in shown_in_kinds]
            shows = [name for name in sides if pattern.name in shown[name]]
            if not shows:
                continue
            other, why = "after" if shows[0] == "before" else "before", list[str]()
            if len(shows) == len(sides) or all(alike) and not lacks[shows[0]]:
                word = "in both"
            elif all(alike):
                word, why = f"unsure in {shows[0]}", lacks[shows[0]]
            elif any(alike) and not {"decode steps", "whole steps"} & {*lacks[other]}:
                side = self.compared[other == "after"]
                steps = [step for step in side.steps if step.kind in self.kinds]
                word = "new" if other == "before" else "gone"
                if min(counts) < 2 or any(pattern.shows(side.trace, step) for step in steps):
                    word = "not decided"  # some show it, though not most
            else:
                word, why = f"unseen in {other}", lacks[other] or ["step of its kind"]
            because = f" (no {', '.join(why)})" if why else ""
            told.setdefault(word, []).append(pattern.name + because)
        return told

    def card(self) -> Card:
        """Steps, the parts that changed most, and the patterns."""
        whole = self.rows[self.rows.part == "whole step"]
        title = ", ".join(
            f"{row.step} {row.before:,.0f} to {row.after:,.0f} us "
            f"({self._calls(row.step) or f'{row.ratio:.2f} x'})"
            for row in whole.itertuples()
        )
        shown = self.rows.groupby("step", sort=False).head(MOST_ROWS)
        kernels = shown.kernels.map(lambda names: charts.shorten(names, LONGEST_NAMES))
        shown = shown.drop(columns="step") if len(self.kinds) == 1 else shown
        patterns = [
            (f"pattern {word}", name) for word, names in self.patterns.items() for name in names
        ]
        return Card(
            title=f"{self.before.trace.path} to {self.after.trace.path}: {title}",
            notes=self._notes(),
            facts=patterns,
            table=in_words(shown.assign(kernels=kernels), FORMATS),
            caption=f"microseconds a step, as traced: {TIMES}",
            footer=self.origin,
        )

    def _notes(self) -> list[str]:
        notes = [
            "Two traces show what changed; a profiler slows both, and no verdict is given.",
            f"Times are {TIMES}.",
            f"At most {MOST_ROWS} rows of a kind are shown; .table() and --json have all.",
        ]
        sides = {"before": self.before.blind(), "after": self.after.blind()}
        for note in dict.fromkeys([*sides["before"], *sides["after"]]):
            where = [name for name, said in sides.items() if note in said]
            notes.append(note if len(where) > 1 else f"{where[0]}: {note}")
        if self.undecided:
            words = "Not decided whether it came or went, as too few whole steps are on record"
            notes.append(f"{words}: {', '.join(self.undecided)}.")
        for kind in self.kinds:
            lengths = [[step.length_us for step in side.usual[kind]] for side in self.compared]
            ranges = [f"{len(us)} of {min(us):,.0f} to {max(us):,.0f} us" for us in lengths]
            notes.append(f"Steps of {kind}, before and after: {' and '.join(ranges)}.")
            if calls := self._calls(kind):
                words = "other layers, or cut steps: their times do not compare"
                notes.append(f"A {kind} step has {calls} ({words}).")
            sizes = [
                sorted({step.batch_size for step in side.steps if step.kind == kind} - {0})
                for side in self.compared
            ]
            if all(sizes) and sizes[0] != sizes[1]:
                notes.append(f"Batch sizes of {kind} differ: {sizes[0]} and {sizes[1]}.")
        alone = {kind for side in self.compared for kind in side.usual} - {*self.kinds}
        if alone:
            notes.append(f"Steps of {', '.join(sorted(alone))} are in one trace alone.")
        if self.before.trace.gpu != self.after.trace.gpu:
            notes.append("The traces are of different GPUs.")
        return notes

    def _calls(self, kind: str) -> str:
        """The attention calls of this kind of step in both, where they differ; else empty."""
        a, b = (fmean(map(calls_in, side.usual[kind])) for side in self.compared)
        return f"{a:g} to {b:g} attention calls" if a != b else ""


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


def _part_of(kernel: str) -> str:
    return ATTENTION if family_of(kernel) else role_of(kernel) or kernel


def _runs(step: Step, part: str) -> bool:
    return any(_part_of(span.name) == part for span in step.work)


def _parts(side: Diagnosis, kind: str) -> dict[str, dict[str, Any]]:
    """Part of a kind of step -> its microseconds, its launches and the kernels in it."""
    around, kernels = (rows[rows.step == kind] for rows in (side.around(), side.kernels()))
    parts = {part: NO_PART | {"us": around[column].item()} for part, column in HEAD.items()}
    for row in kernels.to_dict("records"):
        part = _part_of(row["kernel"])
        known = parts.get(part, NO_PART)
        parts[part] = {
            "us": known["us"] + row["us a step"],
            "launches": known["launches"] + row["a step"],
            "kernels": (*known["kernels"], row["kernel"]),
        }
    return parts


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
        "ratio": b["us"] / a["us"] if a["us"] else float("nan"),
        "launches": counts if a["launches"] or b["launches"] else "",
        "kernels": kernels,
    }
