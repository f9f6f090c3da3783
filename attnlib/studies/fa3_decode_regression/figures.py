"""Figures of the study `fa3_decode_regression`: each draws one table of `tables`."""

from __future__ import annotations

import pandas as pd

from ...core.backends.table import FAMILIES
from ...draw import charts, style
from ...kinds.cost import Ceilings
from ...run.frame import AUTO, FA2, FA3, GRAPH_AUTO, SHAPE, decode_rows, release_order
from . import tables

LOOKS = style.family_looks(FAMILIES)
BOUNDS = {"tensor cores": style.VERMILION, "traffic": style.BLUE}
MAP = charts.Sizes(
    "batch_size", "kv_len", "heads", ("batch, requests", "kv_len, tokens"), "{} heads"
)
WRAPPERS = {AUTO: "BatchDecode wrapper, auto", GRAPH_AUTO: "CUDAGraph wrapper"}


def slowdown_heatmap(frame: pd.DataFrame, release: str, *, page_size: int) -> charts.Figure:
    """fa3 / fa2 over batch size and kv_len, a panel for each head count, one colour scale."""
    grid, drawn = tables.slowdown_grid(frame, release), tables.slowdown_rows(frame, release)
    grid = grid[grid.page_size == page_size]
    mildest_first = list(tables.slowdown_summary(grid).index)
    return charts.heatmap(
        grid.assign(heads=pd.Categorical(grid.heads, mildest_first)),
        drawn[drawn.page_size == page_size],
        MAP,
        title=f"FlashInfer {release}: run time of fa3 / fa2, page size {page_size}",
        inches=(3.0, 3.4),
        ends=(1.0, max(2.0, grid.ratio.max())),
        log=True,
        digits=1,
    )


def release_chart(frame: pd.DataFrame) -> charts.Figure:
    """`auto` over pinned fa2 by release: a dot per case, coloured by the kernel that ran."""
    rows, releases, drawn = tables.by_release(frame), release_order(frame), decode_rows(frame)
    drawn = drawn[drawn.backend.isin((FA2, *WRAPPERS))]
    words = ("FlashInfer release", "run time of auto / fa2 (log)")
    figure, axes = charts.panels([*WRAPPERS.values()], (9, 3.8), drawn, words, share="y")
    for axis, backend in zip(axes, WRAPPERS, strict=True):
        own = rows[rows.backend == backend]
        # The cases of a release stand side by side, in one order.
        aside = charts.spread(pd.MultiIndex.from_frame(own[SHAPE]), 0.5)
        own = own.assign(place=own.release.map(releases.index) + aside)
        charts.dots(axis, own, "place", "ratio", by="kernel_family", looks=LOOKS, interval="y")
        axis.axhline(1, **style.RULE)
        charts.categories(axis, "x", releases)
        style.log_axes(axis, "y")
    axes[1].legend(title="ran", loc="upper right", frameon=True)
    return figure


def prediction_chart(frame: pd.DataFrame, limit: Ceilings, release: str) -> charts.Figure:
    """Measured fa3 time over the time its schedule predicts; the line is a perfect prediction."""
    table, drawn = tables.predictions(frame, limit, release), decode_rows(frame, release=release)
    title = f"FlashInfer {release}, fa3 decode; line: measured = predicted"
    figure, (axis,) = charts.panels([title], (6, 4.6), drawn[drawn.backend == FA3])
    kinds = {"hue": "bound by", "style": "heads"}
    charts.against(axis, table, "predicted", "measured", kinds, palette=BOUNDS)
    axis.set(xlabel="predicted, us", ylabel="measured, us")
    return figure


def floor_chart(frame: pd.DataFrame, limit: Ceilings, release: str) -> charts.Figure:
    """Time over the floor of bytes / copy bandwidth, by cached bytes: a dot per case and kernel.

    Dotted: what the L2 holds.
    """
    table, drawn = tables.over_floor(frame, limit, release), decode_rows(frame, release=release)
    words = ("KV bytes of the batch, MiB", "run time / floor")
    figure, (axis,) = charts.panels(["Distance from the memory floor"], (7, 4.2), drawn, words)
    charts.dots(axis, table, "mib", "over_floor", by="family", looks=LOOKS)
    axis.axhline(1, **style.RULE)
    axis.axvline(drawn.l2_mib.iloc[0], **style.RULE | {"linestyle": ":"}, label="L2 size")
    style.log_axes(axis, "x", "y")
    axis.legend()
    return figure
