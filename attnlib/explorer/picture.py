"""The figure of a view: a dot a round, a bar at the median, the ceiling as a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..report import style
from .choices import LIVE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .views import View

ROW_INCHES = 0.36


def draw_times(view: View) -> Figure:
    """Time of each backend of `view` that has one, from zero; ValueError if none has."""
    from matplotlib.figure import Figure

    table = view.times.dropna(subset="us").iloc[::-1]
    if table.empty:
        raise ValueError("view must hold a backend that was measured ok, it has none")
    style.apply()
    # Not pyplot's: it keeps its figures until they are closed, and the widgets draw one a click.
    figure = Figure(figsize=(7.2, 1.4 + ROW_INCHES * len(table)), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(table.itertuples()):
        color = style.COLORS.get(row.ran, "0.55")
        axis.barh(place, row.us, height=0.55, color=color, alpha=0.35)
        rounds = view.samples[view.samples.backend == row.backend].run_us
        axis.plot(rounds, [place] * len(rounds), "o", color=color, markersize=4)
    if view.floor_us == view.floor_us:
        axis.axvline(view.floor_us, color="0.2", linewidth=1, label="time at the ceiling")
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.2)
    names = [f"{row.backend}\n({row.ran})" for row in table.itertuples()]
    axis.set_yticks(range(len(table)), names)
    axis.grid(visible=False, axis="y")
    axis.set_xlim(left=0)
    axis.set_xlabel("time of one call, us (a dot is a round)")
    axis.set_title(view.choices.case.label)
    source = "measured here" if view.choices.records == LIVE else f"study {view.choices.records}"
    style.write_footer(figure, f"{view.choices.model}; {source}; {view.served}")
    return figure
