"""The view of one case: who ran it how fast, against which ceiling, with which kernels, and why."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from ..core.backends.table import FAMILIES
from ..draw import style
from ..draw.cards import Card, Shown
from ..kinds.cost import Ceilings
from ..studies.fa3_decode_regression import intervals
from .choices import LIVE, NAMES, Choices
from .sources import Source, ThisGpu, narrow, source_of
from .tables import NOTHING, Tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOOTER = "us is microseconds; share is the time at the ceiling over the time taken."
ROW_INCHES = 0.36
SHARES = {"share": ".0%", "margin": ".1%"}
FORMATS = {"us": ",.1f", "plan_us": ",.0f", "launches": "g", "ratio": ".2f", **SHARES}
"""How a column is rounded for reading; the others are words and counts."""


@dataclass(frozen=True, eq=False, repr=False)
class View(Tables, Shown):
    """What is on record of `choices`; `known` are notes of whoever made them."""

    known: tuple[str, ...] = ()

    @property
    def call(self) -> str:
        """The Python call that gives this view again."""
        return self.choices.call

    def figure(self) -> Figure:
        """Time of each backend, a dot per round, and the ceiling; ValueError without a time."""
        import matplotlib.pyplot as plt

        return self._draw(plt.figure)

    def image(self) -> str:
        """The figure as an HTML image that carries its bytes and its numbers in words."""
        from matplotlib.figure import Figure

        # Not pyplot's: it keeps its figures, and would show this one in whatever cell runs next.
        file = io.BytesIO()
        self._draw(Figure).savefig(file, format="png")
        known = self.times.dropna(subset="us")
        times = ", ".join(f"{row.backend} {row.us:,.1f} us" for row in known.itertuples())
        words = html.escape(f"Time of one call: {times}", quote=True)
        code = base64.b64encode(file.getvalue()).decode()
        return f"<img alt='{words}' style='max-width: 100%' src='data:image/png;base64,{code}'>"

    def _draw(self, make: Callable[..., Figure]) -> Figure:
        table = self.times.dropna(subset="us").iloc[::-1]
        if table.empty:
            raise ValueError("view must hold a backend that was measured ok, it has none")
        style.apply()
        looks = style.family_looks(FAMILIES)
        figure = make(figsize=(7.2, 1.6 + ROW_INCHES * len(table)), layout="constrained")
        axis = figure.subplots()
        for place, row in enumerate(table.itertuples()):
            color = looks[row.ran].color if row.ran in looks else style.OTHER
            axis.barh(place, row.us, height=0.55, color=color, alpha=0.35)
            rounds = self.samples[self.samples.backend == row.backend].run_us
            axis.plot(rounds, [place] * len(rounds), "o", color=color, markersize=4)
        marks = "a dot is a round"
        if self.floor_us == self.floor_us:
            axis.axvline(self.floor_us, color="0.2", linewidth=1)
            marks += ", the line the time at the ceiling"
        names = table.backend + [f"\n({ran})" if ran in looks else "" for ran in table.ran]
        axis.set_yticks(range(len(table)), names)
        axis.grid(visible=False, axis="y")
        axis.set_xlim(left=0)
        axis.set_xlabel(f"time of one call, us ({marks})")
        axis.set_title(f"{self.choices.model}\n{self.choices.case.label}", x=0)
        style.add_footer(figure, self.samples)
        return figure

    def card(self) -> Card:
        """The view as a card."""
        share, pairs = self.times.share, self.comparison
        compared = {
            "time over time": pairs.backend + " / " + pairs.against,
            "ratio": pairs.ratio,
            "interval": intervals(pairs),
            "rounds": pairs.rounds,
            "verdict": pairs.verdict,
            "margin": pairs.margin,
        }
        kernels = _in_words(self.kernels, launches="launches a call")
        return Card(
            title=f"{self.choices.model}: {self.choices.case.label}",
            notes=(self.served, *self.notes),
            facts=[*self.facts.items()],
            table=_in_words(self.times, launches="kernels a call", plan_us="plan, us"),
            caption="Time of one call: median over the rounds, a fresh process each",
            bars=share.fillna(0).tolist() if share.notna().any() else [],
            footer=FOOTER,
            more=(
                ("Compared, paired round by round", _in_words(pd.DataFrame(compared))),
                ("Kernels of one call, from the trace", kernels),
                ("Which rule would choose what", _in_words(self.rules)),
            ),
            code=self.call,
        )

    @property
    def served(self) -> str:
        """Who answers, in a sentence."""
        days = sorted({record.started_at[:10] for record in self.mine})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "not yet"
        gpu = f"{self.machine.get('gpu') or 'CPU'} {self.machine.get('gpu_id', '')}".strip()
        name = self.source.name
        if name != LIVE:
            told = f"Served from records: study {name}, {gpu}, measured {when}. No GPU is used."
            waited = any(record.settle_us for record in self.mine)
            return told if waited else f"{told} No sample waited for a steady clock."
        return f"Measured here, on {gpu}, {when}." if days else "Measures here; not on record yet."

    @property
    def facts(self) -> dict[str, str]:
        """What the case must cost, and at which ceilings."""
        said = {
            "must move": f"{self.cost.io_bytes / 1e6:,.4g} MB",
            "useful work": f"{self.cost.flops / 1e9:,.4g} GFLOP",
        }
        bounds = self.bounds_us
        if isinstance(self.limit, Ceilings):
            said["ceilings, measured"] = f"copy {self.limit.copy_gbps:,.0f} GB/s"
            if "FLOPs" in bounds:
                rate = f", bf16 matmul {self.limit.matmul_tflops:,.0f} TFLOP/s"
                said["ceilings, measured"] += rate
            longest = max(bounds, key=lambda name: bounds[name])
            said["time at the ceiling"] = f"{self.floor_us:,.1f} us, by {longest}"
        return said

    @property
    def notes(self) -> tuple[str, ...]:
        """What to mind: failures with their reasons, what was left out, what is missing."""
        failed = {(r.item.backend, r.status, r.reason) for r in self.mine if r.status != "ok"}
        said = [f"{backend}: {status}: {reason}" for backend, status, reason in sorted(failed)]
        seen = {record.item.backend for record in self.mine}
        absent = ", ".join(name for name in self.choices.backends if name not in seen)
        if seen and absent:
            said.append(f"Not on record for these choices: {absent}.")
        left_out = sum(record.throttled for record in self.mine)
        if left_out:
            said.append(f"{left_out} records of a throttled GPU are left out.")
        if isinstance(self.limit, Ceilings):
            if "FLOPs" not in self.bounds_us:
                said.append("No matmul ceiling on record: the ceiling is that of the bytes.")
            if self.cost.io_bytes <= self.machine.get("l2_mib", 0) * 2**20:
                said.append("The bytes fit the L2 cache, which is faster than the copy ceiling.")
        elif len(self.samples):
            said.append(f"No share of a ceiling: {self.limit}.")
        return (*self.known, *said)


def view(
    model: str = NAMES[0],
    *,
    backends: Sequence[str] = (),
    batch: int | None = None,
    kv_len: int | None = None,
    page_size: int | None = None,
    lengths: str | None = None,
    variant: str | None = None,
    release: str | None = None,
    timer: str | None = None,
    against: str | None = None,
    rounds: int | None = None,
    records: str = "",
) -> View:
    """The view of one decode case of `model` (`choices.NAMES`); what is not said is usual.

    `records` is a study whose published records serve it, or `live`: measure on this GPU what is
    missing of `rounds` rounds, then show it. By default it is `live` in live mode, and in replay
    mode the first study that has the model.

    ValueError lists what an argument may be; RuntimeError says why nothing can be measured here.
    """
    asked = dict(locals())
    source = source_of(model, asked.pop("records"))
    choices = narrow(source, asked).choices
    if isinstance(source, ThisGpu):
        from .sweep import measure_missing

        if reason := source.unavailable():
            raise RuntimeError(f"records='live' must be measured on a CUDA GPU: {reason}")
        measure_missing(source, choices)
    return look(source, choices)


def look(source: Source, choices: Choices, known: Sequence[str] = ()) -> View:
    """What is on record of `choices`, and nothing measured; ValueError for an impossible shape."""
    asked, records = (choices.case, choices.timer), source.records
    around = tuple(record for record in records if (record.item.case, record.item.timer) == asked)
    return View(choices, source, records, around, tuple(known))


def _in_words(table: pd.DataFrame, **headings: str) -> pd.DataFrame:
    """The table rounded for reading, NaN as `NOTHING`; `headings` are new names of columns."""
    shown = {
        name: [NOTHING if x != x else format(x, FORMATS.get(name, "")) for x in table[name]]
        for name in table
    }
    return pd.DataFrame(shown).rename(columns=headings)
