"""Diagnose a trace of a server, or set two of them side by side.

Of two traces, steps of one kind are compared, by the times that each trace alone has
(`diagnosis.TIMES`); GPU busy and both idle times add up to the whole step. What does the same is
one row, whatever its name: attention, its schedule, merge, metadata and indexer; every other kernel
is matched by name. What one trace lacks, such as marks, is said of it and not reconciled.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..measure.steps import EITHER, Step
from ..run.figures import charts, style
from .cards import Card, Shown, fact_lines, in_words
from .diagnosis import DECODES, TIMES, Diagnosis, json_rows, read_diagnosis
from .pasted import KernelTotals, read_totals
from .step_rows import ATTENTION, NAN, calls_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 12
"""Of a kind of step, in the card and in the figure."""
LONGEST_NAMES = 80
WHOLE_STEP = "whole step"
GPU_BUSY = "GPU busy"
TIMES_OF_STEP = {
    WHOLE_STEP: "us",
    GPU_BUSY: "us busy",
    "idle before the first layer": "us idle before",
    "idle later": "us idle later",
}
"""Parts of a step that are times and no kernels -> columns of `Diagnosis.around`."""
FORMATS = {"before": ",.1f", "after": ",.1f", "ratio": ".2f", "change": "+,.1f"}
TracePath = str | os.PathLike[str]
Row = dict[str, Any]
SLOWER, NOT_SLOWER, NOT_DECIDED = "slower", "not slower", "not decided"
MARGIN = 0.05
"""How much longer a step may be: below it a profiler's own cost decides."""
LEAST_STEPS = 3
ENOUGH = 7
"""Steps of a kind in a trace of which `LEAST_STEPS` or more count; of 6, only 2 may."""
REQUESTS = "batch sizes"
PATTERN_COLUMNS = ["pattern", "step", "before", "after", "fix"]


@dataclass(frozen=True)
class Part:
    """One part of a kind of step: microseconds and launches a step, names of its kernels."""

    us: float = 0.0
    launches: float = 0.0
    kernels: tuple[str, ...] = ()


NO_PART = Part()


