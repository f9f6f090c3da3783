"""Diagnose a trace of a server: which attention ran, what surrounds it, which known patterns show.

A trace is slower than the server was; shares and counts are the trace's, gains are of records.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..core.backends.table import FAMILIES, ROLE_OF, family_of
from ..core.spec import require_int, require_word
from ..draw.cards import Card, Shown
from ..measure.spans import busy_us, find_gaps
from ..measure.steps import DECODE, VERIFY, Step, find_steps
from ..measure.trace_file import Trace, read_trace
from .patterns import PATTERNS, SIZES, STATED, gained, kind_of, ran, tile_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 5


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

    @property
    def origin(self) -> str:
        """Who traced, and which GPU."""
        return f"{self.trace.source}, {self.trace.gpu or 'GPU unknown'}"

    def timeline(self, step: int = 0) -> "Figure":
        """A step drawn to scale; IndexError if there are fewer."""
        from ..draw.timeline import draw_timeline

        title = f"{os.path.basename(self.trace.path)}: step {step}, {self.steps[step].kind}"
        return draw_timeline(self.steps[step].work, title=title, footer=self.origin)

    def table(self) -> pd.DataFrame:
        """A row per kind of step and kernel of attention or beside it, medians over the steps."""
        rows = []
        for kind in dict.fromkeys(step.kind for step in self.steps):
            steps = [step for step in self.steps if step.kind == kind]
            names = dict.fromkeys(span.name for step in steps for span in step.work)
            known = [name for name in names if family_of(name) or name in ROLE_OF]
            rows += [{"step": kind, "kernel": name, **_row(name, steps)} for name in known]
        return pd.DataFrame(rows)

    def around(self) -> pd.DataFrame:
        """A row per kind of step: how many, medians of what it has, and of what is before it."""
        rows = [
            {
                "step": step.kind,
                "layers": _layers(step),
                "launches": len(step.work),
                "us busy": busy_us(step.work),
                "in a graph": step.in_graph,
                "launches before": len(step.ahead),
                "of metadata": sum(ROLE_OF.get(span.name) == "metadata" for span in step.ahead),
                "us idle before": sum(
                    gap.length_us for gap in find_gaps([*step.ahead, step.body[0]])
                ),
                "us the host waits": busy_us(step.waits),
                "copies to the host": sum(span.name == "Memcpy DtoH" for span in step.ahead),
            }
            for step in self.steps
        ]
        kinds = pd.DataFrame(rows, columns=None if rows else ["step"]).groupby("step", sort=False)
        return kinds.median().assign(steps=kinds.size()).round(1).reset_index()

    @cached_property
    def patterns(self) -> pd.DataFrame:
        """A row per known pattern that at least half of the decode steps show, by median cost."""
        rows = []
        for pattern in PATTERNS:
            shown = [e for step in self.decodes if (e := pattern.shows(self.trace, step))]
            if not shown or 2 * len(shown) < len(self.decodes):
                continue
            us = median(evidence.us for evidence in shown)
            rows.append(
                {
                    "pattern": pattern.name,
                    "evidence": f"{shown[0].text}; "
                    f"in {len(shown)} of {len(self.decodes)} decode steps",
                    "us per step": round(us, 1),
                    "fix": pattern.fix,
                    "by the records": gained(pattern, self.shape, us),
                    "since": pattern.since,
                    "notebook": pattern.notebook,
                }
            )
        return pd.DataFrame(rows)

    def unseen(self) -> list[str]:
        """What the trace could not show."""
        trace, fa2 = self.trace, [s for step in self.decodes for s in ran(step, "fa2")]
        visible = {
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
        return [words for words, so in visible.items() if so]

    def card(self) -> Card:
        """Facts, kernels, and the patterns that show."""
        count = len(self.patterns)
        facts = [pair for row in self.patterns.to_dict("records") for pair in row.items()]
        facts += self.shape.items()
        if not self.steps:
            names = Counter(span.name for span in self.trace.work).most_common(LONGEST)
            most_run = ", ".join(f"{count:,} {name}" for name, count in names)
            facts.append(("no attention", f"of the known kernels; most often ran {most_run}"))
        return Card(
            title=f"{os.path.basename(self.trace.path)}: {len(self.steps)} steps, "
            f"{count or 'no'} known pattern" + "s" * (count > 1),
            notes=self.unseen(),
            facts=[(name, str(value)) for name, value in facts],
            table=self.table().round(3),
            caption="attention, medians over the steps of a kind, as traced",
            footer=self.origin,
            more=[("steps, and what runs before the first layer", self.around())],
        )


def diagnose(path: str | os.PathLike[str], **shape: Any) -> Diagnosis:
    """Read a trace (`measure.trace_file`) and look for what is known to slow attention.

    `shape` tells what a trace does not, for the gains on record: `heads="32/8"`, `kv_len=8192`, any
    of `STATED`. ValueError for a file that is no trace, in one line, and for an unknown name.
    """
    for name, value in shape.items():
        require_word("shape", name, STATED)
        if name in SIZES:
            require_int(name, value)
    trace = read_trace(path)
    diagnosis = Diagnosis(trace, find_steps(trace, kind_of), {})
    sizes = [step.batch_size for step in diagnosis.decodes if step.batch_size]
    diagnosis.shape.update({"batch_size": round(median(sizes))} if sizes else {}, **shape)
    return diagnosis


def _layers(step: Step) -> int:
    """Layers of a step: launches of its most frequent attention kernel."""
    return Counter(span.name for span in step.attention).most_common(1)[0][1]


def _row(name: str, steps: Sequence[Step]) -> dict[str, str | float]:
    times = [[span.length_us for span in step.work if span.name == name] for step in steps]
    pairs = list(zip(steps, times, strict=True))
    family = family_of(name)
    return {
        "is": f"attention ({family})" if family else ROLE_OF[name],
        "of": FAMILIES[family].library if family else "",
        "a step": median(map(len, times)),
        "a layer": median(len(us) / _layers(step) for step, us in pairs),
        "us a step": median(map(sum, times)),
        "share": median(sum(us) / (busy_us(step.work) or 1) for step, us in pairs),
    }
