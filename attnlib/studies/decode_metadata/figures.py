"""The figures of the metadata studies. Each draws one table of `metadata` or `metadata_rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from ...draw import ratio_figures, style
from ...kinds.cost import Ceilings
from ...run.frame import over, times
from .rows import (
    FUSED,
    MERGED,
    OPS,
    SERIAL,
    TODAY,
    against_best,
    metadata_rows,
)
from .tables import floor_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOK = {
    OPS: ("#D55E00", "s", 5),
    SERIAL: ("#E69F00", "o", 9),
    MERGED: ("#CC79A7", "^", 6),
    TODAY: ("#0072B2", "D", 4),
    FUSED: ("#009E73", "o", 5),
}
"""Colour, marker and its size of a design: three of them often lie on one line."""
BATCHES = ({"page_size": 1, "max_ctx": 8192}, {"page_size": 256, "max_ctx": 2048})
CONTEXTS = ({"page_size": 1, "batch_size": 64}, {"page_size": 16, "batch_size": 4096})
NAMES = {"page_size": "page size", "max_ctx": "context", "batch_size": "batch"}
LABELS = {"page_size": "page size", "max_ctx": "context, tokens", "batch_size": "batch, requests"}
"""Of panels and of axes."""
MIN_POINTS = 3
"""A line through fewer sizes says nothing: such a panel is left out."""
PAGES = (1, 16, 256)


def designs_chart(frame: pd.DataFrame, limit: Ceilings) -> Figure:
    """Time of each design over batch and over context, log axes, with the floor of each size."""
    import matplotlib.pyplot as plt

    style.apply()
    table = times(metadata_rows(frame))
    axes_of = [("batch_size", fixed) for fixed in BATCHES] + [("max_ctx", f) for f in CONTEXTS]
    panels = [(x, fixed, _slice(table, fixed)) for x, fixed in axes_of]
    panels = [panel for panel in panels if len(panel[2]) >= MIN_POINTS]
    figure, axes = plt.subplots(
        -(-len(panels) // 2), 2, figsize=(9, 3.6 * -(-len(panels) // 2)), layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (x, fixed, rows) in zip(axes.flat, panels, strict=False):
        _draw_designs(axis, rows.sort_values(x), x, limit)
        axis.set_title(", ".join(f"{NAMES[name]} {value:,}" for name, value in fixed.items()))
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    figure.supylabel("time of one call in a graph, us", fontsize=9)
    style.add_footer(figure, metadata_rows(frame))
    return figure


def advantage_heatmap(frame: pd.DataFrame) -> Figure:
    """Fused over its best rival, a panel a page size; below 1 fused is faster.

    Sizes that only a few cases share are left out: `metadata.worst` has those too.
    """
    import matplotlib.pyplot as plt
    import seaborn as sns

    style.apply()
    table = against_best(metadata_rows(frame))
    pages = [page for page in PAGES if page in set(table.page_size)]
    figure, axes = plt.subplots(
        1, len(pages), figsize=(3.4 * len(pages), 3.2), squeeze=False, layout="constrained"
    )
    for axis, page in zip(axes[0], pages, strict=True):
        sizes = table[table.page_size == page]
        wide = _full(sizes.pivot_table(index="max_ctx", columns="batch_size", values="ratio"))
        sns.heatmap(
            wide,
            ax=axis,
            vmin=0,
            vmax=1,
            cmap="cividis",
            annot=True,
            fmt=".2f",
            cbar=False,
            linewidths=0.5,
            annot_kws={"fontsize": 7},
            xticklabels=[style.short_count(batch) for batch in wide.columns],
            yticklabels=[style.short_count(length) for length in wide.index],
        )
        axis.tick_params(axis="y", rotation=0)
        axis.grid(visible=False)
        axis.set(xlabel=LABELS["batch_size"], ylabel="", title=f"page size {page}")
    axes[0][0].set_ylabel(LABELS["max_ctx"])
    style.add_title(figure, "Time of fused / its best rival: below 1 fused is faster")
    style.add_footer(figure, metadata_rows(frame))
    return figure


def crossover_map(frame: pd.DataFrame, rival: str) -> Figure:
    """`rival` over op by op at the sizes of the grid, a panel a page size: where fusing loses.

    Sizes that only a few cases share are left out: `metadata.crossovers` counts those too.
    """
    rows = metadata_rows(frame)
    rows = rows[rows.backend.isin((rival, OPS))]
    found = _common(over(rows, rival, OPS))
    return ratio_figures.crossover_map(
        found,
        rows[rows.max_ctx.isin(found.max_ctx) & rows.batch_size.isin(found.batch_size)],
        axes=("batch_size", "max_ctx"),
        panel="page_size",
        title=f"Time of {rival} / op by op: fusing loses where it is above 1",
        names={
            "batch_size": "batch, requests",
            "max_ctx": "context, tokens",
            "page_size": "page size",
        },
    )


def _common(found: pd.DataFrame) -> pd.DataFrame:
    """The batches, and contexts, that most page sizes' grids hold; all where none is shared."""
    kept, pages = found, found.page_size.nunique()
    for name in ("batch_size", "max_ctx"):
        held = kept.groupby(name).page_size.nunique()
        kept = kept[kept[name].isin(held[held > pages / 2].index)]
    return found if kept.empty else kept


def _full(wide: pd.DataFrame) -> pd.DataFrame:
    """Without the columns, then the rows, that are mostly empty; longest contexts first."""
    wide = wide.loc[:, wide.notna().mean() > 1 / 2]
    return wide[wide.notna().mean(axis=1) > 1 / 2].sort_index(ascending=False)


def _slice(table: pd.DataFrame, fixed: dict[str, int]) -> pd.DataFrame:
    for name, value in fixed.items():
        table = table[table[name] == value]
    return table


def _draw_designs(axis: Axes, rows: pd.DataFrame, x: str, limit: Ceilings) -> None:
    for name, (color, marker, size) in LOOK.items():
        if name in rows and rows[name].notna().any():
            known = rows[rows[name].notna()]
            face = "none" if name == SERIAL else color
            look = {"color": color, "marker": marker, "markersize": size, "markerfacecolor": face}
            axis.plot(known[x], known[name], label=name, **look)
    floors = [floor_us(case, limit) for case in rows.case]
    axis.plot(rows[x], floors, color="0.35", linestyle="--", linewidth=1, label="floor")
    axis.set(xscale="log", yscale="log", xlabel=LABELS[x])
    style.plain_ticks(axis, "y")
    axis.set_xticks(rows[x].tolist(), [style.short_count(value) for value in rows[x]])
    axis.minorticks_off()
