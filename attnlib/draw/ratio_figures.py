"""Two figures of ratios for a pull request: one dot a case with its interval, and a crossover map.

Both draw what `rows.ratios`, `trust.verdicts` or `metadata_rows.over` found: `ratio` with `low` and
`high`, its 95 % interval over rounds, NaN where there is one round. Colour never says anything
alone: a word's dots have a marker of their own, and a map's cells a hatch and their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from . import style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORDS = {
    "slower": ("#D55E00", "^"),
    "faster": ("#0072B2", "v"),
    "same": ("#009E73", "o"),
    "ambiguous": ("0.45", "D"),
}
"""Colour and marker of a verdict (`stats.judge`)."""
FASTER, UNDECIDED, SLOWER = 0, 1, 2
CELLS = {
    FASTER: ("#BFDDF0", "", "faster: the interval lies below 1"),
    UNDECIDED: ("#FFFFFF", "....", "undecided"),
    SLOWER: ("#F6CBA8", "////", "slower: the interval lies above 1"),
}
"""Fill, hatch and meaning of a cell: pale, so that its number reads in black and in grey."""
HATCH = "0.75"
ROW_INCHES, LEGEND_INCHES = 0.26, 0.25
SHOWN = ("ratio", "low", "high")


def ratio_chart(words: pd.DataFrame, drawn: pd.DataFrame, *, label: str) -> Figure:
    """A row a case of `trust.verdicts`: dot, interval, verdict; the band is the widest margin.

    `drawn` are the records that were judged, for the footer; `label` says what over what, for
    the title. Raises ValueError if `words` holds no case.
    """
    import matplotlib.pyplot as plt

    if words.empty:
        raise ValueError("words must hold a case that was judged, it holds none")
    style.apply()
    heights = [0.5 + ROW_INCHES * len(words), LEGEND_INCHES]
    figure = plt.figure(figsize=(7, 1.1 + sum(heights)), layout="constrained")
    axis = figure.add_subplot(figure.add_gridspec(2, 1, height_ratios=heights)[0])
    margin = words.margin.max()
    axis.axvspan(1 / (1 + margin), 1 + margin, color="0.92", linewidth=0, label="margin")
    axis.axvline(1, color="0.3", linewidth=1)
    places = np.arange(len(words))
    for word in (name for name in WORDS if name in set(words.verdict)):
        _draw_word(axis, words, places, word)
    axis.set_yticks(places, [_case_label(row) for row in words.itertuples()])
    axis.set_ylim(len(words) - 0.5, -0.5)
    axis.set(xscale="log", xlabel="ratio, with its 95 % interval over rounds")
    style.plain_ticks(axis, "x")
    axis.grid(visible=False, axis="y")
    style.add_title(figure, label)
    _add_legend(figure, axis.get_legend_handles_labels()[0])
    style.add_footer(figure, drawn)
    return figure


def crossover_map(
    found: pd.DataFrame,
    drawn: pd.DataFrame,
    *,
    axes: tuple[str, str],
    panel: str,
    title: str,
    names: dict[str, str],
) -> Figure:
    """Where one way is faster than another and where it is not: a cell a size, a line between.

    `found` has a ratio a row; `axes` are its columns across and up, `panel` the one that tells
    panels apart; `names` are what readers call these columns, with units. The thick line runs where
    faster meets slower. Raises ValueError if `found` holds no ratio.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    if found.empty:
        raise ValueError("found must hold a ratio to draw, it holds none")
    style.apply()
    panels = sorted(found[panel].unique())
    x, y = (sorted(found[name].unique()) for name in axes)
    heights = [0.5 + 0.36 * len(y), LEGEND_INCHES]
    size = (1.2 + len(panels) * (0.6 + 0.52 * len(x)), 1.2 + sum(heights))
    figure = plt.figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(2, len(panels), height_ratios=heights)
    for place, value in enumerate(panels):
        axis, part = figure.add_subplot(grid[0, place]), found[found[panel] == value]
        _draw_map(axis, part.pivot_table(index=axes[1], columns=axes[0], values=list(SHOWN)), x, y)
        axis.set(title=f"{names[panel]} {value:,}", xlabel=names[axes[0]])
        axis.set(ylabel="" if place else names[axes[1]])
    style.add_title(figure, title)
    patches = [
        Patch(facecolor=fill, hatch=hatch, edgecolor=HATCH, label=meaning)
        for fill, hatch, meaning in CELLS.values()
    ]
    _add_legend(figure, patches)
    style.add_footer(figure, drawn)
    return figure


