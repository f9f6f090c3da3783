"""Timelines of profiled calls, one under the other: when each kernel ran, and the gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measure.spans import Span, find_gaps
from ..run.figures import charts, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMES = 12
OTHERS = "others"


@dataclass(frozen=True)
class Timeline:
    """The work of one call and its title."""

    title: str
    spans: Sequence[Span]


def draw_timelines(calls: Sequence[Timeline], origin: str) -> Figure:
    """A panel per call over one time axis, which begins with the first work of each.

    A panel has a row per kernel in the order in which they begin and a bar per launch; gaps are
    shaded. The kernels beyond `MOST_NAMES`, least time first, share a row.
    """
    titles = [call.title for call in calls]
    rows = [_rows(call.spans) for call in calls]
    heights = [1 + 0.3 * len(names) for names in rows]
    figure, axes = charts.panels(
        titles,
        (9, 0.2 + sum(heights)),
        origin,
        ("us since the first began, as traced", ""),
        heights=heights,
    )
    for axis, call, names in zip(axes, calls, rows, strict=True):
        _draw(axis, call.spans, names)
    return figure


def _draw(axis: Axes, spans: Sequence[Span], rows: dict[str, list[Span]]) -> None:
    """The bars and gaps of one call."""
    begin_us = min(span.start_us for span in spans)
    for place, (name, launches) in enumerate(rows.items()):
        bars = [(span.start_us - begin_us, span.length_us) for span in launches]
        color = style.OTHER if name == OTHERS else style.BLUE
        axis.broken_barh(bars, (place - 0.35, 0.7), color=color)
    for gap in find_gaps(spans):
        start_us = gap.start_us - begin_us
        axis.axvspan(start_us, start_us + gap.length_us, color="0.9", zorder=0)
    charts.categories(axis, "y", map(charts.shorten, rows))


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
