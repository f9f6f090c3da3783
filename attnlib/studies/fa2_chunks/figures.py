"""The picture of the study `fa2_chunks`: what the planner predicts, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ...core.fa2.choice import CHUNK_STEP, choose
from ...draw import charts, style
from ...kinds.decode.case import DecodeCase
from ...kinds.plan.case import PlanCase
from ..fa2_plan.tables import batch_of
from .learn import SWEPT, ChunkSweep, sweeps

RING: dict[str, Any] = {"color": style.VERMILION, "markersize": 11, "fillstyle": "none"}
"""Around the chosen chunk."""
TICKS = tuple(2**power for power in range(8, 18))
MOST_TICKS = 5
STEEP = 3
"""Most over least predicted time from which a log axis shows more."""


def choice_chart(frame: pd.DataFrame, cases: Sequence[DecodeCase]) -> charts.Figure:
    """Predicted time of every candidate chunk and the measured ones on top: a panel per batch.

    The ring is the chosen chunk. Raises ValueError for a case that was not swept.
    """
    from matplotlib.lines import Line2D

    swept = {sweep.case.label: sweep for sweep in sweeps(frame)}
    titles = {PlanCase(case).label: f"{case.spec.heads}, {batch_of(case)}" for case in cases}
    if lacks := [label for label in titles if label not in swept]:
        raise ValueError(f"cases must be of sweeps on record, {lacks[0]!r} is not")
    chunks = frame[frame.backend == SWEPT]
    drawn = chunks[[replace(case, chunk=0).label in titles for case in chunks.case]]
    words = ("KV chunk, tokens", "time of a call, us")
    size = (1 + 3.1 * len(titles), 4.0)
    figure, axes = charts.panels(
        [*titles.values()], size, drawn, words, legend=charts.LEGEND_INCHES
    )
    for axis, label in zip(axes, titles, strict=True):
        _draw_choice(axis, swept[label])
    legend = {
        "predicted, every candidate": {"color": style.OTHER, "marker": "."},
        "measured": {"color": style.BLUE, "marker": "o", "linestyle": ""},
        "chosen": {**RING, "marker": "o", "linestyle": ""},
    }
    charts.legend_below(figure, [Line2D([], [], label=n, **look) for n, look in legend.items()])
    return figure


def _draw_choice(axis: charts.Axes, sweep: ChunkSweep) -> None:
    choice = choose(sweep.shape, sweep.lens)
    told = pd.Series(choice.us, index=choice.chunks).sort_index()
    # A candidate as long as the longest request cuts nothing, and neither does a longer one.
    told = told[np.isfinite(told) & (told.index < CHUNK_STEP + sweep.lens.max())]
    axis.plot(told.index, told, ".-", color=style.OTHER, markersize=3, linewidth=1)
    axis.plot(sweep.chunks, sweep.run_us, "o", color=style.BLUE, markersize=4)
    axis.plot(choice.chunk, choice.us[choice.best], "o", **RING)
    style.log_axes(axis, *("x" if told.max() < STEEP * told.min() else "xy"))
    ticks = [tick for tick in TICKS if told.index.min() <= tick <= told.index.max()]
    ticks = ticks[:: 1 + len(ticks) // MOST_TICKS]
    axis.set_xticks(ticks, [style.short_count(tick) for tick in ticks])
