"""The timeline of one profiled call: when each kernel ran, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..measure.spans import Span, find_gaps
from ..run.figures import charts, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMES = 12
OTHERS = "others"


def draw_timeline(spans: Sequence[Span], title: str, origin: str) -> Figure:
    """A row per kernel in the order in which they begin, a bar per launch; gaps are shaded.

    `spans` are the work of one call. The kernels beyond `MOST_NAMES`, least time first, share a
    row.
    """
    begin_us = min(span.start_us for span in spans)
    rows = _rows(spans)
    figure, (axis,) = charts.panels(
        [title],
        (9, 1.2 + 0.3 * len(rows)),
        origin,
        ("us since the first began, as traced", ""),
    )
    for place, (name, launches) in enumerate(rows.items()):
        bars = [(span.start_us - begin_us, span.length_us) for span in launches]
        color = style.OTHER if name == OTHERS else style.BLUE
        axis.broken_barh(bars, (place - 0.35, 0.7), color=color)
    for gap in find_gaps(spans):
        start_us = gap.start_us - begin_us
        axis.axvspan(start_us, start_us + gap.length_us, color="0.9", zorder=0)
    charts.categories(axis, "y", map(charts.shorten, rows))
    return figure


def _rows(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Name -> its spans; the names that take least time together are `OTHERS`, the last row."""
    spent_us: dict[str, float] = defaultdict(float)
    for span in spans:
        spent_us[span.name] += span.self_us
    named = sorted(spent_us, key=lambda name: -spent_us[name])[:MOST_NAMES]
    rows: dict[str, list[Span]] = {}
    rest = []
    for span in spans:
        if span.name in named:
            rows.setdefault(span.name, []).append(span)
        else:
            rest.append(span)
    if rest:
        rows[OTHERS] = rest
    return rows
