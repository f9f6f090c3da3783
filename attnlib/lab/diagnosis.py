"""Diagnose a trace of a server: which attention ran, what surrounds it, which known patterns show.

A trace is slower than the server was; shares and counts are the trace's, gains are of records.
"""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import pandas as pd

from ..core.backends.table import FAMILIES, family_of, role_of
from ..core.layer import parse_layer
from ..core.spec import ELEMENT_BYTES, require_int, require_word
from ..draw.cards import Card, Shown
from ..measure.spans import Span, busy_us
from ..measure.steps import DECODE, VERIFY, Step, find_steps
from ..measure.trace_file import Trace, read_trace
from .patterns import PATTERNS, SIZES, STATED, WAITING, gained, kind_of, ran, tile_rows

MOST_KERNELS = 12
DECODES = (DECODE, VERIFY)
NEEDS = {
    "marks": "No marks of steps: kernels tell decode from prefill, copies of lengths are unseen.",
    "batch size": "No batch size: --shape batch_size=N tells whether fa2 splits requests.",
    "launches": "No calls of the CUDA API: launches, graphs and waits of the host are unseen.",
    "count of SMs": "Its SMs are not counted: whether a kernel has few blocks is unseen.",
    "decode steps": "No decode step: the patterns are of decode and verification.",
    "template arguments": "Names are without template arguments: fa2's tiles are unseen.",
}
"""What a pattern may need (`Pattern.needs`) -> what is said where a trace lacks it."""


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis(Shown):
    """What a trace shows; `shape` is what the trace and the caller tell of the layer.

    `cut` says which steps at its ends are left out, as fewer calls of them are in the trace.
    """

    trace: Trace
    steps: list[Step]
    shape: dict[str, Any]
    cut: str = ""

    @cached_property
    def decodes(self) -> list[Step]:
        """The steps with a query, or a few, per request."""
        return [step for step in self.steps if step.kind in DECODES]

    @property
    def origin(self) -> str:
        """Who traced, and which GPU."""
        return f"{self.trace.source}, {self.trace.gpu or 'GPU unknown'}"

    def table(self) -> pd.DataFrame:
        """A row per kind of step and kernel of attention or beside it, medians over the steps."""
        rows = self.kernels()
        return rows[rows["is"] != ""].reset_index(drop=True)

    def kernels(self) -> pd.DataFrame:
        """A row per kind of step and kernel, all of them, most time first; medians over the steps.

        Without steps it is the whole trace.
        """
        return pd.DataFrame(self._kernel_rows)

    @cached_property
    def _kernel_rows(self) -> list[dict[str, Any]]:
        rows = []
        for kind in dict.fromkeys(step.kind for step in self.steps):
            rows += kernel_rows(kind, [step for step in self.steps if step.kind == kind])
        whole = Step("all", 0, (), self.trace.work, (), (), ())
        return rows if self.steps else kernel_rows("whole trace", [whole])

    def around(self) -> pd.DataFrame:
        """A row per kind of step: how many, medians of what it has, and of what is before it."""
        rows = [
            {
                "step": step.kind,
                "attention calls": calls_in(step),
                "launches": len(step.work),
                "us busy": busy_us(step.work),
                "in a graph": step.in_graph,
                "launches before": len(step.ahead),
                "of metadata": sum(role_of(span.name) == "metadata" for span in step.ahead),
                "us idle before": math.nan if step.begins else step.idle_ahead_us,
                "us the host waits": busy_us(step.waits),
                "copies to the host": sum(span.name == "Memcpy DtoH" for span in step.ahead),
            }
            for step in self.steps
        ]
        kinds = pd.DataFrame(rows, columns=None if rows else ["step"]).groupby("step", sort=False)
        return kinds.median().assign(steps=kinds.size()).round(1).reset_index()

    @cached_property
    def lacks(self) -> list[str]:
        """What of `NEEDS` the trace does not have."""
        trace, fa2 = self.trace, [span for step in self.decodes for span in ran(step, "fa2")]
        has = {
            "marks": trace.marks,
            "batch size": not fa2 or any(step.batch_size for step in self.decodes),
            "launches": trace.has_launches,
            "count of SMs": trace.num_sms,
            "decode steps": self.decodes,
            "template arguments": not fa2 or tile_rows(fa2[0]),
        }
        return [name for name, there in has.items() if not there]

    @cached_property
    def patterns(self) -> pd.DataFrame:
        """A row per known pattern that at least half of the steps of a kind show: decode, in which
        drafts count, or verification."""
        rows = []
        for pattern in PATTERNS:
            shown, count = list[Any](), 0
            for kind in DECODES:
                steps = [step for step in self.decodes if step.kind == kind]
                evidence = (pattern.shows(self.trace, step) for step in steps)
                found = [shows for shows in evidence if shows]
                if found and 2 * len(found) >= len(steps):
                    shown, count = shown + found, count + len(steps)
            if not shown:
                continue
            us = median(evidence.us for evidence in shown)
            usual = min(shown, key=lambda evidence: abs(evidence.us - us))
            rows.append(
                {
                    "pattern": pattern.name,
                    "evidence": f"{usual.text}; in {len(shown)} of {count} decode steps",
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
        notes = ["The lengths of the requests are in no trace.", *self.blind()]
        known = [step for step in self.decodes if not step.begins]
        idle = [s.idle_ahead_us for s in known if s.idle_ahead_us > WAITING * busy_us(s.work)]
        if 2 * len(idle) > len(known):
            us = f"{median(idle):,.0f} us"
            notes.append(f"The GPU idles for {us} before the first layer; a profiler adds to it.")
        return notes

    def blind(self) -> list[str]:
        """What traces of other settings show."""
        notes = [self.cut, *(NEEDS[name] for name in self.lacks)]
        notes += [] if self.trace.gpu else ["The GPU is not named."]
        if self.trace.gpus > 1:
            notes.append(f"Of {self.trace.gpus} GPUs only the one that ran most is looked at.")
        return [note for note in notes if note]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        tables = {"patterns": self.patterns, "steps": self.around(), "kernels": self.kernels()}
        rows = {name: json.loads(t.to_json(orient="records")) for name, t in tables.items()}
        words = {"trace": os.path.basename(self.trace.path), "origin": self.origin}
        return words | {"shape": self.shape, **rows, "unseen": self.unseen()}

    def card(self) -> Card:
        """Facts, kernels, and the patterns that show."""
        count, steps, around = len(self.patterns), len(self.steps), self.around()
        facts = [pair for row in self.patterns.to_dict("records") for pair in row.items()]
        facts += self.shape.items()
        if not self.steps:
            facts.append(("no attention", "of the known kernels; by time there ran the following"))
        return Card(
            title=f"{os.path.basename(self.trace.path)}: {steps} step{'s' * (steps != 1)}, "
            f"{count or 'no'} known pattern" + "s" * (count > 1),
            notes=self.unseen(),
            facts=[(name, str(value)) for name, value in facts],
            table=self.table().round(3),
            caption="attention, medians over the steps of a kind, as traced",
            footer=self.origin,
            more=[
                ("all kernels by time", self.kernels().head(MOST_KERNELS).round(3)),
                ("steps, and what runs before the first layer", around.where(around.notna(), "-")),
            ],
        )


def read_diagnosis(path: str | os.PathLike[str], shape: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of one trace; arguments and errors as of `lab.diagnose.diagnose`."""
    for name, value in shape.items():
        require_word("shape", name, STATED)
        if name == "heads":
            parse_layer(str(value))
        if name in SIZES:
            require_int(name, value)
        if name.endswith("dtype"):
            require_word(name, value, ELEMENT_BYTES)
    trace, stated = read_trace(path), shape.get("batch_size", 0)
    found, cut = _whole(find_steps(trace, kind_of))
    steps = [
        replace(step, batch_size=stated) if step.kind in DECODES and not step.batch_size else step
        for step in found
    ]
    diagnosis = Diagnosis(trace, steps, {}, cut)
    grids = {span.grid for step in diagnosis.decodes for span in ran(step, "fa2")}
    kv_heads = {grid[-1] for grid in grids if len(grid) > 2}
    heads = str(shape.get("heads", ""))
    if kv_heads and heads and parse_layer(heads).num_kv_heads not in kv_heads:
        counts = " or ".join(map(str, sorted(kv_heads)))
        raise ValueError(f"heads must have {counts} KV heads, as fa2's grid has, got {heads!r}")
    sizes = [step.batch_size for step in diagnosis.decodes if step.batch_size]
    if stated and sizes and stated not in sizes:
        raise ValueError(f"batch_size must be as marked, {sorted({*sizes})}, got {stated}")
    diagnosis.shape.update({"batch_size": round(median(sizes))} if sizes else {}, **shape)
    return diagnosis


def _whole(steps: list[Step]) -> tuple[list[Step], str]:
    """The steps without a first or last one that has fewer attention calls than the others of its
    kind, and what was left out."""
    cut: dict[int, str] = {}
    for name, end in (("first", 0), ("last", len(steps) - 1)) if steps else ():
        kind, calls = steps[end].kind, calls_in(steps[end])
        inner = [calls_in(step) for step in steps[1:-1] if step.kind == kind]
        most = min(inner) if inner else max(calls_in(s) for s in steps if s.kind == kind)
        if calls < most:
            cut[end] = f"the {name} ({calls} attention calls of {most})"
    whole = [step for place, step in enumerate(steps) if place not in cut]
    return whole, f"Steps that are cut are left out: {', '.join(cut.values())}." if cut else ""


def kernel_rows(kind: str, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """A row per kernel of these steps of one kind, most time first: medians over the steps."""
    busy = [busy_us(step.work) or 1.0 for step in steps]
    attention = [calls_in(step) for step in steps]
    rows = []
    for name, us in times_by(steps, lambda span: span.name).items():
        family, sums = family_of(name), [sum(times) for times in us]
        calls = [len(times) / count for times, count in zip(us, attention, strict=True)]
        rows.append(
            {
                "step": kind,
                "kernel": name,
                "is": f"attention ({family})" if family else role_of(name),
                "of": FAMILIES[family].library if family else "",
                "a step": median(map(len, us)),
                "per attention call": median(calls),
                "us a step": median(sums),
                "share": median(part / whole for part, whole in zip(sums, busy, strict=True)),
            }
        )
    return sorted(rows, key=lambda row: -row["us a step"])


def times_by(steps: Sequence[Step], key: Callable[[Span], str]) -> dict[str, list[list[float]]]:
    """Key -> the lengths of its spans, us, a list per step."""
    times: defaultdict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in steps])
    for place, step in enumerate(steps):
        for span in step.work:
            times[key(span)][place].append(span.length_us)
    return times


def calls_in(step: Step) -> int:
    """Attention calls of a step: launches of its most frequent attention kernel; 1 without any."""
    counts = Counter(span.name for span in step.attention).most_common(1)
    return counts[0][1] if counts else 1
