"""Figures of the study `decode_metadata`: each draws one table of `metadata` or `metadata_rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from ...draw import charts, style
from ...draw.style import Look
from ...kinds.cost import Ceilings
from ...run.frame import over, times
from .tables import (
    FUSED,
    MERGED,
    OPS,
    SERIAL,
    TODAY,
    against_best,
    floor_us,
    metadata_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = {
    OPS: Look(style.VERMILION, "s", size=5),
    SERIAL: Look(style.ORANGE, "o", size=9, hollow=True),
    MERGED: Look(style.PURPLE, "^", size=6),
    TODAY: Look(style.BLUE, "D", size=4),
    FUSED: Look(style.GREEN, "o", size=5),
    "floor": Look("0.35"),
}
"""Of designs, three of which often lie on one line, and of the floor."""
PANELS = (
    ("batch_size", {"page_size": 1, "max_ctx": 8192}),
    ("batch_size", {"page_size": 256, "max_ctx": 2048}),
    ("max_ctx", {"page_size": 1, "batch_size": 64}),
    ("max_ctx", {"page_size": 16, "batch_size": 4096}),
)
"""What a panel of `designs_chart` has across, and what it holds fixed."""
NAMES = {"page_size": "page size", "max_ctx": "context", "batch_size": "batch"}
LABELS = charts.Labels("batch, requests", "context, tokens", "page size {}")
UNITS = {"batch_size": LABELS.x, "max_ctx": LABELS.y}
MIN_POINTS = 3
"""A line through fewer sizes says nothing: such a panel is left out."""
PAGES = (1, 16, 256)


def designs_chart(frame: pd.DataFrame, limit: Ceilings) -> Figure:
    """Time of each design over batch and over context, log axes, with the floor of each size."""
    drawn = metadata_rows(frame)
    table = times(drawn)
    table["floor"] = [floor_us(case, limit) for case in table.case]
    parts = [(x, fixed, _slice(table, fixed).sort_values(x)) for x, fixed in PANELS]
    parts = [part for part in parts if len(part[2]) >= MIN_POINTS]
    figure, axes = charts.panels(
        [", ".join(f"{NAMES[n]} {value:,}" for n, value in fixed.items()) for _, fixed, _ in parts],
        (9, 3.6 * -(-len(parts) // 2)),
        source=drawn,
        y="time of one call in a graph, us",
        columns=2,
    )
    for axis, (x, _, rows) in zip(axes, parts, strict=True):
        charts.lines(axis, rows.set_index(x), LOOKS)
        axis.set_xlabel(UNITS[x])
        style.log_axes(axis, "y")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def advantage_heatmap(frame: pd.DataFrame) -> Figure:
    """Fused over its best rival, a panel per page size; below 1 fused is faster.

    Sizes that only a few cases share are left out: `metadata.worst` has those too.
    """
    drawn = metadata_rows(frame)
    found = against_best(drawn)
    return charts.heatmap(
        _common(found[found.page_size.isin(PAGES)]),
        drawn,
        axes=("batch_size", "max_ctx"),
        panel="page_size",
        labels=LABELS,
        title="Time of fused / its best rival: below 1 fused is faster",
        size=(3.4, 3.2),
        ends=(0.0, 1.0),
    )


def crossover_map(frame: pd.DataFrame, rival: str) -> Figure:
    """`rival` over op by op at the sizes of the grid, a panel per page size: where fusing loses.

    Sizes that only a few cases share are left out: `metadata.crossovers` counts those too.
    """
    rows = metadata_rows(frame)
    rows = rows[rows.backend.isin((rival, OPS))]
    found = _common(over(rows, rival, OPS))
    return charts.crossover_map(
        found,
        rows[rows.max_ctx.isin(found.max_ctx) & rows.batch_size.isin(found.batch_size)],
        axes=("batch_size", "max_ctx"),
        panel="page_size",
        labels=LABELS,
        title=f"Time of {rival} / op by op: fusing loses where it is above 1",
    )


def _common(found: pd.DataFrame) -> pd.DataFrame:
    """The batches, and contexts, that most page sizes' grids hold; all where none is shared."""
    kept, pages = found, found.page_size.nunique()
    for name in ("batch_size", "max_ctx"):
        held = kept.groupby(name).page_size.nunique()
        kept = kept[kept[name].isin(held[held > pages / 2].index)]
    return found if kept.empty else kept


def _slice(table: pd.DataFrame, fixed: dict[str, int]) -> pd.DataFrame:
    for name, value in fixed.items():
        table = table[table[name] == value]
    return table
