"""Figures of the study `engine_modes`: each draws one table of `tables`."""

from __future__ import annotations

import pandas as pd

from ...core.backends.table import FAMILIES
from ...draw import charts, style
from ...draw.style import Look
from ...kinds.cost import Ceilings
from .tables import FA2, FA3, GROUPS, LIBRARY, MANY, mode_rows, over, plain, roofs_us, times

BY_HEADS = {
    "32/8": Look(style.BLUE, "o", "32/8 heads"),
    "16/2": Look(style.GREEN, "D", "16/2 heads"),
    "8/1": Look(style.ORANGE, "s", "8/1 heads"),
}
BACKENDS = {
    FA2: Look(FAMILIES["fa2"].color, "o", "FlashInfer fa2"),
    FA3: Look(FAMILIES["fa3"].color, "s", "FlashInfer fa3"),
    LIBRARY: Look(style.GREEN, "^", "FlashAttention-3"),
}
SPREAD = 0.7
"""Of a group's height that its shapes are spread over, so that dots do not cover others."""


def ratio_chart(frame: pd.DataFrame) -> charts.Figure:
    """fa2 / fa3 of every shape, a row per mode; right of 1 fa3 is faster. Bars: 95 % intervals."""
    table = over(plain(mode_rows(frame)), FA2, FA3)
    figure, axis, rows = _by_mode(frame, table, "Which of FlashInfer's kernels is faster, by mode")
    charts.dots(axis, rows, "ratio", "place", by="heads", looks=BY_HEADS, interval="x")
    axis.set_xlabel("run time of fa2 / run time of fa3   (right of 1: fa3 is faster)")
    style.log_axes(axis, "x")
    axis.legend(loc="lower left", frameon=True)
    return figure


def roof_chart(frame: pd.DataFrame, limit: Ceilings) -> charts.Figure:
    """Run time over the roof of bytes and FLOPs of every shape, a row per mode."""
    table = times(plain(mode_rows(frame)))
    figure, axis, rows = _by_mode(frame, table, "Distance from the roof, by mode")
    there = [name for name in BACKENDS if name in table]
    shares = rows[there].div(roofs_us(table, limit), axis=0).assign(place=rows.place)
    rows = shares.melt("place", var_name="backend", value_name="share")
    charts.dots(axis, rows, "share", "place", by="backend", looks=BACKENDS)
    axis.set_xlabel("run time / roof   (1: the memory or the tensor cores are busy)")
    style.log_axes(axis, "x")
    axis.legend(loc="lower right", frameon=True)
    return figure


def _by_mode(
    frame: pd.DataFrame, table: pd.DataFrame, title: str
) -> tuple[charts.Figure, charts.Axes, pd.DataFrame]:
    """A panel with a row per mode and a line at 1, and `table` with the `place` of each dot."""
    groups = [group for group in GROUPS if group in set(table.group)]
    aside = table.groupby("group").group.transform(lambda own: charts.spread(own.index, SPREAD))
    placed = table.assign(place=table.group.astype(object).map(groups.index) + aside.astype(float))
    figure, (axis,) = charts.panels([title], (8.5, 1.3 + 0.6 * len(groups)), frame)
    launched = {group: "eager" if group in MANY else "in a graph" for group in groups}
    charts.categories(axis, "y", (f"{group}\n({how})" for group, how in launched.items()))
    axis.axvline(1, **style.RULE)
    for edge in range(1, len(groups)):
        axis.axhline(edge - 0.5, color=style.SEAM, linewidth=0.8)
    return figure, axis, placed
