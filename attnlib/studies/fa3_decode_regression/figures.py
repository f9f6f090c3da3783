"""Figures of the studies. Each draws one table of `tables` and returns the matplotlib Figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...draw import style
from ...kinds.cost import Ceilings
from ...run.frame import AUTO, FA2, FA3, GRAPH_AUTO, SHAPE, decode_rows, release_order
from . import tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def slowdown_heatmap(frame: pd.DataFrame, release: str, *, page_size: int) -> Figure:
    """fa3 / fa2 over batch size and kv_len, a panel for each head count, one colour scale."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    style.apply()
    grid = tables.slowdown_grid(frame, release)
    grid = grid[grid.page_size == page_size]
    heads = list(tables.slowdown_summary(grid).index)
    figure, axes = plt.subplots(
        1, len(heads), figsize=(3.0 * len(heads), 3.4), squeeze=False, layout="constrained"
    )
    norm = LogNorm(1.0, max(2.0, grid.ratio.max()))
    for axis, name in zip(axes[0], heads, strict=True):
        _draw_panel(axis, grid[grid.heads == name], norm)
        axis.set(title=f"{name} heads", xlabel="batch, requests")
    axes[0][0].set_ylabel("kv_len, tokens")
    style.add_title(figure, f"FlashInfer {release}: run time of fa3 / fa2, page size {page_size}")
    drawn = tables.slowdown_rows(frame, release)
    style.add_footer(figure, drawn[drawn.page_size == page_size])
    return figure


def release_chart(frame: pd.DataFrame) -> Figure:
    """`auto` over pinned fa2 by release: a dot a case, coloured by the kernel that ran."""
    import matplotlib.pyplot as plt

    style.apply()
    rows = tables.by_release(frame)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    titles = {AUTO: "BatchDecode wrapper, auto", GRAPH_AUTO: "CUDAGraph wrapper"}
    for axis, (backend, title) in zip(axes, titles.items(), strict=True):
        _draw_releases(axis, rows[rows.backend == backend], release_order(frame))
        axis.set_title(title)
    axes[0].set_ylabel("run time of auto / fa2 (log)")
    axes[1].legend(title="ran", loc="upper right", frameon=True)
    drawn = decode_rows(frame)
    style.add_footer(figure, drawn[drawn.backend.isin((FA2, *titles))])
    return figure


def prediction_chart(frame: pd.DataFrame, limit: Ceilings, release: str) -> Figure:
    """Measured fa3 time over the time its schedule predicts; the line is a perfect prediction."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    style.apply()
    table = tables.predictions(frame, limit, release)
    figure, axis = plt.subplots(figsize=(6, 4.6), layout="constrained")
    sns.scatterplot(
        table,
        x="predicted",
        y="measured",
        hue="bound by",
        style="heads",
        palette={"tensor cores": style.COLORS["fa3"], "traffic": style.COLORS["fa2"]},
        ax=axis,
    )
    ends = [table.predicted.min() / 1.5, table.predicted.max() * 1.5]
    axis.plot(ends, ends, color="0.4", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="predicted, us", ylabel="measured, us")
    style.plain_ticks(axis, "x", "y")
    axis.set_title("fa3 decode: predicted from its schedule, no fitted constant")
    drawn = decode_rows(frame, release=release)
    style.add_footer(figure, drawn[drawn.backend == FA3])
    return figure


def floor_chart(frame: pd.DataFrame, limit: Ceilings, release: str) -> Figure:
    """Time over the floor of bytes / copy bandwidth, by cached bytes: a dot a case and kernel."""
    import matplotlib.pyplot as plt

    style.apply()
    table = tables.over_floor(frame, limit, release)
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for family, rows in table.groupby("family"):
        look = {"color": style.COLORS[family], "marker": style.MARKERS[family]}
        axis.scatter(rows.mib, rows.over_floor, s=14, label=family, **look)
    axis.axhline(1, color="0.3", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="KV bytes of the batch, MiB")
    axis.set_ylabel("run time / floor")
    style.plain_ticks(axis, "x", "y")
    axis.set_title("Distance from the memory floor")
    axis.legend(title="kernel")
    style.add_footer(figure, decode_rows(frame, release=release))
    return figure


def _draw_panel(axis: Axes, grid: pd.DataFrame, norm: object) -> None:
    import seaborn as sns

    wide = grid.pivot_table(index="kv_len", columns="batch_size", values="ratio")
    wide = wide.sort_index(ascending=False)
    names = [style.short_count(length) for length in wide.index]
    sns.heatmap(
        wide,
        ax=axis,
        norm=norm,
        cmap="cividis",
        annot=True,
        fmt=".1f",
        cbar=False,
        linewidths=0.5,
        annot_kws={"fontsize": 8},
        yticklabels=names,
    )
    axis.tick_params(axis="y", rotation=0)
    axis.grid(visible=False)
    axis.set(xlabel="", ylabel="")


def _draw_releases(axis: Axes, rows: pd.DataFrame, order: list[str]) -> None:
    cases = rows[SHAPE].drop_duplicates().apply(tuple, axis=1).tolist()
    for family, group in rows.groupby("kernel_family"):
        place = [order.index(release) for release in group.release]
        # Spread the cases of a release sideways, in one order, so that dots do not cover others.
        nudge = [
            (cases.index(tuple(c)) / max(1, len(cases) - 1) - 0.5) * 0.5
            for c in group[SHAPE].to_numpy().tolist()
        ]
        low, high = (
            (group.ratio - group.low).clip(lower=0),
            (group.high - group.ratio).clip(lower=0),
        )
        axis.errorbar(
            np.add(place, nudge),
            group.ratio,
            yerr=[low.fillna(0), high.fillna(0)],
            fmt=style.MARKERS.get(family, "D"),
            markersize=4,
            linewidth=1,
            color=style.COLORS.get(family, "0.4"),
            label=family,
        )
    axis.axhline(1, color="0.3", linewidth=1)
    axis.set_yscale("log")
    style.plain_ticks(axis, "y")
    axis.set_xticks(range(len(order)), order)
    axis.set_xlabel("FlashInfer release")
