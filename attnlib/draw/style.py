"""One look for all figures: colour-blind safe, readable in print, source in the footer."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pandas as pd

from ..measure.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
"""Okabe and Ito's palette: distinct for all common kinds of colour blindness."""
BLUE, VERMILION, _, _, _, SKY, _ = PALETTE
SHAPES = ("o", "^", "s", "D", "v", "P", "X")
"""A marker for each colour of the palette, for print in grey."""
PALE_BLUE = "#BFDDF0"
OTHER = "0.55"
"""The grey of what has no name."""
RULE: dict[str, Any] = {"color": "0.3", "linewidth": 1}
"""A line to compare with: at 1, at 0, at a bound."""
SMALL: dict[str, Any] = {"fontsize": 6.5, "bbox": {"color": "white", "pad": 0.3}}
"""Words inside a panel, which hide the lines behind them."""
LOOK = Path(__file__).with_name("look.mplstyle")
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
    """How a name is drawn."""

    color: str
    marker: str


UNNAMED = Look(OTHER, "D")


def looks(names: Iterable[T]) -> dict[T, Look]:
    """A look for each of several names, in the order of the palette."""
    pairs = zip(PALETTE, SHAPES, strict=True)
    return {name: Look(*pair) for name, pair in zip(names, pairs, strict=False)}


def family_looks(families: Mapping[str, Any], names: Iterable[str] = ()) -> dict[str, Look]:
    """The looks that a table of kernel families (`core.backends.table`) gives some of them; other
    `names` take what is left of the palette, as far as it goes."""
    given = {
        name: Look(family.color, family.marker)
        for name, family in sorted(families.items())
        if family.color
    }
    colors = {look.color for look in given.values()}
    left = [Look(*pair) for pair in zip(PALETTE, SHAPES, strict=True) if pair[0] not in colors]
    return given | dict(zip(sorted({*names} - set(given)), left, strict=False))


def apply() -> None:
    """Set matplotlib's defaults to `look.mplstyle`; figures call it before they draw."""
    from matplotlib import style

    style.use(LOOK)


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


def source_of(frame: pd.DataFrame) -> str:
    """Study, GPU with the id that its records lie under, and days of a frame's records; their ids.

    Of many records the first and the last id, and a hash: eight hex digits of SHA-256 over the
    sorted ids, a line each.
    """
    days = sorted({started[:10] for started in frame.started_at})
    gpus = (frame.gpu.replace("", "CPU") + " " + frame.gpu_id).unique()
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    where = f"{', '.join(frame.study.unique())}: {', '.join(gpus)}, {span}"
    ids = sorted(set(frame.id))
    if len(ids) <= FEW:
        return f"{where}\nrecords {', '.join(ids)}"
    digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:8]
    return f"{where}\n{len(ids):,} records, {ids[0]} to {ids[-1]}, hash of ids {digest}"


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as `.png` or `.svg`, without a date; returns its absolute path.

    The file is whole or as it was. ValueError for another suffix.
    """
    import matplotlib as mpl

    path = Path(path)
    if path.suffix not in UNDATED:
        raise ValueError(f"path must end in {' or '.join(UNDATED)}, got {path.name!r}")
    image = io.BytesIO()
    with mpl.rc_context(fname=LOOK):
        figure.savefig(image, format=path.suffix[1:], metadata=UNDATED[path.suffix])
    return write_whole(path, image.getvalue()).resolve()
