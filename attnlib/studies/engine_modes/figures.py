"""The figures of the study `engine_modes`. Each draws one table of `modes_rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...draw import style
from ...kinds.cost import Ceilings
from .rows import FA2, FA3, GROUPS, LIBRARY, MANY, mode_rows, over, plain, times
from .tables import roofs_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADS = {"32/8": ("#0072B2", "o"), "16/2": ("#009E73", "D"), "8/1": ("#E69F00", "s")}
"""Head counts of the study -> colour and marker."""
BACKENDS = {
    FA2: (style.COLORS["fa2"], "o", "FlashInfer fa2"),
    FA3: (style.COLORS["fa3"], "s", "FlashInfer fa3"),
    LIBRARY: ("#009E73", "^", "FlashAttention-3"),
}
SPREAD = 0.7
"""Of a group's height that its shapes are spread over, so that dots do not cover others."""


def ratio_chart(frame: pd.DataFrame) -> Figure:
    """fa2 / fa3 of every shape, a row a mode; right of 1 fa3 is faster. Bars are 95 % intervals."""
    import matplotlib.pyplot as plt

    style.apply()
    table = over(plain(mode_rows(frame)), FA2, FA3)
    groups = [group for group in GROUPS if group in set(table.group)]
    table = table.assign(place=_places(table, groups))
    figure, axis = plt.subplots(figsize=(8.5, 1.3 + 0.6 * len(groups)), layout="constrained")
    for heads, (color, marker) in HEADS.items():
        rows = table[table.heads == heads]
        if len(rows):
            reach = [(rows.ratio - rows.low).fillna(0), (rows.high - rows.ratio).fillna(0)]
            look = {"color": color, "fmt": marker, "markersize": 4, "linewidth": 1}
            axis.errorbar(rows.ratio, rows.place, xerr=reach, label=f"{heads} heads", **look)
    _finish(axis, groups, "run time of fa2 / run time of fa3   (right of 1: fa3 is faster)")
    axis.legend(loc="lower left", frameon=True)
    axis.set_title("Which of FlashInfer's kernels is faster, by mode")
    style.add_footer(figure, frame)
    return figure


def roof_chart(frame: pd.DataFrame, limit: Ceilings) -> Figure:
    """Run time over the roof of bytes and FLOPs of every shape, a row a mode."""
    import matplotlib.pyplot as plt

    style.apply()
    table = times(plain(mode_rows(frame)))
    groups = [group for group in GROUPS if group in set(table.group)]
    table = table.assign(place=_places(table, groups), roof=roofs_us(table, limit))
    figure, axis = plt.subplots(figsize=(8.5, 1.3 + 0.6 * len(groups)), layout="constrained")
    for name, (color, marker, label) in BACKENDS.items():
        if name in table:
            look = {"color": color, "marker": marker, "s": 18, "label": label}
            axis.scatter(table[name] / table.roof, table.place, **look)
    _finish(axis, groups, "run time / roof   (1: the memory or the tensor cores are busy)")
    axis.legend(loc="lower right", frameon=True)
    axis.set_title("Distance from the roof, by mode")
    style.add_footer(figure, frame)
    return figure


def _places(table: pd.DataFrame, groups: list[str]) -> np.ndarray:
    """A height for every row: its group's, spread over the group in the table's order."""
    number = table.groupby("group").cumcount()
    count = table.groupby("group").group.transform("size")
    spread = (number / (count - 1).clip(lower=1) - 0.5).where(count > 1, 0.0)
    return table.group.map(groups.index).to_numpy(float) + SPREAD * spread.to_numpy(float)


def _finish(axis: Axes, groups: list[str], xlabel: str) -> None:
    """A line at 1 of a log axis, and the groups' names and limits."""
    axis.axvline(1, color="0.3", linewidth=1)
    axis.set(xscale="log", xlabel=xlabel)
    style.plain_ticks(axis, "x")
    names = [f"{group}\n({'eager' if group in MANY else 'in a graph'})" for group in groups]
    axis.set_yticks(range(len(groups)), names)
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.grid(False, axis="y")
    for edge in range(1, len(groups)):
        axis.axhline(edge - 0.5, color="0.85", linewidth=0.8)
