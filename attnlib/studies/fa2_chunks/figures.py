"""The picture of the study `fa2_chunks`: what the planner predicts, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...core.fa2.choice import CHUNK_STEP, choose
from ...draw import charts, style
from ...kinds.decode.case import DecodeCase
from ...kinds.plan.case import PlanCase
from ..fa2_plan.tables import batch_of
from .learn import SWEPT, ChunkSweep, sweeps

TICKS = tuple(2**power for power in range(8, 18))
MOST_TICKS = 5
STEEP = 3
"""Most over least predicted time from which a log axis shows more."""


def choice_chart(frame: pd.DataFrame, cases: Sequence[DecodeCase]) -> charts.Figure:
    """Predicted time of every candidate chunk and the measured ones on top: a panel per batch.

    The ring is the planner's choice, as measured. Raises ValueError for a case that was not swept.
    """
    swept = {sweep.case: sweep for sweep in sweeps(frame)}
    titles = {PlanCase(case): f"{case.spec.heads}, {batch_of(case)}" for case in cases}
    if lacks := [case.label for case in titles if case not in swept]:
        raise ValueError(f"cases must be of sweeps on record, {lacks[0]!r} is not")
    chunks = frame[frame.backend == SWEPT]
    drawn = chunks[[PlanCase(case.decode, case.q_len) in titles for case in chunks.case]]
    words = ("KV chunk, tokens", "time of a call, us")
    size = (1 + 3.1 * len(titles), 4.0)
    figure, axes = charts.panels(
        [*titles.values()], size, drawn, words, legend=charts.LEGEND_INCHES
    )
    for axis, case in zip(axes, titles, strict=True):
        _draw_choice(axis, swept[case])
    charts.legend_below(figure, axes[0].get_legend_handles_labels()[0])
    return figure


def _draw_choice(axis: charts.Axes, sweep: ChunkSweep) -> None:
    choice = choose(sweep.shape, sweep.lens)
    told = pd.Series(choice.us, index=choice.chunks).sort_index()
    # A candidate as long as the longest request cuts nothing, and neither does a longer one.
    told = told[np.isfinite(told) & (told.index < CHUNK_STEP + sweep.lens.max())]
    looks: dict[str, dict[str, Any]] = {
        "predicted, every candidate": {"color": style.OTHER, "markersize": 3, "linewidth": 1},
        "measured": {"color": style.BLUE, "markersize": 4},
        "the choice, measured": {"color": style.VERMILION, "markersize": 11, "fillstyle": "none"},
    }
    drawn = ((told.index, told), (sweep.chunks, sweep.run_us), (choice.chunk, sweep.own_us))
    for (name, look), line, form in zip(looks.items(), drawn, (".-", "o", "o"), strict=True):
        axis.plot(*line, form, label=name, **look)
    style.log_axes(axis, *("x" if told.max() < STEEP * told.min() else "xy"))
    ticks = [tick for tick in TICKS if told.index.min() <= tick <= told.index.max()]
    ticks = ticks[:: 1 + len(ticks) // MOST_TICKS]
    axis.set_xticks(ticks, [style.short_count(tick) for tick in ticks])
