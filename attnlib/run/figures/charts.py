"""Figures of panels, dots with intervals, and names on an axis; each colour has its marker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from . import style
from .style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FURNITURE_INCHES = 1.2
"""Height of a figure beside its panels: title, ticks, labels and footer."""
DOT_POINTS = 4
ABOVE_LINES = 3


def shorten(name: str, most: int = 48) -> str:
    """Both ends of a name longer than `most` letters: `autograd::engine::...::AddmmBackward0`."""
    end = most // 2 - 2
    return name if len(name) <= most else f"{name[:end]}...{name[-end:]}"


def panels(
    titles: Sequence[str],
    size: tuple[float, float],
    source: pd.DataFrame | str,
    words: tuple[str, str] = ("", ""),
    *,
    title: str = "",
    share_y: bool = False,
    heights: Sequence[float] = (),
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` inches with a panel per title in a row, and its footer.

    With `heights`, their shares, the panels stand under each other over one x axis.

    `source` is the frame of the records drawn, or a line where there are none. `words` label the x
    axis of each panel and the y axis of the first; with `share_y` all panels have that one.
    """
    import matplotlib.pyplot as plt

    style.apply()
    figure, grid = plt.subplots(
        nrows=len(heights) or 1,
        ncols=1 if heights else len(titles),
        figsize=size,
        layout="constrained",
        squeeze=False,
        sharey=share_y,
        sharex=bool(heights),
        height_ratios=heights or None,
    )
    axes = list(grid.flat)
    x_words, y_words = words
    for axis, panel_title in zip(axes, titles, strict=True):
        axis.set(title=panel_title, xlabel=x_words)
        if heights:
            axis.label_outer()
    axes[0].set_ylabel(y_words)
    if title:
        figure.suptitle(
            title,
            fontsize=11,
            fontweight="bold",
            x=0.01,
            ha="left",
        )
    if isinstance(source, str):
        text = source
    else:
        text = style.source_of(source)
    _footer(figure, text)
    return figure, axes


def _footer(figure: Any, text: str) -> None:
    """Under the figure, so that it can travel alone: study, GPU, days and records, or a line."""
    lines = text.count("\n") + 1.5
    height = style.LINE_INCHES * lines / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, height, 1, 1 - height))
    figure.text(
        x=0.005,
        y=0.005,
        s=text,
        fontsize=7,
        color="0.35",
        ha="left",
        va="bottom",
    )


def dots(
    axis: Axes,
    rows: pd.DataFrame,
    x: str,
    y: str,
    *,
    by: str,
    looks: Mapping[Any, Look],
    interval: str = "",
) -> None:
    """A dot per row, in the look of its name in column `by`; names without a look come last.

    `interval` is the axis, `x` or `y`, along which columns `low` and `high` reach (NaN: no bar).
    """
    unknown = sorted(set(rows[by]) - set(looks))
    for name in (*looks, *unknown):
        look = looks.get(name, style.UNNAMED)
        part = rows[rows[by] == name]
        if part.empty:
            continue
        if interval:
            middle = part[x if interval == "x" else y]
            below = (middle - part.low).clip(lower=0)
            above = (part.high - middle).clip(lower=0)
            reach = [below.fillna(0), above.fillna(0)]
            axis.errorbar(
                part[x],
                part[y],
                xerr=reach if interval == "x" else None,
                yerr=reach if interval == "y" else None,
                fmt="none",
                elinewidth=1,
                ecolor=look.color,
            )
        axis.scatter(
            part[x],
            part[y],
            s=DOT_POINTS**2,
            color=look.color,
            marker=look.marker,
            label=str(name),
            zorder=ABOVE_LINES,
        )


def spread(keys: pd.Series | pd.Index, width: float) -> np.ndarray:
    """Offsets for dots that would cover others: one per key, evenly over `width` about 0."""
    place, names = pd.factorize(keys, sort=True)
    last = len(names) - 1
    if last == 0:
        return width * place  # one key stands in the middle
    return width * (place / last - 0.5)


def categories(axis: Axes, which: str, names: Iterable[object]) -> None:
    """Names in place of numbers 0, 1, ... on axis `x` or `y`, rows from the top."""
    labels = [str(name) for name in names]
    set_ticks = getattr(axis, f"set_{which}ticks")
    set_ticks(range(len(labels)), labels)
    if which == "y":
        axis.set_ylim(len(labels) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")
