"""Diagnose a trace of a server: which attention ran, what surrounds it, which known patterns show.

A trace is slower than the server was; shares and counts are the trace's, gains are of records.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import pandas as pd

from ..core.backends.table import FAMILIES, ROLE_OF, family_of
from ..draw.cards import Card, Shown
from ..measure.spans import Span
from ..measure.steps import DECODE, PREFILL, UNKNOWN, VERIFY, Step, find_steps
from ..measure.trace_file import Trace, read_trace
from .patterns import PATTERNS, STATED, Evidence, Pattern, gained, of_role, tile_rows

LONGEST = 5


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis(Shown):
    """What a trace shows: its steps, and the known patterns with their evidence.

    `shape` is what the trace and the caller tell of the layer.
    """

    trace: Trace
    steps: tuple[Step, ...]
    shape: dict[str, Any]
    found: tuple[tuple[Pattern, Evidence], ...]

    @cached_property
    def decodes(self) -> list[Step]:
        """The steps with a query, or a few, per request."""
        return [step for step in self.steps if step.kind in (DECODE, VERIFY)]

    def table(self) -> pd.DataFrame:
        """A row per kind of step and kernel of attention or beside it, medians over the steps."""
        rows = []
        for kind in dict.fromkeys(step.kind for step in self.steps):
            of_kind = [step for step in self.steps if step.kind == kind]
            for name in dict.fromkeys(s.name for step in of_kind for s in step.work if _known(s)):
                rows.append((kind, *_row(name, of_kind)))
        columns = ["step", "kernel", "is", "of", "a step", "a layer", "us a step", "share"]
        return pd.DataFrame(rows, columns=columns)

    def patterns(self) -> pd.DataFrame:
        """A row per known pattern that shows: evidence, cost, mend, what it gains, since when."""
        rows = [
            {
                "pattern": pattern.name,
                "evidence": evidence.words,
                "us a step": round(evidence.cost_us, 1),
                "mend": pattern.mend,
                "by the records": gained(pattern.gain, self.shape),
                "since": pattern.since(),
                "notebook": pattern.notebook,
            }
            for pattern, evidence in self.found
        ]
        return pd.DataFrame(rows)

    def unseen(self) -> list[str]:
        """What the trace could not show."""
        trace, lacks = self.trace, ["The lengths of the requests are in no trace."]
        if not trace.marks:
            lacks.append(
                "No marks of steps: kernels tell decode from prefill, copies of lengths are unseen."
            )
        if not trace.launched_us:
            lacks.append(
                "No calls of the CUDA API: launches, graphs and waits of the host are unseen."
            )
        if not trace.gpu:
            lacks.append("The GPU is not named.")
        if trace.gpus > 1:
            lacks.append(f"Of {trace.gpus} GPUs only the one that ran most is looked at.")
        if not self.decodes:
            lacks.append("No decode step: the patterns are of decode and verification.")
        if fa2 := [
            s for step in self.decodes for s in step.attention if family_of(s.name) == "fa2"
        ]:
            if not tile_rows(fa2[0]):
                lacks.append("Names are without template arguments: fa2's tiles are unseen.")
        return lacks

    def card(self) -> Card:
        """Facts, kernels, and the patterns that show."""
        count = len(self.found)
        told = f"{count} known pattern{'s' * (count != 1)}" if count else "no known pattern"
        patterns = [pair for row in self.patterns().to_dict("records") for pair in row.items()]
        shares = self.table().share
        table = self.table().round({"a step": 1, "a layer": 2, "us a step": 1})
        return Card(
            title=f"{self.trace.path}: {len(self.steps)} steps, {told}",
            notes=self.unseen(),
            facts=[*self._facts(), *((name, str(value)) for name, value in patterns)],
            table=table.assign(share=(100 * shares).map("{:.1f} %".format)),
            caption="attention, medians over the steps of a kind, as traced",
            footer=f"{self.trace.source}, {self.trace.gpu or 'GPU unknown'}",
        )

    def _facts(self) -> list[tuple[str, str]]:
        if not self.steps:
            names = Counter(span.name for span in self.trace.work).most_common(LONGEST)
            return [("no attention", "of the known kernels; most often ran " + _listed(names))]
        kinds = Counter(step.kind for step in self.steps).most_common()
        facts = [("steps", _listed(kinds))]
        for kind, _ in kinds:
            steps = [step for step in self.steps if step.kind == kind]
            facts += [(f"{kind}: a step", _length(steps)), (f"{kind}: before it", _ahead(steps))]
            if extra := [len(of_role(step, "prepare")) - 1 for step in steps]:
                if (more := median(extra)) > 0:
                    facts.append(
                        (f"{kind}: between layers", f"{more:g} prepares that one would save")
                    )
        if self.shape:
            facts.append(("shape", ", ".join(f"{k} {v}" for k, v in self.shape.items())))
        return facts


def diagnose(path: str | os.PathLike[str], **shape: Any) -> Diagnosis:
    """Read a trace (`measure.trace_file`) and look for what is known to slow attention.

    `shape` tells what a trace does not, for the gains on record: `heads="32/8"`, `kv_len=8192`, any
    of `STATED`. ValueError for a file that is no trace, in one line, and for an unknown name.
    """
    for name in shape:
        if name not in STATED:
            raise ValueError(f"shape must be told by {', '.join(STATED)}, got {name!r}")
    trace = read_trace(path)
    steps = find_steps(trace, lambda span: bool(family_of(span.name)), _guess)
    found = Diagnosis(trace, steps, {}, ())
    decodes = found.decodes
    shown = [(each, each.shows(trace, decodes)) for each in PATTERNS] if decodes else []
    evident = tuple((each, evidence) for each, evidence in shown if evidence)
    return Diagnosis(trace, steps, _shape(decodes) | shape, evident)


def _guess(attention: Sequence[Span]) -> str:
    """Decode or prefill, of attention without a mark and outside of CUDA graphs."""
    first = attention[0]
    family = FAMILIES[family_of(first.name)]
    if family.decodes or tile_rows(first) == 16:
        return DECODE
    return PREFILL if tile_rows(first) else UNKNOWN


def _shape(steps: Sequence[Step]) -> dict[str, Any]:
    """What decode steps tell of the batch and the layer."""
    told: dict[str, Any] = {}
    if batches := [step.batch_size for step in steps if step.batch_size]:
        told["batch_size"] = round(median(batches))
    if steps:
        told["layers"] = round(median(_layers(step) for step in steps))
    for span in (span for step in steps[:1] for span in step.attention[:1]):
        if family_of(span.name) == "cuda-cores" and len(span.grid) > 1 and len(span.block) > 1:
            told["heads"] = f"{span.grid[1] * span.block[1]}/{span.grid[1]}"
    return told


def _layers(step: Step) -> int:
    """Layers of a step: launches of its most frequent attention kernel."""
    return Counter(span.name for span in step.attention).most_common(1)[0][1]


def _known(span: Span) -> bool:
    return bool(family_of(span.name) or ROLE_OF.get(span.name))


def _row(name: str, steps: Sequence[Step]) -> tuple[str, str, str, float, float, float, float]:
    ran = [[span for span in step.work if span.name == name] for step in steps]
    family = family_of(name)
    what = f"attention ({family})" if family else ROLE_OF[name]
    library = FAMILIES[family].library if family else ""
    us = [sum(span.length_us for span in each) for each in ran]
    pairs = list(zip(steps, ran, us, strict=True))
    layer = median(len(each) / _layers(step) for step, each, _ in pairs)
    share = median(time / step.busy_us if step.busy_us else 0.0 for step, _, time in pairs)
    return name, what, library, median(map(len, ran)), layer, median(us), share


def _length(steps: Sequence[Step]) -> str:
    busy = median(step.busy_us for step in steps)
    graph = sum(step.in_graph for step in steps)
    return (
        f"{median(map(_layers, steps)):g} layers, GPU busy for {busy:,.0f} us, "
        f"{median(len(step.work) for step in steps):g} launches; "
        f"attention in a CUDA graph in {graph} of {len(steps)}"
    )


def _ahead(steps: Sequence[Step]) -> str:
    """What runs before the first attention kernel."""
    copies = [sum(span.name == "Memcpy DtoH" for span in step.ahead) for step in steps]
    waits = [sum(wait.length_us for wait in step.waits) for step in steps]
    known = [sum(ROLE_OF.get(span.name) == "metadata" for span in step.ahead) for step in steps]
    return (
        f"{median(len(step.ahead) for step in steps):g} launches, {median(known):g} of known "
        f"metadata kernels, {median(s.idle_ahead_us for s in steps):,.0f} us idle, the host waits "
        f"{median(waits):,.0f} us, {median(copies):g} copies to the host"
    )


def _listed(counted: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counted)
