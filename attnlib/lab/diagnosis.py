"""Diagnose a trace of a server: which attention ran, what surrounds it, which known patterns show.

A trace is slower than the server was; shares and counts are the trace's, gains are of records. All
that is said of a kind of step is of the same steps (`Diagnosis.usual`), so that parts add up.
"""

import json
import os
from collections import ChainMap, Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from statistics import fmean, median
from typing import Any

import pandas as pd

from ..core.backends.table import FAMILIES, family_of, role_of
from ..core.layer import parse_layer
from ..core.spec import ELEMENT_BYTES, require_int, require_word
from ..draw.cards import Card, Shown
from ..measure.spans import busy_us
from ..measure.steps import DECODE, EITHER, UNKNOWN, VERIFY, Step, find_steps
from ..measure.trace_file import Trace, read_trace
from .patterns import PATTERNS, SIZES, STATED, WAITING, gained, kind_of, ran, tile_rows

MOST_KERNELS = 12
DECODES = (DECODE, VERIFY, EITHER)
TIMES = "means over the middle half of a kind's steps by length, without those at the trace's ends"
NEEDS = {
    "marks": "No marks of steps: decode or verification is unknown, copies of lengths are unseen.",
    "batch size": "No batch size: --shape batch_size=N tells whether fa2 splits requests.",
    "launches": "No calls of the CUDA API: launches, and what was marked, are unseen.",
    "waits": "No waits of the host: copies that it waits for are unseen.",
    "graphs": "No calls of the CUDA API, or no ids of graphs and launches: graphs are unseen.",
    "copies": "No copies by the GPU: plans and lengths that are copied are unseen.",
    "shapes": "Kernels have no grids: whether one has few blocks is unseen.",
    "count of SMs": "Its SMs are not counted: whether a kernel has few blocks is unseen.",
    "decode steps": "No decode step: the patterns are of decode and verification.",
    "whole steps": "No decode step but at an end of the trace: what runs before it is unseen.",
    "template arguments": "Names are without template arguments: fa2's tiles are unseen.",
}
"""What a pattern may need (`Pattern.needs`) -> what is said where a trace lacks it."""
EMPTY: dict[str, dict[str, Any]] = {
    "marks": {"marks": ()},
    "launches": {"launched_us": {}},
    "waits": {"waits": ()},
    "graphs": {"in_graph": False, "launch": -1},
    "shapes": {"grid": (), "block": ()},
    "count of SMs": {"num_sms": 0},
    "template arguments": {"symbol": ""},
}
"""What a trace may lack -> the fields of it or of its spans that are then empty."""


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis(Shown):
    """What a trace shows; `shape` is what the trace and the caller tell of the layer, `stated`
    what the caller does."""

    trace: Trace
    steps: list[Step]
    shape: dict[str, Any]
    stated: Mapping[str, Any]

    @cached_property
    def decodes(self) -> list[Step]:
        """The steps with a query, or a few, per request."""
        return [step for step in self.steps if step.kind in DECODES]

    @property
    def origin(self) -> str:
        """Who traced, and which GPU."""
        return f"{self.trace.source}, {self.trace.gpu or 'GPU unknown'}"

    @cached_property
    def usual(self) -> dict[str, list[Step]]:
        """Kind -> the steps that all that is said of it is of (`TIMES`), by length."""
        kinds: dict[str, list[Step]] = {step.kind: [] for step in self.steps}
        for step in sorted(self.steps, key=lambda step: step.length_us):
            kinds[step.kind].append(step)
        for kind, steps in kinds.items():
            often = Counter(map(calls_in, steps))
            most = max(often, key=lambda calls: (often[calls], calls))
            # Decodes with fewer calls are cut; without marks they may be drafts, if not rarer.
            cut = {c for c in often if c < most and (kind != EITHER or often[c] < often[most])}
            whole = [s for s in steps if kind not in DECODES or calls_in(s) not in cut]
            inner = [step for step in whole if not step.at_end] or whole
            kinds[kind] = inner[len(inner) // 4 : len(inner) - len(inner) // 4]
        return kinds

    def table(self) -> pd.DataFrame:
        """A row per kind of step and kernel of attention or beside it (`TIMES`)."""
        rows = self.kernels()
        return rows[rows["is"] != ""].reset_index(drop=True)

    def kernels(self) -> pd.DataFrame:
        """A row per kind of step and kernel, all of them, most time first (`TIMES`).

        Without steps it is the whole trace.
        """
        return pd.DataFrame(self._kernel_rows)

    @cached_property
    def _kernel_rows(self) -> list[dict[str, Any]]:
        rows, whole = [], {"whole trace": [Step("all", 0, (), self.trace.work, (), (), ())]}
        for kind, steps in (self.usual or whole).items():
            busy, calls = sum(step.busy_us for step in steps), sum(map(calls_in, steps))
            kernels: defaultdict[str, list[float]] = defaultdict(list)
            for span in chain(*(step.work for step in steps)):
                kernels[span.name].append(span.length_us)
            for name, times in sorted(kernels.items(), key=lambda kernel: -sum(kernel[1])):
                family = family_of(name)
                rows.append(
                    {
                        "step": kind,
                        "kernel": name,
                        "is": f"attention ({family})" if family else role_of(name),
                        "of": FAMILIES[family].library if family else "",
                        "a step": len(times) / len(steps),
                        "per attention call": len(times) / calls,
                        "us a step": sum(times) / len(steps),
                        "share": sum(times) / (busy or 1.0),
                    }
                )
        return rows

    def around(self) -> pd.DataFrame:
        """A row per kind of step: what it has and what is before it (`TIMES`), and their count."""
        rows = [
            {
                "step": step.kind,
                "attention calls": calls_in(step),
                "launches": len(step.work),
                "us": step.length_us,
                "us busy": step.busy_us,
                "us idle before": step.idle_ahead_us,
                "us idle later": max(0.0, step.length_us - step.busy_us - step.idle_ahead_us),
                "in a graph": step.in_graph,
                "launches before": len(step.ahead),
                "us the host waits": busy_us(step.waits),
                "copies to the host": sum(span.name == "Memcpy DtoH" for span in step.ahead),
            }
            for step in chain(*self.usual.values())
        ]
        kinds = pd.DataFrame(rows, columns=None if rows else ["step"]).groupby("step", sort=False)
        count = pd.Series(Counter(step.kind for step in self.steps))
        return kinds.mean().assign(steps=count).reset_index()

    @cached_property
    def lacks(self) -> list[str]:
        """What of `NEEDS` the trace does not have."""
        trace, fa2 = self.trace, [s for s in self.trace.work if family_of(s.name) == "fa2"]
        usual = [step for kind in DECODES for step in self.usual.get(kind, ())]
        has = {
            "marks": trace.marks and (not self.steps or {*self.usual} - {UNKNOWN, EITHER}),
            "batch size": not fa2 or any(step.batch_size for step in self.decodes),
            "launches": trace.has_launches,
            "waits": trace.waits,
            "graphs": trace.has_launches or any(s.in_graph and s.launch >= 0 for s in trace.work),
            "copies": any(span.kind == "memcpy" for span in trace.work),
            "shapes": any(span.grid for span in trace.work),
            "count of SMs": trace.num_sms,
            "decode steps": self.decodes,
            "whole steps": not self.decodes or not all(step.at_end for step in usual),
            "template arguments": not fa2 or tile_rows(fa2[0]),
        }
        return [name for name, there in has.items() if not there]

    @cached_property
    def patterns(self) -> pd.DataFrame:
        """A row per known pattern and kind of decode step of which most show it."""
        rows = []
        for pattern, kind in product(PATTERNS, [kind for kind in self.usual if kind in DECODES]):
            by_step = [pattern.shows(self.trace, step) for step in self.usual[kind]]
            evidence = [shown for shown in by_step if shown]
            if 2 * len(evidence) <= len(by_step):
                continue
            us = fmean(shown.us for shown in evidence)
            count = f"{len(evidence)} of {len(by_step)} usual {kind} steps"
            rows.append(
                {
                    "pattern": pattern.name,
                    "fix": pattern.fix,
                    "step": kind,
                    "evidence": f"{evidence[len(evidence) // 2].text}; in {count}",
                    "us per step": round(us, 1),
                    "by the records": gained(pattern, self.shape, us),
                    "since": pattern.since,
                    "notebook": pattern.notebook,
                }
            )
        return pd.DataFrame(rows)

    def shown(self, kinds: Collection[str] = ()) -> set[str]:
        """The names of the patterns that steps of these kinds show, by default all."""
        rows = self.patterns.to_dict("records")
        return {row["pattern"] for row in rows if not kinds or row["step"] in kinds}

    def unseen(self) -> list[str]:
        """What the trace could not show."""
        lengths = "The lengths of the requests are in no trace."
        notes = [f"Times are {TIMES}.", lengths, *self.blind()]
        for row in self.around().to_dict("records"):
            if row["step"] in DECODES and row["us idle before"] > WAITING * row["us busy"]:
                step, us = row["step"], f"{row['us idle before']:,.0f} us before the first layer"
                notes.append(f"The GPU idles for {us} of a {step} step; a profiler adds to it.")
        return notes

    def blind(self) -> list[str]:
        """What traces of other settings show."""
        notes = [NEEDS[name] for name in self.lacks]
        notes += [] if self.trace.gpu else ["The GPU is not named."]
        if unknown := sum(step.kind == UNKNOWN for step in self.steps):
            notes.append(f"Steps of unknown kind, under no mark: {unknown} of {len(self.steps)}.")
        unmarked = [step for step in self.steps if step.kind in (EITHER, UNKNOWN)]
        if any(not step.in_graph or step.attention[0].launch < 0 for step in unmarked):
            notes.append("Steps are told apart by copies only: several may be counted as one.")
        for kind, usual in self.usual.items():
            calls = {calls_in(step) for step in self.steps if step.kind == kind}
            if kind in DECODES and (cut := sorted(calls - {*map(calls_in, usual)})):
                notes.append(f"Cut or of a draft, left out: {kind} steps of {cut} attention calls.")
            if any(step.at_end for step in usual):
                words = "those at the trace's ends are told of: parts may be missing"
                notes.append(f"Of {kind} steps only {words}, and a first one may be slow.")
        if self.trace.gpus > 1:
            notes.append(f"Of {self.trace.gpus} GPUs only the one that ran most is looked at.")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        tables = {"patterns": self.patterns, "steps": self.around(), "kernels": self.kernels()}
        rows = {name: json.loads(t.to_json(orient="records")) for name, t in tables.items()}
        words = {"trace": self.trace.path, "origin": self.origin}
        return words | {"times": TIMES, "shape": self.shape, **rows, "unseen": self.unseen()}

    def card(self) -> Card:
        """Facts, kernels, and the patterns that show."""
        rows, steps = self.patterns.to_dict("records"), len(self.steps)
        count = len({row["pattern"] for row in rows})
        facts = [pair for row in rows for pair in row.items()]
        facts += self.shape.items()
        if not self.steps:
            facts.append(("no attention", "of the known kernels; by time there ran the following"))
        return Card(
            title=f"{self.trace.path}: {steps} step{'s' * (steps != 1)}, "
            f"{count or 'no'} known pattern" + "s" * (count > 1),
            notes=self.unseen(),
            facts=[(name, str(value)) for name, value in facts],
            table=self.table().round(3),
            caption=f"attention: {TIMES}",
            footer=self.origin,
            more=[
                ("all kernels by time", self.kernels().head(MOST_KERNELS).round(3)),
                ("steps, and what runs before the first layer", self.around().round(1)),
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
    diagnosis, stated = _diagnosed(read_trace(path), shape), shape.get("batch_size", 0)
    grids = {span.grid for step in diagnosis.decodes for span in ran(step, "fa2")}
    kv_heads = {grid[-1] for grid in grids if len(grid) > 2}
    heads = str(shape.get("heads", ""))
    if kv_heads and heads and parse_layer(heads).num_kv_heads not in kv_heads:
        counts = " or ".join(map(str, sorted(kv_heads)))
        raise ValueError(f"heads must have {counts} KV heads, as fa2's grid has, got {heads!r}")
    sizes = [step.batch_size for step in diagnosis.decodes if step.batch_size]
    if stated and sizes and stated not in sizes:
        raise ValueError(f"batch_size must be as marked, {sorted({*sizes})}, got {stated}")
    return diagnosis


def without(diagnosis: Diagnosis, lacks: Collection[str]) -> Diagnosis:
    """The diagnosis of its trace as if that lacked these of `NEEDS`."""
    trace, skipped = diagnosis.trace, "memcpy" if "copies" in lacks else ""
    empty = ChainMap(*(EMPTY[name] for name in lacks if name in EMPTY))
    spans = {name: value for name, value in empty.items() if not hasattr(trace, name)}
    work = [replace(span, **spans) for span in trace.work if span.kind != skipped]
    fields = {name: value for name, value in empty.items() if name not in spans}
    return _diagnosed(replace(trace, **fields, work=work), diagnosis.stated)


def _diagnosed(trace: Trace, stated: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of a trace, and of a layer of which this is stated."""
    size = stated.get("batch_size", 0)
    steps = [
        replace(step, batch_size=size) if step.kind in DECODES and not step.batch_size else step
        for step in find_steps(trace, kind_of)
    ]
    sizes = [step.batch_size for step in steps if step.kind in DECODES and step.batch_size]
    marked = {"batch_size": round(median(sizes))} if sizes else {}
    return Diagnosis(trace, steps, marked | {**stated}, stated)


def calls_in(step: Step) -> int:
    """Attention calls of a step: launches of its most frequent attention kernel; 1 without any."""
    counts = Counter(span.name for span in step.attention).most_common(1)
    return counts[0][1] if counts else 1
