"""The shapes of our figures, and the frame of each: data in, one call, labels.

Tables have a row per dot or cell; `low` and `high` are the 95 % interval of `ratio` over rounds,
NaN where there is one. Colour says nothing alone: a name has a marker, a cell a hatch and a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from . import style
from .style import Look

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VERDICTS = {
    "slower": Look(style.VERMILION, "^"),
    "faster": Look(style.BLUE, "v"),
    "same": Look(style.GREEN, "o"),
    "ambiguous": Look(style.OTHER, "D"),
}
FURNITURE_INCHES = 1.2
"""Height of a figure beside its panels and legend: title, ticks, labels and footer."""
LEGEND_INCHES = 0.25
DOTS_ABOVE = 3
"""The layer of dots: above the lines that they are compared with."""


class Sizes(NamedTuple):
    """The columns of a map: across, up, a panel per value; labels; a panel's title with `{}`."""

    x: str
    y: str
    panel: str
    words: tuple[str, str]
    title: str


def panels(
    titles: Sequence[str],
    size: tuple[float, float],
    source: pd.DataFrame | str,
    words: tuple[str, str] = ("", ""),
    *,
    title: str = "",
    columns: int = 0,
    share: str = "",
    legend: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` inches with a panel per title, and its footer.

    `source` is the frame of the records drawn, or a line where no record is. `words` label the x
    axis of each panel, and the y axis of the first in each row of `columns` (0: all in one row).
    `share` names the axes they share; `legend` is inches more, for `legend_below`.
    """
    import matplotlib.pyplot as plt

    style.apply()
    columns = columns or len(titles)
    names = [str(place) for place in range(len(titles))]
    cells = [names[at : at + columns] for at in range(0, len(names), columns)]
    cells[-1] += ["."] * (columns - len(cells[-1]))
    heights = [(size[1] - FURNITURE_INCHES) / len(cells)] * len(cells)
    if legend:
        cells, heights = [*cells, ["legend"] * columns], [*heights, legend]
    shared = {"sharex": "x" in share, "sharey": "y" in share, "layout": "constrained"}
    whole = (size[0], size[1] + legend)
    figure, made = plt.subplot_mosaic(cells, figsize=whole, height_ratios=heights, **shared)
    axes = [made[name] for name in names]
    for place, (axis, own) in enumerate(zip(axes, titles, strict=True)):
        axis.set(title=own, xlabel=words[0], ylabel="" if place % columns else words[1])
    if title:
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    style.add_footer(figure, source)
    return figure, axes


def legend_below(figure: Figure, handles: Sequence[Artist], **options: Any) -> None:
    """A legend in the row that `panels` left for it, where it hides nothing."""
    below = figure.axes[-1]
    below.axis("off")
    look = {"loc": "upper left", "ncols": 5, "frameon": False, "borderaxespad": 0}
    below.legend(handles=handles, **look | options)


def dots(
    axis: Axes,
    rows: pd.DataFrame,
    x: str,
    y: str,
    *,
    by: str,
    looks: Mapping[Any, Look],
    interval: str = "",
    hollow: str = "",
    size: float = 4,
    **options: Any,
) -> None:
    """A dot per row, by column `by` in the look of its name; names without a look come last.

    `interval` is the axis, `x` or `y`, along which columns `low` and `high` reach; `hollow` a
    column that says which dots are not filled; `size` a diameter in points.
    """
    unknown = dict.fromkeys(sorted(set(rows[by]) - set(looks)), style.UNNAMED)
    for name, look in {**looks, **unknown}.items():
        own = rows[rows[by] == name]
        if own.empty:
            continue
        if interval:
            middle = own[x if interval == "x" else y]
            reach = [(middle - own.low).clip(lower=0), (own.high - middle).clip(lower=0)]
            bars: dict[str, Any] = {f"{interval}err": [part.fillna(0) for part in reach]}
            axis.errorbar(own[x], own[y], fmt="none", ecolor=look.color, elinewidth=1, **bars)
        if hollow:
            # Filled ones first: a legend shows the first.
            own = own.sort_values(hollow, kind="stable")
            options["facecolors"] = np.where(own[hollow], "none", look.color)
        drawn: dict[str, Any] = {"s": size**2, "marker": look.marker, "color": look.color}
        label = look.label or str(name)
        axis.scatter(own[x], own[y], label=label, zorder=DOTS_ABOVE, **drawn | options)


def spread(keys: pd.Series | pd.Index, width: float) -> np.ndarray:
    """Places aside for dots that would cover others: one per key, evenly over `width` about 0."""
    place, names = pd.factorize(keys, sort=True)
    return width * (place / max(1, len(names) - 1) - 0.5 * (len(names) > 1))


def categories(axis: Axes, which: str, names: Iterable[object]) -> None:
    """Names in place of numbers 0, 1, ... on axis `x` or `y`, rows from the top."""
    names = [str(name) for name in names]
    getattr(axis, f"set_{which}ticks")(range(len(names)), names)
    if which == "y":
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")


def lines(axis: Axes, wide: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """Each column of `wide` that has a look, over its index, sizes on a log axis.

    Names without a marker are bounds: thin and dashed.
    """
    for name in (name for name in looks if name in wide and wide[name].notna().any()):
        look, known = looks[name], wide[name].dropna()
        drawn: dict[str, Any] = {"linestyle": "--", "linewidth": 1}
        if look.marker:
            face = "none" if look.hollow else look.color
            drawn = {"marker": look.marker, "markersize": look.size, "markerfacecolor": face}
        axis.plot(known.index, known, color=look.color, label=look.label or name, **drawn)
    axis.set_xscale("log")
    axis.set_xticks(list(wide.index), [style.short_count(size) for size in wide.index])
    axis.minorticks_off()


def against(
    axis: Axes,
    rows: pd.DataFrame,
    x: str,
    y: str,
    kinds: Mapping[str, str],
    *,
    hollow: str = "",
    **looks: Any,
) -> None:
    """Measured against predicted: a dot per row on log axes, and the line where both are equal.

    `kinds` are columns, seaborn's `hue` and `style`; `looks` its `palette` and `markers`. `hollow`
    is a column, named as the legend shall say it, that says which dots are not filled.
    """
    import seaborn as sns

    sns.scatterplot(rows, x=x, y=y, ax=axis, **kinds, **looks)
    if hollow:
        points = axis.collections[0]
        edges = np.asarray(points.get_facecolor())
        faces = edges * np.where(rows[[hollow]], [1, 1, 1, 0], 1)
        points.set(edgecolors=edges, facecolors=faces, linewidths=1)
        axis.scatter([], [], facecolors="none", edgecolors=style.LINE, label=hollow)
    ends = [rows[x].min() / 1.5, rows[x].max() * 1.5]
    axis.plot(ends, ends, **style.RULE)
    style.log_axes(axis, "x", "y")
    axis.legend()


def heatmap(
    found: pd.DataFrame,
    drawn: pd.DataFrame,
    sizes: Sizes,
    *,
    title: str,
    inches: tuple[float, float],
    ends: tuple[float, float],
    log: bool = False,
    digits: int = 2,
) -> Figure:
    """The ratio of each size as colour and number, in panels of so many `inches`.

    Colours reach from one of `ends` to the other, by the ratio's logarithm if `log`; where 1 lies
    between them, it is white. A categorical column orders its panels. Of an empty table one
    panel is made, and not shown.
    """
    import seaborn as sns
    from matplotlib.colors import LogNorm, Normalize

    parts = list(found.groupby(sizes.panel, observed=True))
    titles = [sizes.title.format(value) for value, _ in parts] or [""]
    figure, axes = panels(titles, (inches[0] * len(titles), inches[1]), drawn, title=title)
    axes[0].set_visible(bool(parts))
    colors = style.BOTH_WAYS if ends[0] < 1 < ends[1] else style.ONE_WAY
    look = {"annot": True, "fmt": f".{digits}f", "annot_kws": {"fontsize": 8}, "linewidths": 0.5}
    figure.set_visible(False)  # seaborn draws the whole figure for each panel
    for axis, (_, part) in zip(axes, parts, strict=False):
        wide = part.pivot_table(index=sizes.y, columns=sizes.x, values="ratio")
        wide = wide.sort_index(ascending=False).rename(style.short_count)
        wide = wide.rename(columns=style.short_count)
        norm = (LogNorm if log else Normalize)(*ends)
        sns.heatmap(wide, ax=axis, norm=norm, cmap=colors, cbar=False, **look)
        axis.tick_params(axis="y", rotation=0)
        axis.grid(visible=False)
        axis.set(xlabel=sizes.words[0], ylabel=sizes.words[1] if axis is axes[0] else "")
    figure.set_visible(True)
    return figure
