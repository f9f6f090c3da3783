"""One look for all figures: colour-blind safe, readable in print, source in the footer."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from ..measure.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
"""Okabe and Ito's palette: distinct for all common kinds of colour blindness."""
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, YELLOW = PALETTE
SHAPES = ("o", "^", "s", "D", "v", "P", "X")
"""A marker for each colour of the palette, for print in grey."""
WHITE, PALE_BLUE, PALE_ORANGE = "#FFFFFF", "#BFDDF0", "#F6CBA8"
"""Grounds that a number is written on."""
ONE_WAY, BOTH_WAYS = "cividis", "PuOr"
"""Colour maps: of ratios on one side of 1, and of ratios on both."""
IDLE, OTHER, HOST, LAUNCH, HATCH = "0.90", "0.55", "0.75", "0.25", "0.75"
"""Greys: nothing ran; ran, but is not named; the host in a call; the host launching; hatches."""
INK, LINE, BAND, SEAM = "0.1", "0.3", "0.92", "0.85"
"""Of marks, of lines to compare with, of a margin, and between rows."""
RULE: dict[str, Any] = {"color": LINE, "linewidth": 1}
"""The line at 1, or at what was expected; a bound; a limit."""
SETTINGS: dict[str, Any] = {
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "svg.hashsalt": "attnlib",
    "svg.fonttype": "path",
}
SETTLING, STILL, SEEN_DIGITS = 3, 1e-12, 6
"""Layouts at most, until nothing moves but rounding errors; digits of a position that are kept."""
UNDATED: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
}
"""What matplotlib must leave out of a file, so that it does not change with the day."""
FEW = 3
"""Records whose ids all stand in a footer."""
LINE_INCHES = 0.13
"""Height of a footer's line."""
SPARSE_FROM = 1000
"""Log axes that span more than this label powers of ten only; others 1, 2, 5."""


class Look(NamedTuple):
    """How a name is drawn, everywhere: colour and marker, and `label` in legends (else the name).

    For lines also the marker's size in points, whether it is `hollow`, and no marker for a bound.
    """

    color: str
    marker: str = ""
    label: str = ""
    size: float = 5
    hollow: bool = False


UNNAMED = Look(OTHER, "D")


def looks(names: Iterable[T]) -> dict[T, Look]:
    """A look for each of several names, in the order of the palette."""
    pairs = zip(PALETTE, SHAPES, strict=True)
    return {name: Look(*pair) for name, pair in zip(names, pairs, strict=False)}


def family_looks(families: Mapping[str, Any]) -> dict[str, Look]:
    """The looks that a table of kernel families (`core.backends.table`) gives some of them."""
    known = {name: family for name, family in sorted(families.items()) if family.color}
    return {name: Look(family.color, family.marker) for name, family in known.items()}


def apply() -> None:
    """Set matplotlib's defaults to `look.mplstyle`; figures call it before they draw."""
    from matplotlib import style

    style.use([Path(__file__).with_name("look.mplstyle"), SETTINGS])


def log_axes(axis: Axes, *which: str) -> None:
    """Make axes (`x`, `y`) logarithmic, with ticks in plain numbers, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name in which:
        getattr(axis, f"set_{name}scale")("log")
    for name in which:
        line = getattr(axis, f"{name}axis")
        low, high = line.get_view_interval()
        line.set_major_locator(LogLocator(subs=(1, 2, 5) if high < SPARSE_FROM * low else (1,)))
        line.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        line.set_minor_formatter(NullFormatter())


def short_count(value: int) -> str:
    """`16k` for 16384 and its like, other numbers in full."""
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else f"{value:,}"


def add_footer(figure: Figure, source: pd.DataFrame | str) -> None:
    """Under the figure, so that it can travel alone: study, GPU, days and records, or a line."""
    known = [source] if isinstance(source, str) else [source_line(source), records_line(source.id)]
    height = LINE_INCHES * (len(known) + 0.5) / figure.get_size_inches()[1]
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, height, 1, 1 - height))
    figure.text(0.005, 0.005, "\n".join(known), fontsize=7, color="0.35", ha="left", va="bottom")


def source_line(frame: pd.DataFrame) -> str:
    """Study, GPU with the id that its records lie under, and days of a frame's records."""
    days = sorted({started[:10] for started in frame.started_at})
    gpus = (frame.gpu.replace("", "CPU") + " " + frame.gpu_id).unique()
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{', '.join(frame.study.unique())}: {', '.join(gpus)}, {span}"


def records_line(ids: Iterable[str]) -> str:
    """The ids of records: all of a few; of many how many, the ends, and a sum over all.

    The sum is eight hex digits of SHA-256 over the sorted ids, a line each.
    """
    every = sorted(set(ids))
    if len(every) <= FEW:
        return f"records {', '.join(every)}"
    sum_ = hashlib.sha256("\n".join(every).encode()).hexdigest()[:8]
    return f"{len(every):,} records, {every[0]} to {every[-1]}, sum of ids {sum_}"


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as `.png` or `.svg`, the same bytes each time; returns its absolute path.

    The file is whole or as it was. ValueError for another suffix.
    """
    import matplotlib as mpl

    path = Path(path)
    if path.suffix not in UNDATED:
        raise ValueError(f"path must end in {' or '.join(UNDATED)}, got {path.name!r}")
    drawn = io.BytesIO()
    with mpl.rc_context(SETTINGS), _settled(figure):
        figure.savefig(drawn, format=path.suffix[1:], metadata=UNDATED[path.suffix])
    return write_whole(path, drawn.getvalue()).resolve()


@contextmanager
def _settled(figure: Figure) -> Iterator[None]:
    """The figure with its layout done and held, to the last digit that can be seen.

    A constrained layout starts from where the last one ended, and a rounding error is enough for
    other ids in an SVG.
    """
    engine, dpi = figure.get_layout_engine(), figure.dpi
    if engine is None:
        yield
        return
    figure.set_dpi(SETTINGS["savefig.dpi"])
    for _ in range(SETTLING):
        before = _places(figure)
        engine.execute(figure)
        if np.allclose(_places(figure), before, rtol=0, atol=STILL):
            break
    for axis in figure.axes:
        left, low, width, height = np.round(axis.get_position(original=True).bounds, SEEN_DIGITS)
        axis.set_position((left, low, width, height))
        axis.set_in_layout(True)
    for text in figure.texts:
        x, y = np.round(text.get_position(), SEEN_DIGITS)
        text.set_position((x, y))
    figure.set_layout_engine("none")
    try:
        yield
    finally:
        figure.set_layout_engine(engine)
        figure.set_dpi(dpi)


def _places(figure: Figure) -> np.ndarray:
    """Where axes and words of the figure lie, in its widths and heights."""
    axes = [axis.get_position(original=True).bounds for axis in figure.axes]
    return np.concatenate([*axes, *(text.get_position() for text in figure.texts)])
