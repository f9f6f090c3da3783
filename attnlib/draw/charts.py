"""The shapes of our figures, and the frame of each: data in, one call, labels.

Tables come with a row per dot or cell. `ratio` is drawn with `low` and `high`, its 95 % interval
over rounds, NaN where there is one round. `looks` gives each name its colour and marker: colour
never says anything alone, and a cell of a map has a hatch and its number.
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

WORDS = {
    "slower": Look(style.VERMILION, "^"),
    "faster": Look(style.BLUE, "v"),
    "same": Look(style.GREEN, "o"),
    "ambiguous": Look("0.45", "D"),
}
"""The look of a verdict (`stats.judge`)."""
FASTER, UNDECIDED, SLOWER = 0, 1, 2
CELLS = {
    FASTER: (style.PALE_BLUE, "", "faster: the interval lies below 1"),
    UNDECIDED: ("#FFFFFF", "....", "undecided"),
    SLOWER: (style.PALE_ORANGE, "////", "slower: the interval lies above 1"),
}
"""Fill, hatch and meaning of a cell: pale, so that its number reads in black and in grey."""
FURNITURE_INCHES = 1.2
"""Height of a figure beside its panels and legend: title, ticks, labels and footer."""
LEGEND_INCHES = 0.25
BEYOND = 1.5
"""Factor by which the line of equality passes the outermost dots."""


class Labels(NamedTuple):
    """Words for the columns of a map: across and up with units, `{}` for a panel's value."""

    x: str
    y: str
    panel: str


