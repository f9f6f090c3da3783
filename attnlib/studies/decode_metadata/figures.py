"""Figures of the study `decode_metadata`: each draws one table of `tables`."""

from __future__ import annotations

import pandas as pd

from ...draw import charts, style
from ...draw.style import Look
from ...kinds.cost import Ceilings
from ...run.frame import over, times
from . import tables
from .tables import FUSED, MERGED, OPS, SERIAL, TODAY, against_best, floor_us, metadata_rows

LOOKS = {
    OPS: Look(style.VERMILION, "s", size=5),
    SERIAL: Look(style.ORANGE, "o", size=9, hollow=True),
    MERGED: Look(style.PURPLE, "^", size=6),
    TODAY: Look(style.BLUE, "D", size=4),
    FUSED: Look(style.GREEN, "o", size=5),
    "floor": Look(style.LINE),
}
PANELS = {
    "page size 1, context 8,192": {"page_size": 1, "max_ctx": 8192},
    "page size 256, context 2,048": {"page_size": 256, "max_ctx": 2048},
    "page size 1, batch 64": {"page_size": 1, "batch_size": 64},
    "page size 16, batch 4,096": {"page_size": 16, "batch_size": 4096},
}
"""What a panel of `designs_chart` holds fixed; the third size is across."""
BATCH, CONTEXT = "batch, requests", "context, tokens"
MAP = charts.Sizes("batch_size", "max_ctx", "page_size", (BATCH, CONTEXT), "page size {}")
MIN_POINTS = 3
"""A line through fewer sizes says nothing: such a panel is left out."""
PAGES = (1, 16, 256)


def designs_chart(frame: pd.DataFrame, limit: Ceilings) -> charts.Figure:
    """Time of each design over batch and over context, log axes, with the floor of each size."""
    drawn = metadata_rows(frame)
    table = times(drawn)
    table["floor"] = [floor_us(case, limit) for case in table.case]
    parts = {}
    for title, fixed in PANELS.items():
        part = table[(table[list(fixed)] == pd.Series(fixed)).all(axis=1)]
        if len(part) >= MIN_POINTS:
            (across,) = {MAP.x, MAP.y} - set(fixed)
            parts[title] = part.set_index(across).sort_index()
    size = (9, 3.6 * -(-len(parts) // 2))
    words = ("", "time of one call in a graph, us")
    figure, axes = charts.panels(list(parts), size, drawn, words, columns=2)
    for axis, part in zip(axes, parts.values(), strict=True):
        charts.lines(axis, part, LOOKS)
        axis.set_xlabel(BATCH if part.index.name == MAP.x else CONTEXT)
        style.log_axes(axis, "y")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def advantage_heatmap(frame: pd.DataFrame) -> charts.Figure:
    """Fused over its best rival, a panel per page size, less sizes that only a few cases share."""
    drawn = metadata_rows(frame)
    found = against_best(drawn)
    found = _common(found[found.page_size.isin(PAGES)])
    title = "Time of fused / its best rival: below 1 fused is faster"
    return charts.heatmap(found, drawn, MAP, title=title, inches=(3.4, 3.2), ends=(0.0, 1.0))


def crossover_map(frame: pd.DataFrame, rival: str) -> charts.Figure:
    """`rival`, or the newest there is, over op by op: a panel per page size, less rare sizes."""
    rows = metadata_rows(frame)
    rival = [name for name in (*tables.RIVALS, rival) if name in set(rows.backend)][-1]
    rows = rows[rows.backend.isin((rival, OPS))]
    found = _common(over(rows, rival, OPS))
    drawn = rows[rows.max_ctx.isin(found.max_ctx) & rows.batch_size.isin(found.batch_size)]
    title = f"Time of {rival} / op by op: fusing loses where it is above 1"
    return charts.crossover_map(found, drawn, MAP, title=title)


def _common(found: pd.DataFrame) -> pd.DataFrame:
    """The batches, and contexts, that most page sizes' grids hold; all where none is shared."""
    kept, pages = found, found.page_size.nunique()
    for name in (MAP.x, MAP.y):
        held = kept.groupby(name).page_size.transform("nunique")
        kept = kept[held > pages / 2]
    return found if kept.empty else kept
