"""Figures of the study `xqa_rivals`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ...draw import charts, style
from ...run.frame import FA2, LABELS, decode_rows, over
from .study import COLD, FLASH_ATTENTION, LAYERS, SHAPES, XQA
from .tables import named, pair

SPREAD = 0.5
"""Of a shape's height that its layers are spread over, so that dots do not cover others."""
LEGEND = 0.5
"""Inches of a legend of two lines."""


def over_chart(frame: pd.DataFrame, kernel: str = XQA) -> charts.Figure:
    """The time of `kernel` over that of fa2 and of FlashAttention-3, a panel each: a row per shape,
    a dot per layer. Hollow dots have no verdict.
    """
    looks, rivals = style.looks(LAYERS), (FA2, FLASH_ATTENTION)
    drawn = decode_rows(frame, timer=COLD[0])
    drawn = drawn[drawn.backend.isin((kernel, *rivals))]
    found = [named(over(drawn, kernel, rival)) for rival in rivals]
    name = LABELS[kernel]
    titles = [pair(kernel, rival) for rival in rivals]
    words = (f"time of {name} / of the other   (right of 1: {name} slower)", "")
    figure, axes = charts.panels(titles, (9.5, 4.2), drawn, words, share="y", legend=LEGEND)
    aside = dict(zip(LAYERS, charts.spread(pd.Index(range(len(LAYERS))), SPREAD), strict=True))
    ratios = [1.0, *(ratio for rows in found for ratio in rows.ratio)]
    legend: dict[str, Any] = {}
    for axis, rows in zip(axes, found, strict=True):
        place = rows["shape"].map([*SHAPES].index) + rows.layer.map(aside)
        rows = rows.assign(place=place.astype(float), open=rows.verdict == "ambiguous")
        axis.axvline(1, **style.RULE)
        charts.dots(axis, rows, "ratio", "place", by="layer", looks=looks, hollow="open", size=6)
        charts.categories(axis, "y", SHAPES)
        for edge in range(1, len(SHAPES)):
            axis.axhline(edge - 0.5, color=style.SEAM, linewidth=0.8)
        axis.set_xlim(min(ratios) / 1.2, max(ratios) * 1.2)
        style.log_axes(axis, "x")
        legend |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    charts.legend_below(figure, [legend[name] for name in looks if name in legend], ncols=3)
    return figure
