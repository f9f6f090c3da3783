"""Diagnose a trace of a server: which attention ran, what surrounds it, which known patterns show.

A trace is slower than the server was; shares and counts are the trace's, gains are of records.
"""

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
from ..measure.spans import busy_us
from ..measure.steps import DECODE, VERIFY, Step, find_steps
from ..measure.trace_file import Trace, read_trace
from .patterns import PATTERNS, STATED, gained, kind_of, of_family, tile_rows

LONGEST = 5
COLUMNS = ["step", "kernel", "is", "of", "a step", "a layer", "us a step", "share"]


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis(Shown):
    """What a trace shows; `shape` is what the trace and the caller tell of the layer."""

    trace: Trace
    steps: list[Step]
    shape: dict[str, Any]

    @cached_property
    def decodes(self) -> list[Step]:
        """The steps with a query, or a few, per request."""
        return [step for step in self.steps if step.kind in (DECODE, VERIFY)]

    def table(self) -> pd.DataFrame:
        """A row per kind of step and kernel of attention or beside it, medians over the steps."""
        rows = []
        for kind in dict.fromkeys(step.kind for step in self.steps):
            steps = [step for step in self.steps if step.kind == kind]
            names = dict.fromkeys(span.name for step in steps for span in step.work)
            known = [name for name in names if family_of(name) or name in ROLE_OF]
            rows += [(kind, *_row(name, steps)) for name in known]
        return pd.DataFrame(rows, columns=COLUMNS)

    @cached_property
    def patterns(self) -> pd.DataFrame:
        """A row per known pattern that at least half of the decode steps show, by median cost."""
        rows = []
        for pattern in PATTERNS:
            found = [told for step in self.decodes if (told := pattern.shows(self.trace, step))]
            if found and 2 * len(found) >= len(self.decodes):
                where = f"in {len(found)} of {len(self.decodes)} decode steps"
                since = pattern.since if isinstance(pattern.since, str) else pattern.since()
                row = {
                    "pattern": pattern.name,
                    "evidence": f"{found[0][0]}; {where}",
                    "us a step": round(median(cost for _, cost in found), 1),
                    "mend": pattern.mend,
                    "by the records": gained(pattern, self.shape),
                    "since": since,
                    "notebook": pattern.notebook,
                }
                rows.append(row)
        return pd.DataFrame(rows)

    def unseen(self) -> list[str]:
        """What the trace could not show."""
        trace, fa2 = self.trace, [s for step in self.decodes for s in of_family(step, "fa2")]
        told = {
            "The lengths of the requests are in no trace.": True,
            "No marks of steps: kernels tell decode from prefill, copies of lengths are unseen.": (
                not trace.marks
            ),
            "No calls of the CUDA API: launches, graphs and waits of the host are unseen.": (
                not trace.launched_us
            ),
            "The GPU is not named.": not trace.gpu,
            f"Of {trace.gpus} GPUs only the one that ran most is looked at.": trace.gpus > 1,
            "No decode step: the patterns are of decode and verification.": not self.decodes,
            "Names are without template arguments: fa2's tiles are unseen.": (
                bool(fa2) and not tile_rows(fa2[0])
            ),
        }
        return [words for words, so in told.items() if so]

    def card(self) -> Card:
        """Facts, kernels, and the patterns that show."""
        count, table = len(self.patterns), self.table()
        told = f"{count or 'no'} known pattern{'s' * (count > 1)}"
        patterns = [pair for row in self.patterns.to_dict("records") for pair in row.items()]
        return Card(
            title=f"{self.trace.path}: {len(self.steps)} steps, {told}",
            notes=self.unseen(),
            facts=[*self._facts(), *((name, str(value)) for name, value in patterns)],
            table=table.round(2).assign(share=(100 * table.share).map("{:.1f} %".format)),
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
        return [
            *facts,
            ("shape", ", ".join(f"{k} {v}" for k, v in self.shape.items()) or "unknown"),
        ]


def diagnose(path: str | os.PathLike[str], **shape: Any) -> Diagnosis:
    """Read a trace (`measure.trace_file`) and look for what is known to slow attention.

    `shape` tells what a trace does not, for the gains on record: `heads="32/8"`, `kv_len=8192`, any
    of `STATED`. ValueError for a file that is no trace, in one line, and for an unknown name.
    """
    for name in shape:
        if name not in STATED:
            raise ValueError(f"shape must be told by {', '.join(STATED)}, got {name!r}")
    trace = read_trace(path)
    found = Diagnosis(trace, find_steps(trace, kind_of), {})
    sizes = [step.batch_size for step in found.decodes if step.batch_size]
    found.shape.update({"batch_size": round(median(sizes))} if sizes else {}, **shape)
    return found


def _layers(step: Step) -> int:
    """Layers of a step: launches of its most frequent attention kernel."""
    return Counter(span.name for span in step.attention).most_common(1)[0][1]


def _row(name: str, steps: Sequence[Step]) -> tuple[str | float, ...]:
    ran = [[span.length_us for span in step.work if span.name == name] for step in steps]
    family = family_of(name)
    what = f"attention ({family})" if family else ROLE_OF[name]
    layer = median(len(us) / _layers(step) for step, us in zip(steps, ran, strict=True))
    share = median(sum(us) / (busy_us(step.work) or 1) for step, us in zip(steps, ran, strict=True))
    of = FAMILIES[family].library if family else ""
    return name, what, of, median(map(len, ran)), layer, median(map(sum, ran)), share


def _length(steps: Sequence[Step]) -> str:
    return (
        f"{median(map(_layers, steps)):g} layers, "
        f"GPU busy for {median(busy_us(step.work) for step in steps):,.0f} us, "
        f"{median(len(step.work) for step in steps):g} launches; "
        f"attention in a CUDA graph in {sum(step.in_graph for step in steps)} of {len(steps)}"
    )


def _ahead(steps: Sequence[Step]) -> str:
    """What runs before the first attention kernel."""
    known = [sum(ROLE_OF.get(span.name) == "metadata" for span in step.ahead) for step in steps]
    copies = [sum(span.name == "Memcpy DtoH" for span in step.ahead) for step in steps]
    idle = median(step.idle_us([*step.ahead, step.body[0]]) for step in steps)
    waits = median(busy_us(step.waits) for step in steps)
    return (
        f"{median(len(step.ahead) for step in steps):g} launches, {median(known):g} of known "
        f"metadata kernels, {idle:,.0f} us idle, the host waits {waits:,.0f} us, "
        f"{median(copies):g} copies to the host"
    )


def _listed(counted: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counted)
