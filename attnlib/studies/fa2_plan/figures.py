"""Figures of the study `fa2_plan`: the first draws the model, for which nothing is measured."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pandas as pd

from ...core.gpu import FA2_CTAS
from ...draw import charts, style
from ...kinds.decode.case import DecodeCase
from ...kinds.lengths import sample_seq_lens
from ...run.frame import FA2
from .blocks import BY_LIBRARY, BY_US, both_schedules, busy
from .tables import OURS, VERDICTS, decode_rows, gains, mean

SHORT = style.SKY, style.PALE_BLUE
"""By turns, for the short requests of a batch."""
LONG = style.VERMILION
FEW, SEEN = 16, 3.0
"""So many blocks of the long request are drawn so many slots high."""


def slots_chart(case: DecodeCase, num_sms: int) -> charts.Figure:
    """Blocks on the slots of a GPU over time, by FlashInfer's plan and by ours: a bar per block.

    The longest request of `case` has a colour of its own; the right panel is the left one's shaded
    part, stretched. List scheduling by the model's rates: no record is drawn.
    """
    from matplotlib.patches import Patch

    works, slots = both_schedules(case, num_sms), FA2_CTAS * num_sms
    longest = int(sample_seq_lens(case).argmax())
    note = f"model, not a measurement, merging left out: {case.label}, {num_sms} SMs of 2 slots"
    titles = [
        f"{name}: {work.end.max():,.0f} us\n{len(work)} blocks, {work.tokens.max():,} tokens at "
        f"most, {busy(work, num_sms):.0%} busy"
        for name, work in works.items()
    ]
    words = ("time by the model, us", "slot: half an SM")
    figure, axes = charts.panels(
        *(titles, (9.6, 5.4), note, words),
        title="One batch on the slots of a GPU, by two plans",
        share="y",
        legend=charts.LEGEND_INCHES,
    )
    for axis, work in zip(axes, works.values(), strict=True):
        _draw_blocks(axis, work, longest)
        axis.set(xlim=(0, work.end.max() * 1.02), ylim=(slots + 1, -2))
    _say_long(axes[0], works[BY_LIBRARY], longest)
    _say_idle(axes[0], works[BY_LIBRARY], slots)
    end = works[BY_US].end.max()
    axes[0].axvline(end, color=style.INK, linewidth=1.2, linestyle=(0, (4, 2)))
    axes[0].annotate(
        f"our plan ends here: {end:,.0f} us, drawn at the right",
        *((end, 0.3 * slots), (0.16 * works[BY_LIBRARY].end.max(), 0.3 * slots)),
        arrowprops={"arrowstyle": "->", "color": style.INK},
        va="center",
    )
    colors = {
        "the long request": LONG,
        "short ones, by turns": SHORT[0],
        "idle: nothing runs": style.IDLE,
    }
    charts.legend_below(figure, [Patch(color=look, label=name) for name, look in colors.items()])
    return figure


def _draw_blocks(axis: charts.Axes, work: pd.DataFrame, longest: int) -> None:
    axis.axvspan(0, work.end.max(), color=style.IDLE, zorder=0, linewidth=0)
    others = [request for request in work.request.unique() if request != longest]
    colors = dict(zip(others, cycle(SHORT), strict=False)) | {longest: LONG}
    shown, long = work.request.map(colors), work.request == longest
    # A bar of one slot in hundreds would not be seen if it were alone in its colour.
    height = np.where(long & (long.sum() <= FEW), SEEN, 1.0)
    place, width = work.slot + 0.5, work.end - work.start
    axis.barh(place, width, height, work.start, color=shown, edgecolor="white", linewidth=0.2)
    axis.grid(visible=False)


def _say_long(axis: charts.Axes, work: pd.DataFrame, longest: int) -> None:
    own = work[work.request == longest]
    heads = own["head"].nunique()
    each = "one block per KV head" if len(own) == heads else f"{len(own)} blocks"
    axis.annotate(
        f"the long request: {each}",
        *((0.55 * own.end.max(), own.slot.min() + 1), (0.55 * own.end.max(), 34)),
        color=LONG,
        fontweight="bold",
        ha="center",
        arrowprops={"arrowstyle": "-", "color": LONG},
    )


def _say_idle(axis: charts.Axes, work: pd.DataFrame, slots: int) -> None:
    middle = work.end.max() / 2
    busy = work[(work.start <= middle) & (middle < work.end)].slot.nunique()
    told = f"{busy} of {slots} slots work, the others are idle"
    axis.text(middle * 1.1, 0.55 * slots, told, ha="center", color=style.INK, fontweight="bold")


def gain_chart(frame: pd.DataFrame) -> charts.Figure:
    """Gain over FlashInfer's plan, a dot per case, a row per batch, a line per mean; the
    widest intervals leave the picture."""
    drawn = decode_rows(frame)
    drawn = drawn[drawn.backend.isin((FA2, OURS))]
    found = gains(drawn)
    means = found.groupby("batch", observed=True).gain.agg(mean).sort_values(ascending=False)
    places = {batch: place for place, batch in enumerate(means.index)}
    figure, (axis,) = charts.panels(
        [""],
        (8.2, 1.5 + 0.5 * len(places)),
        drawn,
        ("FlashInfer's plan over ours, run time (log; right of 1 ours is faster)", ""),
        title="Decode by the same kernels, two plans",
    )
    aside = found.groupby("batch", observed=True).gain.transform(
        lambda own: charts.spread(own.index, 0.6)
    )
    placed = found.assign(place=found.batch.map(places).astype(float) + aside)
    looks = {word: charts.VERDICTS[word] for word in VERDICTS}
    charts.dots(axis, placed, "gain", "place", by="verdict", looks=looks, interval="x")
    axis.axvline(1, **style.RULE)
    place = np.arange(len(means))
    axis.vlines(means, place - 0.4, place + 0.4, color=style.INK, linewidth=2)
    words = [f"{batch}  ({value:.2f})" for batch, value in means.items()]
    charts.categories(axis, "y", words)
    axis.set_xlim(found.gain.min() / 1.5, found.gain.max() * 1.5)
    style.log_axes(axis, "x")
    axis.legend(title="ours is", loc="lower right", frameon=True)
    return figure
