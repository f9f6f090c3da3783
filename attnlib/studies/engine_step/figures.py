"""The figure of an engine's steps: what kernels promise, and what a step shows of it."""

from __future__ import annotations

import pandas as pd

from ...draw import charts


def promised_chart(frame: pd.DataFrame, core: pd.DataFrame) -> charts.Figure:
    """Microseconds a step, predicted and measured, of each comparison that is faster by verdict.

    `core` is the `tables.core_table` of the records of `frame`.
    """
    table = core[(core.verdict == "faster") & (core.predicted > 0)]
    table = table.assign(arms=table.arm + " for " + table.over)
    drawn = frame[frame.timer == "host"]
    words = ("predicted, us a step", "measured, us a step")
    title = "What kernels promise, and what a step saves"
    figure, (axis,) = charts.panels([title], (7, 5), drawn, words)
    charts.against(axis, table, "predicted", "saved", {"hue": "arms"})
    axis.legend(title="", fontsize=8)
    return figure