@dataclass(frozen=True, eq=False, repr=False)
class TraceChange(Shown):
    """From the trace of `before` to that of `after`. ValueError if no kind of step is in both."""

    before: Diagnosis
    after: Diagnosis

    def __post_init__(self) -> None:
        if not self.kinds:
            before, after = map(_kinds_of, self.sides)
            raise ValueError(
                "before and after must both have steps of one kind with known attention, "
                f"got {before} and {after}"
            )

    @cached_property
    def sides(self) -> list[Diagnosis]:
        """Both; decode and verification are one kind where no mark of a trace tells them apart."""
        sides = [self.before, self.after]
        if any(EITHER in side.usual for side in sides):
            return [_with_one_decode_kind(side) for side in sides]
        return sides

    @property
    def kinds(self) -> list[str]:
        """The kinds of steps that both traces have."""
        before, after = self.sides
        return [kind for kind in before.usual if kind in after.usual]

    def table(self) -> pd.DataFrame:
        """A row per part and kind of step, the largest change first: microseconds a step before and
        after, their ratio, the change, then how often it was launched, and its kernels."""
        return self.rows.round(3)

    @property
    def outcome(self) -> str:
        """Whether a step of some kind is `slower`, `not slower`, or `not decided`.

        Slower are steps of one kind that are longer by more than `MARGIN` in the mean, where each
        usual one after is longer than each one before. Nothing is decided by
        fewer than `LEAST_STEPS`, by other attention calls or GPUs, and where requests or KV tokens
        differ by more than `MARGIN` in the mean.
        """
        outcomes = {self._outcome_of(kind) for kind in self.kinds}
        for outcome in (SLOWER, NOT_DECIDED):
            if outcome in outcomes:
                return outcome
        return NOT_SLOWER

    @property
    def why_not_decided(self) -> str:
        """The reason for each kind of step of which nothing is decided; empty if there is none."""
        reasons = [self._open(kind) for kind in self.kinds]
        return "; ".join(dict.fromkeys(filter(None, reasons)))

    def _said(self) -> str:
        """The outcome as a sentence."""
        if self.outcome == NOT_DECIDED:
            return f"Not decided: {self.why_not_decided}."
        return f"After is {self.outcome}."

    def _outcome_of(self, kind: str) -> str:
        if self._open(kind):
            return NOT_DECIDED
        before, after = self._lengths_us(kind)
        return SLOWER if _is_longer(before, after) else NOT_SLOWER

    def _open(self, kind: str) -> str:
        """Why nothing is decided of a kind of step, or the empty string."""
        if reason := self._differ(kind):
            return reason
        before, after = self._lengths_us(kind)
        fewest = min(len(before), len(after))
        if fewest < LEAST_STEPS:
            counted = "1 step" if fewest == 1 else f"{fewest} steps"
            needed = f"{LEAST_STEPS} are needed; record {ENOUGH} steps or more"
            return f"{counted} of {kind} to compare, {needed}"
        if _is_longer(before, after) and min(after) <= max(before):
            ranges = " and ".join(_length_range(side, kind) for side in self.sides)
            return f"lengths of {kind} steps overlap, {ranges}"
        if not _is_longer(before, after):
            return self._slower_at_times(kind)
        return ""

    def _slower_at_times(self, kind: str) -> str:
        """That all steps of a kind are longer in the mean though the usual ones are not, or the
        empty string."""
        before, after = ([step.length_us for step in side.whole[kind]] for side in self.sides)
        if not _is_longer(before, after):
            return ""
        means = f"{fmean(before):,.0f} and {fmean(after):,.0f} us"
        return f"usual {kind} steps are alike, and all are longer after, {means} in the mean"

    def _lengths_us(self, kind: str) -> list[list[float]]:
        """The lengths of the steps of a kind that count, before and after."""
        return [[step.length_us for step in side.usual[kind]] for side in self.sides]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The table, not rounded."""
        rows: list[Row] = []
        for kind in self.kinds:
            before, after = (_parts(side, kind) for side in self.sides)
            changes = []
            for name in dict.fromkeys([*before, *after]):
                a = before.get(name, NO_PART)
                b = after.get(name, NO_PART)
                changes.append({"step": kind, "part": name, **_change(name, a, b)})
            rows += changes
        rows.sort(key=lambda row: -abs(row["change"]))
        return pd.DataFrame(rows)

    def figure(self) -> "Figure":
        """The change of each part, a bar each, the largest of each kind of step.

        Whole times are grey and stand first; what changed by less than a hundredth of the largest
        is left out.
        """
        rows = self._largest()
        size = rows.change.abs()
        rows = rows[size >= size.max() / 100]
        is_part = ~rows.part.isin([WHOLE_STEP, GPU_BUSY])
        rows = rows.iloc[is_part.argsort(kind="stable")].reset_index(drop=True)
        figure, (axis,) = charts.panels(
            [f"{self.before.trace.path} to {self.after.trace.path}"],
            (9, 1.2 + 0.3 * len(rows)),
            self.origin,
            (f"{', '.join(self.kinds)}: after - before, us a step (as traced)", ""),
        )
        colors = [_color_of(row) for row in rows.itertuples()]
        bars = axis.barh(range(len(rows)), rows.change, color=colors)
        axis.bar_label(
            bars,
            fmt="{:+,.0f}",
            padding=3,
            fontsize=8,
        )
        axis.margins(x=0.15)
        labels = rows.part.map(charts.shorten)
        if len(self.kinds) > 1:
            labels = rows.step + ": " + labels
        charts.categories(axis, "y", labels)
        axis.axvline(0, **style.RULE)
        return figure

    @property
    def origin(self) -> str:
        """Who traced both, and which GPUs."""
        return f"before: {self.before.origin}; after: {self.after.origin}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "times": TIMES,
            "outcome": self.outcome,
            "why not decided": self.why_not_decided,
            "new patterns": self.new_patterns,
            "changes": json_rows(self.rows),
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
        }

    def card(self) -> Card:
        """The parts that changed most, and the patterns of each trace."""
        shown = self._largest()
        names = shown.kernels.map(lambda kernels: charts.shorten(kernels, LONGEST_NAMES))
        shown = shown.assign(kernels=names)
        if len(self.kinds) == 1:
            shown = shown.drop(columns="step")
        new: list[Row] = []
        for row in self.new_patterns:
            known = {f"new in {self.after.trace.path}": row["pattern"], **row}
            del known["pattern"]
            new.append(known)
        return Card(
            title=f"{self.before.trace.path} to {self.after.trace.path}: {self._whole_steps()}",
            notes=self._notes(),
            facts=fact_lines(new),
            table=in_words(shown, FORMATS),
            caption="microseconds a step, as traced",
            footer=self.origin,
            more=[("known patterns of each trace, us a step", self.patterns())],
        )

    @property
    def new_patterns(self) -> list[Row]:
        """The known patterns that the trace after shows, and the one before does not."""
        before = set()
        if not self.before.patterns.empty:
            before = set(self.before.patterns.pattern)
        rows = self.after.patterns.to_dict("records")
        return [row for row in rows if row["pattern"] not in before]

    def patterns(self) -> pd.DataFrame:
        """A row per known pattern and kind of step: its time before and after, and the fix."""
        rows: dict[tuple[str, str], Row] = {}
        for when, side in (("before", self.before), ("after", self.after)):
            for found in side.patterns.to_dict("records"):
                key = found["pattern"], found["step"]
                row = rows.setdefault(key, {"before": NAN, "after": NAN})
                for name in ("pattern", "step", "fix"):
                    row[name] = found[name]
                row[when] = found["us per step"]
        table = pd.DataFrame(list(rows.values()), columns=PATTERN_COLUMNS)
        return in_words(table, FORMATS)

    def _largest(self) -> pd.DataFrame:
        """The rows of the largest changes."""
        return self.rows.head(MOST_ROWS)

    def _whole_steps(self) -> str:
        """Each kind of step in words, before and after."""
        words = []
        for row in self.rows[self.rows.part == WHOLE_STEP].itertuples():
            how = self._other_calls(row.step) or f"{row.ratio:.2f} x"
            words.append(f"{row.step} {row.before:,.0f} to {row.after:,.0f} us ({how})")
        return ", ".join(words)

    def _other_calls(self, kind: str) -> str:
        """The attention calls of this kind of step in both, where they differ; else empty."""
        before, after = (_mean_calls(side.usual[kind]) for side in self.sides)
        if before == after:
            return ""
        return f"{before:g} to {after:g} attention calls"

    def _notes(self) -> list[str]:
        notes = [
            f"{self._said()} A profiler changes times. Confirm without one.",
            TIMES,
            f"At most {MOST_ROWS} rows are shown; .table() and --json have all.",
        ]
        before = self.before.blind()
        after = self.after.blind()
        notes += [note for note in before if note in after]
        notes += [f"before: {note}" for note in before if note not in after]
        notes += [f"after: {note}" for note in after if note not in before]
        for kind in self.kinds:
            notes += self._notes_on(kind)
        alone = {kind for side in self.sides for kind in side.usual} - {*self.kinds}
        if alone:
            notes.append(f"Steps of {', '.join(sorted(alone))} are in one trace alone.")
        if self.before.trace.gpu != self.after.trace.gpu:
            notes.append("The traces are of different GPUs.")
        return notes

    def _notes_on(self, kind: str) -> list[str]:
        """How many steps of a kind are compared, and what makes them differ."""
        before, after = (_lengths(side, kind) for side in self.sides)
        notes = [f"Steps of {kind}, before and after: {before} and {after}."]
        if calls := self._other_calls(kind):
            words = "other layers, or cut steps: their times do not compare"
            notes.append(f"A {kind} step has {calls} ({words}).")
        if sizes := self._other_sizes(kind):
            notes.append(f"Batch sizes of {kind} differ: {sizes}.")
        for when, side in (("before", self.before), ("after", self.after)):
            if len(side.usual.get(kind, ())) == 1:
                notes.append(f"Of {kind} only one step counts {when}: trace ten or more.")
        return notes

    def _differ(self, kind: str) -> str:
        """Why times of a kind of step do not compare: other layers, requests, lengths or GPUs."""
        if calls := self._other_calls(kind):
            return f"{kind} steps have {calls}"
        before, after = (_loads(side.usual[kind]) for side in self.sides)
        for what, old in before.items():
            new = after[what]
            if old and new and abs(new / old - 1) > MARGIN:
                return f"{what} of {kind} steps differ, {old:,.0f} and {new:,.0f} in the mean"
        if kind in DECODES and not (before[REQUESTS] and after[REQUESTS]):
            return self._unknown_batch(before[REQUESTS], after[REQUESTS])
        gpu, other = (side.trace.gpu or "unknown" for side in self.sides)
        return f"GPUs differ, {gpu} and {other}" if gpu != other else ""

    def _unknown_batch(self, before: float, after: float) -> str:
        """Which trace does not tell its batch size, and how to state it."""
        if not before and not after:
            return "batch sizes of both traces are unknown (pass --shape lens=...)"
        name = "after" if before else "before"
        known = f"the other trace has {before or after:,.0f} requests"
        hint = "pass --shape lens=... if it is the same"
        return f"the batch size of {name} is unknown, {known} ({hint})"

    def _other_sizes(self, kind: str) -> str:
        """The batch sizes of this kind of step in both, where they are known and differ."""
        sizes, other_sizes = (_batch_sizes(side, kind) for side in self.sides)
        if sizes and other_sizes and sizes != other_sizes:
            return f"{sizes} and {other_sizes}"
        return ""


def diagnose(
    path: TracePath,
    after: TracePath = "",
    **shape: Any,
) -> Diagnosis | TraceChange | KernelTotals:
    """Find what is known to slow attention in a server's trace, or set two traces side by side.

    Parameters
    ----------
    path : str or os.PathLike
        A Chrome trace of torch.profiler (`.json`, also `.json.gz`), or an SQLite export of
        Nsight Systems. Also the text of `key_averages().table()`, or of `nsys stats --report
        cuda_gpu_kern_sum`, as table or CSV, which have kernels and no steps.
    after : str or os.PathLike, optional
        A second trace: a table says what changed from the first one to it, in microseconds a step.
    **shape : str or int
        What the trace does not tell of the layer, for the gains on record: `heads` (text such as
        `32/8`), `head_dim`, `page` (tokens), `lens` (tokens of each request, `8192x15+300`)
        or in its place `batch_size` (requests) and `kv_len` (tokens in the mean), `dtype` and
        `kv_dtype` (`bfloat16`, `float16` or `float8_e4m3fn`). Also the releases that served (one of
        `sglang` and `vllm`, and `flashinfer`), and the `context` that the server is configured for
        (tokens), for the known problems that hold.

    Returns
    -------
    Diagnosis, TraceChange or KernelTotals
        Of two traces a `TraceChange`, of text `KernelTotals`. All are shown by a notebook;
        `.table()` has the kernels of one trace, or the parts of a step before and after.

    Raises
    ------
    ValueError
        For a file that is no trace, a folder, an unknown fact or value, and two traces without a
        kind of step that both have.
    FileNotFoundError
        Where there is no such file.

    Examples
    --------
    >>> import attnlib
    >>> slow = attnlib.diagnose("data/traces/fa3_decode.json.gz", heads="32/8", kv_len=8192)
    >>> slow.patterns.pattern.tolist()
    ['fa3 of FlashInfer decodes']
    """
    shape = shape_said(shape)
    _require_file(path)
    if after:
        _require_file(after)
    totals = read_totals(path)
    if totals and not after:
        return totals
    for given in (path, after):
        if given and read_totals(given):
            raise ValueError(f"{given} must be a trace to be compared, it has sums without steps")
    diagnosis = read_diagnosis(path, shape)
    if not after:
        return diagnosis
    return TraceChange(diagnosis, read_diagnosis(after, shape))


def _require_file(path: TracePath) -> None:
    """FileNotFoundError where there is nothing, ValueError for a folder, TypeError for no path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"trace must be the path of a file, got {path!r}")
    if not os.path.exists(path):
        raise FileNotFoundError(f"trace must be a file, there is none at {os.fspath(path)!r}")
    if os.path.isdir(path):
        raise ValueError(f"trace must be a file, got the folder {os.fspath(path)!r}")