def cell_kind(low: float, high: float) -> int:
    """Whether an interval lies below 1, above it, or neither; one round decides nothing."""
    return FASTER if high < 1 else SLOWER if low > 1 else UNDECIDED


def _add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """A row of its own under the panels, where it hides no number."""
    below = figure.add_subplot(figure.axes[0].get_gridspec()[-1, :])
    below.axis("off")
    below.legend(handles=handles, loc="upper left", ncols=5, frameon=False, borderaxespad=0)


def _draw_word(axis: Axes, words: pd.DataFrame, places: np.ndarray, word: str) -> None:
    color, marker = WORDS[word]
    mine = (words.verdict == word).to_numpy()
    rows = words[mine]
    low, high = (rows.ratio - rows.low).clip(lower=0), (rows.high - rows.ratio).clip(lower=0)
    axis.errorbar(
        rows.ratio,
        places[mine],
        xerr=[low.fillna(0), high.fillna(0)],
        fmt=marker,
        markersize=5,
        linewidth=1.2,
        color=color,
        label=word,
    )


def _case_label(row: object) -> str:
    return (
        f"{row.heads} heads, page size {row.page_size}, "
        f"batch {row.batch_size:,}, {row.kv_len:,} tokens"
    )


def _draw_map(axis: Axes, table: pd.DataFrame, x: Sequence[int], y: Sequence[int]) -> None:
    kinds = np.full((len(y), len(x)), np.nan)
    for (up, upper), (across, wide) in (
        ((up, upper), (across, wide)) for up, upper in enumerate(y) for across, wide in enumerate(x)
    ):
        ratio, low, high = (_value(table, name, upper, wide) for name in SHOWN)
        if np.isfinite(ratio):
            kinds[up, across] = cell_kind(low, high)
            _draw_cell(axis, across, up, int(kinds[up, across]))
            number = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"
            axis.text(across, up, number, ha="center", va="center", fontsize=7)
    _draw_border(axis, kinds)
    axis.set_xticks(range(len(x)), [style.short_count(value) for value in x])
    axis.set_yticks(range(len(y)), [style.short_count(value) for value in y])
    axis.set(xlim=(-0.5, len(x) - 0.5), ylim=(-0.5, len(y) - 0.5))
    axis.grid(visible=False)


def _value(table: pd.DataFrame, name: str, row: int, column: int) -> float:
    there = row in table.index and (name, column) in table.columns
    return float(table.loc[row, (name, column)]) if there else float("nan")


def _draw_cell(axis: Axes, across: int, up: int, kind: int) -> None:
    from matplotlib.patches import Rectangle

    fill, hatch, _ = CELLS[kind]
    corner = (across - 0.5, up - 0.5)
    axis.add_patch(Rectangle(corner, 1, 1, facecolor=fill, hatch=hatch, edgecolor=HATCH))


def _draw_border(axis: Axes, kinds: np.ndarray) -> None:
    """A thick line between a cell that is faster and the next known one that is slower."""
    for up, across in zip(*np.nonzero(kinds == SLOWER), strict=True):
        for step_up, step_across in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            other = (up + step_up, across + step_across)
            inside = 0 <= other[0] < kinds.shape[0] and 0 <= other[1] < kinds.shape[1]
            if inside and kinds[other] == FASTER:
                middle = np.array([across + step_across / 2, up + step_up / 2])
                along = np.array([step_up, step_across]) / 2
                axis.plot(*np.array([middle - along, middle + along]).T, color="0.1", linewidth=2)
