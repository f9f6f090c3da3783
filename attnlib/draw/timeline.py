"""One call drawn to scale: a lane for the host, a lane per stream, what ran nowhere left grey."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..measure.spans import Span, find_gaps, gpu_work, operators
from . import charts, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOST_LOOKS: dict[str, dict[str, Any]] = {
    "call": {"color": style.HOST, "linewidth": 0, "label": "call, on the host"},
    "launch": {"color": style.LAUNCH, "linewidth": 0.4, "label": "launch, on the host"},
}
"""Of the kinds of span that the host's lane shows."""
OTHERS = "all others"
LABELLED_GAPS = 3
MIN_LABELLED = 0.06
"""Part of the axis that a gap must take to carry its length."""
LANE_INCHES, LINE_INCHES, LEGEND_COLUMNS = 0.42, 0.17, 2
BELOW_LABEL = 4.5
"""From the axis to the legend below ticks and label, in heights of its letters."""


def draw_timeline(spans: Sequence[Span], *, title: str, footer: str) -> Figure:
    """`spans` of one call, as the trace has them; the figure is closed for pyplot.

    ValueError if there is nothing but the call itself.
    """
    import matplotlib.pyplot as plt

    start = min((span.start_us for span in spans), default=0.0)
    spans = [replace(span, start_us=span.start_us - start) for span in spans]
    # Where the GPU ran something, the operators that launched it are the host's lane already.
    work = [span for span in gpu_work(spans) or operators(spans) if span.depth == 0]
    if not work:
        raise ValueError("spans must hold a kernel or an operator to draw, they hold none")
    # The host first, then streams or threads by their first span.
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in HOST_LOOKS:
            lanes["host"].append(span)
    for span in work:
        lanes[span.lane].append(span)
    looks, hosts = _looks(work), HOST_LOOKS.keys() & {span.kind for span in spans}
    legend_inches = 0.1 + LINE_INCHES * (len(looks) + len(hosts)) / LEGEND_COLUMNS
    size = (9, charts.FURNITURE_INCHES + LANE_INCHES * len(lanes) + legend_inches)
    words = ("time since the start, us (as traced)", "")
    figure, (axis,) = charts.panels([title], size, footer, words)
    for place, lane in enumerate(lanes.values()):
        _draw_lane(axis, place, lane, looks)
    for place, lane in enumerate(lanes.values()):
        _label_gaps(axis, place, lane)
    charts.categories(axis, "y", lanes)
    shown = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    order = [look["label"] for look in (*HOST_LOOKS.values(), *looks.values())]
    handles = [shown[label] for label in order if label in shown]
    below = {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": BELOW_LABEL}
    axis.legend(handles=handles, ncols=LEGEND_COLUMNS, fontsize=8, frameon=False, **below)
    plt.close(figure)
    return figure


def _looks(work: Sequence[Span]) -> dict[str, dict[str, Any]]:
    """A colour of the palette for each name that ran longest, in that order, and last a grey."""
    ran: dict[str, list[float]] = defaultdict(list)
    for span in work:
        ran[span.name].append(span.length_us)
    longest = sorted(ran, key=lambda name: (-sum(ran[name]), name))
    looks = {}
    for name, color in zip(longest, style.PALETTE, strict=False):
        label = f"{charts.shorten(name)}: {len(ran[name])} x, {sum(ran[name]):,.1f} us"
        looks[name] = {"label": label, "color": color}
    # The edge keeps a kernel of a microsecond visible in a call of milliseconds.
    looks[OTHERS] = {"label": OTHERS, "color": style.OTHER}
    return {name: look | {"linewidth": 0.4} for name, look in looks.items()}


def _draw_lane(
    axis: Axes, place: int, lane: Sequence[Span], looks: dict[str, dict[str, Any]]
) -> None:
    """Bars over the lane's background, which reaches from its first span to its last."""
    start, end = min(span.start_us for span in lane), max(span.end_us for span in lane)
    height = (place - 0.3, 0.6)
    axis.broken_barh([(start, end - start)], height, color=style.IDLE, linewidth=0)
    bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in lane:
        look = HOST_LOOKS.get(span.kind) or looks.get(span.name, looks[OTHERS])
        bars[look["label"]].append((span.start_us, span.length_us))
    for look in (*HOST_LOOKS.values(), *looks.values()):
        if look["label"] in bars:
            axis.broken_barh(bars[look["label"]], height, **look)


def _label_gaps(axis: Axes, place: int, lane: Sequence[Span]) -> None:
    """The length of the lane's longest gaps, in them, where there is room for it."""
    low, high = axis.get_xlim()
    gaps = find_gaps([span for span in lane if span.kind not in HOST_LOOKS])
    wide = [gap for gap in gaps if gap.length_us >= MIN_LABELLED * (high - low)]
    for gap in sorted(wide, key=lambda gap: gap.length_us, reverse=True)[:LABELLED_GAPS]:
        middle, words = gap.start_us + gap.length_us / 2, f"{gap.length_us:,.0f} us"
        axis.text(middle, place, words, ha="center", va="center", fontsize=7)
