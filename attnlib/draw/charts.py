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
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` inches with a panel per title in a row, and its footer.

    `source` is the frame of the records drawn, or a line where there are none. `words` label the x
    axis of each panel and the y axis of the first; with `share_y` all panels have that one.
    """
    import matplotlib.pyplot as plt

    style.apply()
    figure, grid = plt.subplots(
        1, len(titles), figsize=size, layout="constrained", squeeze=False, sharey=share_y
    )
    axes = list(grid[0])
    for axis, panel_title in zip(axes, titles, strict=True):
        axis.set(title=panel_title, xlabel=words[0])
    axes[0].set_ylabel(words[1])
    if title:
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    # Under the figure, so that it can travel alone: study, GPU, days and records, or a line.
    text = source if isinstance(source, str) else style.source_of(source)
    height = style.LINE_INCHES * (text.count("\n") + 1.5) / size[1]
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, height, 1, 1 - height))
    figure.text(0.005, 0.005, text, fontsize=7, color="0.35", ha="left", va="bottom")
    return figure, axes


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
    unknown = dict.fromkeys(sorted(set(rows[by]) - set(looks)), style.UNNAMED)
    for name, look in {**looks, **unknown}.items():
        part = rows[rows[by] == name]
        if part.empty:
            continue
        if interval:
            middle = part[x if interval == "x" else y]
            below, above = middle - part.low, part.high - middle
            reach = [length.clip(lower=0).fillna(0) for length in (below, above)]
            bars: dict[str, Any] = {f"{interval}err": reach, "fmt": "none", "elinewidth": 1}
            axis.errorbar(part[x], part[y], ecolor=look.color, **bars)
        axis.scatter(
            part[x],
            part[y],
            s=DOT_POINTS**2,
            color=look.color,
            marker=look.marker,
            label=str(name),
            zorder=ABOVE_LINES,
        )


def medians(rows: pd.DataFrame, x: str, *, panel: str, names: Sequence[str]) -> Figure:
    """Median time over column `x`, a panel per value of `panel`, a line per backend of `names`."""
    parts = dict(iter(rows.groupby(panel)))
    titles, words = [f"{panel} {value:,}" for value in parts], (x, "us (log)")
    figure, axes = panels(titles, (11, 3.4), rows, words, share_y=True)
    for axis, part in zip(axes, parts.values(), strict=True):
        for name, look in style.looks(names).items():
            line = part[part.backend == name].groupby(x).run_us.median()
            axis.plot(line, color=look.color, marker=look.marker, label=name, markersize=3)
        style.log_axes(axis, "x", "y")
    axes[0].legend(fontsize=7)
    return figure


def spread(keys: pd.Series | pd.Index, width: float) -> np.ndarray:
    """Offsets for dots that would cover others: one per key, evenly over `width` about 0."""
    place, names = pd.factorize(keys, sort=True)
    return width * (place / max(1, len(names) - 1) - 0.5 * (len(names) > 1))


def categories(axis: Axes, which: str, names: Iterable[object]) -> None:
    """Names in place of numbers 0, 1, ... on axis `x` or `y`, rows from the top."""
    names = [str(name) for name in names]
    getattr(axis, f"set_{which}ticks")(range(len(names)), names)
    if which == "y":
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")
