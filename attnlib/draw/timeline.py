"""One call drawn to scale: a lane for the host, a lane a stream, what ran nowhere left grey."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..measure.spans import Gap, Span, find_gaps, gpu_work, operators
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ON_HOST = ("call", "launch")
NAMED = 7
"""Names that get a colour of their own, the longest-running first; the rest share a grey."""
OTHERS = "all others"
LABELLED_GAPS = 3
MIN_LABELLED = 0.04
"""Part of the axis that a gap must take to carry its length."""
NAME_LENGTH = 44
LEGEND_COLUMNS = 2


def draw_timeline(spans: Sequence[Span], *, title: str, footer: str) -> Figure:
    """`spans` of one call, as the trace has them, in microseconds from the call's start.

    ValueError if there is nothing but the call itself. The figure is closed for pyplot.
    """
    import matplotlib.pyplot as plt

    style.apply()
    # Where the GPU ran something, the operators that launched it are the host's lane already.
    work = [span for span in gpu_work(spans) or operators(spans) if span.depth == 0]
    if not work:
        raise ValueError("spans must hold a kernel or an operator to draw, they hold none")
    lanes, colors = _lanes(spans, work), _colors(work)
    sizes = [0.42 * len(lanes), 0.1 + 0.17 * (len(colors) + 3) / LEGEND_COLUMNS]
    figure, (axis, below) = plt.subplots(
        2, 1, figsize=(9, 1.2 + sum(sizes)), height_ratios=sizes, layout="constrained"
    )
    origin = min(span.start_us for span in spans)
    for place, lane in enumerate(lanes.values()):
        _draw_lane(axis, place, lane, origin)
    _draw_work(axis, work, lanes, origin)
    for place, lane in enumerate(lanes.values()):
        _label_gaps(axis, lane, place=place, origin=origin)
    axis.set_yticks(range(len(lanes)), list(lanes))
    axis.set_ylim(len(lanes) - 0.45, -0.55)
    axis.set_xlabel("time since the start of the call, us (as traced)")
    axis.grid(visible=False, axis="y")
    axis.set_title(title)
    below.axis("off")
    below.legend(
        *axis.get_legend_handles_labels(),
        loc="upper left",
        ncols=LEGEND_COLUMNS,
        fontsize=8,
        frameon=False,
        borderaxespad=0,
    )
    style.write_footer(figure, footer)
    plt.close(figure)
    return figure


def _lanes(spans: Sequence[Span], work: Sequence[Span]) -> dict[str, list[Span]]:
    """What each lane shows: the host first, then streams or threads by their first span."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in ON_HOST:
            lanes["host"].append(span)
    for span in work:
        lanes[span.lane].append(span)
    return dict(lanes)


def _draw_lane(axis: Axes, place: int, spans: list[Span], origin: float) -> None:
    """The lane's background from its first span to its last: where it stays bare is a gap."""
    start = min(span.start_us for span in spans)
    end = max(span.end_us for span in spans)
    axis.broken_barh(
        [(start - origin, end - start)], (place - 0.3, 0.6), color=style.IDLE, linewidth=0
    )
    calls = [(s.start_us - origin, s.length_us) for s in spans if s.kind == "call"]
    launches = [(s.start_us - origin, s.length_us) for s in spans if s.kind == "launch"]
    if calls:
        axis.broken_barh(
            calls, (place - 0.3, 0.6), color=style.HOST, linewidth=0, label="call, on the host"
        )
    if launches:
        axis.broken_barh(
            launches,
            (place - 0.3, 0.6),
            color=style.LAUNCH,
            linewidth=0.4,
            label="launch, on the host",
        )


def _draw_work(
    axis: Axes, work: Sequence[Span], lanes: dict[str, list[Span]], origin: float
) -> None:
    places = {lane: place for place, lane in enumerate(lanes)}
    bars: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    colors = _colors(work)
    for span in work:
        name = span.name if span.name in colors else OTHERS
        bars[name][span.lane].append((span.start_us - origin, span.length_us))
    for name in [*colors, OTHERS]:
        label = _label(name, work)
        for lane, ranges in bars.get(name, {}).items():
            color = colors.get(name, style.OTHER)
            # The edge keeps a kernel of a microsecond visible in a call of milliseconds.
            axis.broken_barh(
                ranges,
                (places[lane] - 0.3, 0.6),
                facecolor=color,
                edgecolor=color,
                linewidth=0.4,
                label=label,
            )
            label = None


def _colors(work: Sequence[Span]) -> dict[str, str]:
    """Colours of the names that ran longest, in that order."""
    spent: dict[str, float] = defaultdict(float)
    for span in work:
        spent[span.name] += span.length_us
    longest = sorted(spent, key=lambda name: (-spent[name], name))
    return dict(zip(longest, style.PALETTE[:NAMED], strict=False))


def _label(name: str, work: Sequence[Span]) -> str:
    mine = [span.length_us for span in work if name in (span.name, OTHERS)]
    # Both ends tell: `autograd::engine::...AddmmBackward0`.
    half = NAME_LENGTH // 2 - 2
    short = name if len(name) <= NAME_LENGTH else f"{name[:half]}...{name[-half:]}"
    return short if name == OTHERS else f"{short}: {len(mine)} x, {sum(mine):,.1f} us"


def _label_gaps(axis: Axes, lane: Sequence[Span], *, place: int, origin: float) -> None:
    """The length of the lane's longest gaps, in them, where there is room for it."""
    low, high = axis.get_xlim()
    work = [span for span in lane if span.kind not in ON_HOST]
    wide = [gap for gap in find_gaps(work) if gap.length_us >= MIN_LABELLED * (high - low)]
    for gap in sorted(wide, key=_length, reverse=True)[:LABELLED_GAPS]:
        middle = gap.start_us + gap.length_us / 2 - origin
        axis.text(middle, place, f"{gap.length_us:,.0f} us", ha="center", va="center", fontsize=7)


def _length(gap: Gap) -> float:
    return gap.length_us
