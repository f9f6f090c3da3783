"""The figure of a view: a dot a round, a bar at the median, the ceiling as a line."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..draw import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .view import View

ROW_INCHES = 0.36


def draw_times(view: View, make: Callable[..., Figure]) -> Figure:
    """Time of each backend of `view` that has one, from zero; ValueError if none has.

    `make` makes the blank figure: `plt.figure` to show it, `Figure` to keep it from pyplot.
    """
    table = view.times.dropna(subset="us").iloc[::-1]
    if table.empty:
        raise ValueError("view must hold a backend that was measured ok, it has none")
    style.apply()
    figure = make(figsize=(7.2, 1.6 + ROW_INCHES * len(table)), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(table.itertuples()):
        color = style.COLORS.get(row.ran, "0.55")
        axis.barh(place, row.us, height=0.55, color=color, alpha=0.35)
        rounds = view.samples[view.samples.backend == row.backend].run_us
        axis.plot(rounds, [place] * len(rounds), "o", color=color, markersize=4)
    marks = "a dot is a round"
    if view.floor_us == view.floor_us:
        axis.axvline(view.floor_us, color="0.2", linewidth=1)
        marks += ", the line the time at the ceiling"
    names = table.backend + [f"\n({ran})" if ran in style.COLORS else "" for ran in table.ran]
    axis.set_yticks(range(len(table)), names)
    axis.grid(visible=False, axis="y")
    axis.set_xlim(left=0)
    axis.set_xlabel(f"time of one call, us ({marks})")
    axis.set_title(f"{view.choices.model}\n{view.choices.case.label}", x=0)
    style.add_footer(figure, view.samples)
    return figure


def as_image(view: View) -> str:
    """The figure as an HTML image that carries its bytes and its numbers in words."""
    from matplotlib.figure import Figure

    # Not pyplot's: it keeps its figures, and would show this one in whatever cell runs next.
    file = io.BytesIO()
    draw_times(view, Figure).savefig(file, format="png")
    known = view.times.dropna(subset="us")
    times = ", ".join(f"{row.backend} {row.us:,.1f} us" for row in known.itertuples())
    words = html.escape(f"Time of one call: {times}", quote=True)
    code = base64.b64encode(file.getvalue()).decode()
    return f"<img alt='{words}' style='max-width: 100%' src='data:image/png;base64,{code}'>"
