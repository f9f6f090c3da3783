"""One look for all figures: colour-blind safe, readable in print, source in the footer."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pandas as pd

from ...core.spec import require_type
from ...measure.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
BLUE = "#0072B2"
VERMILION = "#D55E00"
SKY = "#56B4E9"
PALE_BLUE = "#BFDDF0"
OTHER = "0.55"
"""The grey of what has no name."""
RULE: dict[str, Any] = {"color": "0.3", "linewidth": 1}
"""A line to compare with: at 1, at 0, at a bound."""
SMALL: dict[str, Any] = {
    "fontsize": 6.5,
    "bbox": {"color": "white", "pad": 0.3},
}
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
PALETTE = (
    Look(BLUE, "o"),
    Look(VERMILION, "^"),
    Look("#009E73", "s"),
    Look("#CC79A7", "D"),
    Look("#E69F00", "v"),
    Look(SKY, "P"),
    Look("#F0E442", "X"),
)
"""Okabe and Ito's colours, distinct for all common kinds of colour blindness, each with a marker
of its own for print in grey."""


def looks(names: Iterable[T]) -> dict[T, Look]:
    """A look for each of several names, in the order of the palette, as far as it goes."""
    return dict(zip(names, PALETTE, strict=False))


def family_looks(
    families: Mapping[str, Any],
    names: Iterable[str] = (),
) -> dict[str, Look]:
    """The looks that a table of kernel families (`core.backends.table`) gives some of them; other
    `names` take what is left of the palette, as far as it goes."""
    given = {}
    for name, family in sorted(families.items()):
        if family.color:
            given[name] = Look(family.color, family.marker)
    taken = {look.color for look in given.values()}
    left = [look for look in PALETTE if look.color not in taken]
    others = sorted(set(names) - set(given))
    return given | dict(zip(others, left, strict=False))


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
        steps = (1,) if high >= SPARSE_FROM * low else (1, 2, 5)
        line.set_major_locator(LogLocator(subs=steps))
        line.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        line.set_minor_formatter(NullFormatter())


def source_of(frame: pd.DataFrame) -> str:
    """Study, GPU with the id that its records lie under, and days of a frame's records; their ids.

    Of many records the first and the last id, and a hash: eight hex digits of SHA-256 over the
    sorted ids, a line each.
    """
    days = sorted({started[:10] for started in frame.started_at})
    names = frame.gpu.replace("", "CPU")
    gpus = (names + " " + frame.gpu_id).unique()
    if len(days) == 1:
        span = days[0]
    else:
        span = f"{days[0]} to {days[-1]}"
    where = f"{', '.join(frame.study.unique())}: {', '.join(gpus)}, {span}"
    ids = sorted(set(frame.id))
    if len(ids) <= FEW:
        return f"{where}\nrecords {', '.join(ids)}"
    digest = hashlib.sha256("\n".join(ids).encode())
    span_of_ids = f"{len(ids):,} records, {ids[0]} to {ids[-1]}"
    return f"{where}\n{span_of_ids}, hash of ids {digest.hexdigest()[:8]}"


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure without a date: the same figure is the same file on every day.

    The file is whole or as it was.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        What is drawn.
    path : str or os.PathLike
        The file, which ends in `.png` or `.svg`; its folder exists.

    Returns
    -------
    pathlib.Path
        The absolute path of the file.

    Raises
    ------
    ValueError
        For what is no figure or no path, and for a path with another suffix.

    Examples
    --------
    >>> import tempfile
    >>> import attnlib
    >>> from matplotlib.figure import Figure
    >>> figure = Figure(figsize=(2, 1))  # inches
    >>> line = figure.subplots().plot([8192, 16384], [93.1, 184.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = attnlib.save(figure, f"{folder}/times.svg")
    >>> path.name
    'times.svg'
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    require_type("figure", figure, Figure)
    require_type("path", path, str | os.PathLike)
    path = Path(path)
    if path.suffix not in UNDATED:
        raise ValueError(f"path must end in {' or '.join(UNDATED)}, got {path.name!r}")
    image = io.BytesIO()
    with mpl.rc_context(fname=LOOK):
        figure.savefig(
            image,
            format=path.suffix.removeprefix("."),
            metadata=UNDATED[path.suffix],
        )
    return write_whole(path, image.getvalue()).resolve()