def panels(
    titles: Sequence[str],
    size: tuple[float, float],
    *,
    source: pd.DataFrame | str,
    title: str = "",
    x: str = "",
    y: str = "",
    columns: int = 0,
    share: str = "",
    legend: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` inches with a panel per title, and its footer.

    `source` is the frame of the records drawn, or a line where no record is. `title` stands over
    all panels, `x` under each, `y` beside the first of each row of `columns` panels (0: all in
    one). `share` names the axes that panels share, `legend` is inches more for `legend_below`.
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
    figure, made = plt.subplot_mosaic(
        cells,
        figsize=(size[0], size[1] + legend),
        height_ratios=heights,
        sharex="x" in share,
        sharey="y" in share,
        layout="constrained",
    )
    axes = [made[name] for name in names]
    for place, (axis, own) in enumerate(zip(axes, titles, strict=True)):
        axis.set(title=own, xlabel=x, ylabel="" if place % columns else y)
    if title:
        style.add_title(figure, title)
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
    *,
    x: str,
    y: str,
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
    there = set(rows[by])
    unknown = dict.fromkeys(sorted(there - set(looks)), style.UNNAMED)
    for name, look in {**looks, **unknown}.items():
        own, label = rows[rows[by] == name], look.label or str(name)
        if own.empty:
            continue
        if interval:
            middle = own[{"x": x, "y": y}[interval]]
            reach = [(middle - own.low).clip(lower=0), (own.high - middle).clip(lower=0)]
            bars = {f"{interval}err": [part.fillna(0) for part in reach], "fmt": look.marker}
            drawn = {"color": look.color, "markersize": size, "linewidth": 1, "label": label}
            axis.errorbar(own[x], own[y], **bars, **drawn | options)
            continue
        drawn = {"color": look.color, "marker": look.marker, "s": size**2}
        if hollow:
            axis.scatter([], [], **drawn, label=label)
            faces = ["none" if empty else look.color for empty in own[hollow]]
            drawn |= {"facecolors": faces, "edgecolors": drawn.pop("color")}
        else:
            drawn |= {"label": label}
        axis.scatter(own[x], own[y], **drawn | options)


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
    for name, look in looks.items():
        if name in wide and wide[name].notna().any():
            known = wide[name].dropna()
            drawn: dict[str, Any] = {"color": look.color, "label": look.label or name}
            if look.marker:
                face = "none" if look.hollow else look.color
                drawn |= {"marker": look.marker, "markersize": look.size, "markerfacecolor": face}
            else:
                drawn |= {"linestyle": "--", "linewidth": 1}
            axis.plot(known.index, known, **drawn)
    axis.set_xscale("log")
    axis.set_xticks(list(wide.index), [style.short_count(size) for size in wide.index])
    axis.minorticks_off()


def against(
    axis: Axes,
    rows: pd.DataFrame,
    *,
    x: str,
    y: str,
    color: str,
    marker: str,
    palette: Mapping[str, str],
    markers: Mapping[Any, str] | bool = True,
    hollow: str = "",
    **options: Any,
) -> None:
    """Measured against predicted: a dot per row on log axes, and the line where both are equal.

    Columns `color` and `marker` head the legend; `hollow` is a column, named as the legend shall
    say it, that says which dots are not filled. `options` are `axis.legend`'s.
    """
    import seaborn as sns

    kinds = {"hue": color, "style": marker, "palette": dict(palette), "markers": markers}
    sns.scatterplot(rows, x=x, y=y, ax=axis, **kinds)
    if hollow:
        (points,) = axis.collections
        edges = points.get_facecolors()
        faces = edges.copy()
        faces[rows[hollow].to_numpy(bool), 3] = 0
        points.set(edgecolors=edges, facecolors=faces, linewidths=1)
        axis.scatter([], [], facecolors="none", edgecolors="0.2", label=hollow)
    ends = [rows[x].min() / BEYOND, rows[x].max() * BEYOND]
    axis.plot(ends, ends, color="0.4", linewidth=1)
    style.log_axes(axis, "x", "y")
    axis.legend(**options)


def heatmap(
    found: pd.DataFrame,
    drawn: pd.DataFrame,
    *,
    axes: tuple[str, str],
    panel: str,
    labels: Labels,
    title: str,
    size: tuple[float, float],
    ends: tuple[float, float],
    log: bool = False,
    digits: int = 2,
) -> Figure:
    """The ratio of each size as colour and number, a panel per value of column `panel`.

    `axes` are the columns across and up, `size` inches of a panel. Colours reach from one of
    `ends` to the other, by the ratio's logarithm if `log`; where 1 lies between them, it is white.
    Panels stand in the order of their values, of a categorical column in that of its categories.
    Of an empty table one panel is made, and not shown.
    """
    import seaborn as sns
    from matplotlib.colors import LogNorm, Normalize

    x, y = axes
    parts = list(found.groupby(panel, observed=True))
    titles = [labels.panel.format(value) for value, _ in parts] or [""]
    whole = (size[0] * len(titles), size[1])
    figure, made = panels(titles, whole, source=drawn, title=title)
    made[0].set_visible(bool(parts))
    for axis, (_, part) in zip(made, parts, strict=False):
        wide = part.pivot_table(index=y, columns=x, values="ratio").sort_index(ascending=False)
        sns.heatmap(
            wide,
            ax=axis,
            norm=(LogNorm if log else Normalize)(*ends),
            cmap=style.BOTH_WAYS if ends[0] < 1 < ends[1] else style.ONE_WAY,
            annot=True,
            fmt=f".{digits}f",
            annot_kws={"fontsize": 8},
            cbar=False,
            linewidths=0.5,
            xticklabels=[style.short_count(value) for value in wide.columns],
            yticklabels=[style.short_count(value) for value in wide.index],
        )
        axis.tick_params(axis="y", rotation=0)
        axis.grid(visible=False)
        axis.set(xlabel=labels.x, ylabel="" if axis is not made[0] else labels.y)
    return figure


def crossover_map(
    found: pd.DataFrame,
    drawn: pd.DataFrame,
    *,
    axes: tuple[str, str],
    panel: str,
    labels: Labels,
    title: str,
) -> Figure:
    """Where one way is faster than another and where it is not: a cell per size, a line between.

    As `heatmap`, but a cell says what its interval does. The thick line runs where faster meets
    slower. Raises ValueError if `found` holds no ratio.
    """
    from matplotlib.patches import Patch

    if found.empty:
        raise ValueError("found must hold a ratio to draw, it holds none")
    parts = list(found.groupby(panel))
    x, y = (sorted(found[name].unique()) for name in axes)
    size = (1.2 + len(parts) * (0.6 + 0.52 * len(x)), 1.7 + 0.36 * len(y))
    figure, made = panels(
        [labels.panel.format(value) for value, _ in parts],
        size,
        source=drawn,
        title=title,
        x=labels.x,
        y=labels.y,
        legend=LEGEND_INCHES,
    )
    for axis, (_, part) in zip(made, parts, strict=True):
        cells = part.groupby(list(axes))[["ratio", "low", "high"]].mean()
        kinds = np.full((len(y), len(x)), np.nan)
        for row in cells.itertuples():
            across, up = x.index(row.Index[0]), y.index(row.Index[1])
            kinds[up, across] = cell_kind(row.low, row.high)
            _draw_cell(axis, across, up, row)
        _draw_border(axis, kinds)
        axis.set_xticks(range(len(x)), [style.short_count(value) for value in x])
        axis.set_yticks(range(len(y)), [style.short_count(value) for value in y])
        axis.set(xlim=(-0.5, len(x) - 0.5), ylim=(-0.5, len(y) - 0.5))
        axis.grid(visible=False)
    looks = [
        Patch(facecolor=fill, hatch=hatch, edgecolor=style.HATCH, label=meaning)
        for fill, hatch, meaning in CELLS.values()
    ]
    legend_below(figure, looks)
    return figure


def cell_kind(low: float, high: float) -> int:
    """Whether an interval lies below 1, above it, or neither; one round decides nothing."""
    return FASTER if high < 1 else SLOWER if low > 1 else UNDECIDED


def _draw_cell(axis: Axes, across: int, up: int, row: Any) -> None:
    from matplotlib.patches import Rectangle

    fill, hatch, _ = CELLS[cell_kind(row.low, row.high)]
    corner = (across - 0.5, up - 0.5)
    look = {"facecolor": fill, "hatch": hatch, "edgecolor": style.HATCH}
    axis.add_patch(Rectangle(corner, 1, 1, **look))
    number = f"{row.ratio:.2f}" if row.ratio < 10 else f"{row.ratio:.1f}"
    axis.text(across, up, number, ha="center", va="center", fontsize=7)


def _draw_border(axis: Axes, kinds: np.ndarray) -> None:
    """A thick line between a cell that is faster and the next known one that is slower."""
    for up, across in np.argwhere(kinds == SLOWER):
        for step in np.array([(0, 1), (0, -1), (1, 0), (-1, 0)]):
            other = np.array([up, across]) + step
            inside = (other >= 0).all() and (other < kinds.shape).all()
            if inside and kinds[tuple(other)] == FASTER:
                middle, along = np.array([up, across]) + step / 2, step[::-1] / 2
                y, x = np.array([middle - along, middle + along]).T
                axis.plot(x, y, color="0.1", linewidth=2)
