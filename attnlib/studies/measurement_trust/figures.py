"""The figure of the study `measurement_trust`: judged ratios with their verdicts."""

from __future__ import annotations

import pandas as pd

from ...draw import charts, style


def ratio_chart(words: pd.DataFrame, drawn: pd.DataFrame, *, label: str) -> charts.Figure:
    """A row per case of judged ratios: dot, interval, verdict; the band is the widest margin.

    `drawn` are the records that were judged; `label` says what over what, for the title. Raises
    ValueError if `words` holds no case.
    """
    if words.empty:
        raise ValueError("words must hold a case that was judged, it holds none")
    size, ratio = (7, 1.6 + 0.26 * len(words)), "ratio, with its interval over rounds"
    room = charts.LEGEND_INCHES
    figure, (axis,) = charts.panels([""], size, drawn, (ratio, ""), title=label, legend=room)
    margin = words.margin.max()
    axis.axvspan(1 / (1 + margin), 1 + margin, color=style.BAND, linewidth=0, label="margin")
    axis.axvline(1, **style.RULE)
    rows = words.assign(place=range(len(words)))
    looks = charts.VERDICTS
    charts.dots(axis, rows, "ratio", "place", by="verdict", looks=looks, interval="x", size=5)
    names = [
        f"{case.heads} heads, page size {case.page_size}, "
        f"batch {case.batch_size:,}, {case.kv_len:,} tokens"
        for case in words.itertuples()
    ]
    charts.categories(axis, "y", names)
    style.log_axes(axis, "x")
    charts.legend_below(figure, axis.get_legend_handles_labels()[0])
    return figure