def shape_said(words: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a layer, with `page` under its name in records.

    ValueError if that is given twice.
    """
    said = dict(words)
    if "page" in said and "page_size" in said:
        raise ValueError(f"page_size must be left out with page, got {said['page_size']!r}")
    if "page" in said:
        said["page_size"] = said.pop("page")
    if "lens" in said:
        said["lens"] = str(said["lens"])
    return said


def _with_one_decode_kind(side: Diagnosis) -> Diagnosis:
    """The diagnosis with decode and verification as one kind of step."""
    steps = []
    for step in side.steps:
        is_decode = step.kind in DECODES
        steps.append(replace(step, kind=EITHER) if is_decode else step)
    return replace(side, steps=steps)


def _kinds_of(side: Diagnosis) -> str:
    return ", ".join(sorted(side.usual)) or "none"


def _mean_calls(steps: Sequence[Step]) -> float:
    return fmean(calls_in(step) for step in steps)


def _parts(side: Diagnosis, kind: str) -> dict[str, Part]:
    """The parts of a kind of step, by name: its times, then its kernels by what they do."""
    around = side.around().set_index("step").loc[kind]
    parts: dict[str, Part] = {}
    for name, column in TIMES_OF_STEP.items():
        parts[name] = Part(us=around[column])
    kernels = side.kernels()
    for row in kernels[kernels.step == kind].to_dict("records"):
        name = _part_of(row)
        known = parts.get(name, NO_PART)
        parts[name] = Part(
            us=known.us + row["us a step"],
            launches=known.launches + row["a step"],
            kernels=(*known.kernels, row["kernel"]),
        )
    return parts


def _part_of(row: Row) -> str:
    """What the kernel of a row of `Diagnosis.kernels` does, or its name."""
    if row["is"].startswith(ATTENTION):
        return ATTENTION
    return row["is"] or row["kernel"]


def _change(name: str, before: Part, after: Part) -> Row:
    """One part of a kind of step before and after."""
    launches = f"{before.launches:g}"
    if before.launches != after.launches:
        launches += f" to {after.launches:g}"
    is_time = name in TIMES_OF_STEP
    names = []
    for side in (before, after):
        names.append(", ".join(side.kernels) or "none")
    kernels = " to ".join(dict.fromkeys(names))
    if is_time or name in names:  # no kernel, or the part is that kernel
        kernels = ""
    return {
        "before": before.us,
        "after": after.us,
        "ratio": after.us / before.us if before.us else float("nan"),
        "change": after.us - before.us,
        "launches": "" if is_time else launches,
        "kernels": kernels,
    }


def _lengths(side: Diagnosis, kind: str) -> str:
    """How many steps of a kind are compared, and how long they are."""
    return f"{len(side.usual[kind])} of {_length_range(side, kind)}"


def _color_of(row: Any) -> str:
    """Grey for a time that has other rows in it, else by its direction."""
    if row.part in (WHOLE_STEP, GPU_BUSY):
        return style.OTHER
    if row.change > 0:
        return style.VERMILION
    return style.BLUE


def _length_range(side: Diagnosis, kind: str) -> str:
    """How long the steps of a kind are that count."""
    lengths_us = [step.length_us for step in side.usual[kind]]
    return f"{min(lengths_us):,.0f} to {max(lengths_us):,.0f} us"


def _is_longer(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether steps are longer by more than `MARGIN` in the mean."""
    return fmean(after) > (1 + MARGIN) * fmean(before)


def _loads(steps: Sequence[Step]) -> dict[str, float]:
    """The requests and the KV tokens of steps in the mean, 0 where no mark has them."""
    return {
        REQUESTS: fmean(step.batch_size for step in steps),
        "KV tokens": fmean(step.mark.kv_tokens for step in steps),
    }


def _batch_sizes(side: Diagnosis, kind: str) -> list[int]:
    """The batch sizes of steps of a kind that are known, sorted."""
    sizes = {step.batch_size for step in side.steps if step.kind == kind}
    return sorted(sizes - {0})
