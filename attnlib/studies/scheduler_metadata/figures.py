"""Figures of FA3's schedule: two draw records, two the model, for which nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, cycle

import numpy as np
import pandas as pd

from ...core.schedule.facts import SchedulerFacts
from ...core.schedule.splits import plan_splits
from ...draw import charts, style
from ...run.frame import decode_rows
from .tables import EACH, NEEDED_SHARE, ONCE, PREPARE, SGLANG_SAVES_US, savings
from .tiles import Tile, assign_tiles, balance

LENGTH, SHARE = "kv_len, tokens", "saved / ((layers - 1) x prepare)"


def savings_chart(frame: pd.DataFrame, layers: int = 64) -> charts.Figure:
    """Microseconds saved in a step over kv_len: a panel per page size, a dot per batch size.

    Bars are intervals over rounds (`gaps`); those of very long steps leave the picture.
    """
    table, drawn = savings(frame), decode_rows(frame)
    table = table[table.layers == layers]
    drawn = drawn[drawn.backend.isin((EACH, ONCE)) & (drawn.layers == layers)]
    parts = {f"{layers} layers, page size {page}": own for page, own in table.groupby("page_size")}
    size, words = (4.8 * len(parts), 4.2), (LENGTH, "saved, us per step")
    figure, axes = charts.panels(list(parts), size, drawn, words, share="y")
    for axis, own in zip(axes, parts.values(), strict=True):
        looks = style.looks(sorted(own.batch_size.unique()))
        aside = charts.spread(own.batch_size, 0.12 * (len(looks) - 1))
        own = own.assign(place=_by_length(axis, own) + aside)
        charts.dots(axis, own, "place", "saved", by="batch_size", looks=looks, interval="y")
        axis.axhline(0, **style.RULE)
        axis.axhline(SGLANG_SAVES_US, **style.RULE, linestyle="--")
        left = axis.get_yaxis_transform()
        said = f"SGLang's #21104: {SGLANG_SAVES_US:.0f} us"
        axis.text(0.01, SGLANG_SAVES_US + 4, said, fontsize=8, transform=left)
    axes[0].set_ylim(table.saved.min() - 150, max(table.saved.max(), SGLANG_SAVES_US) + 150)
    axes[-1].legend(title="batch size", ncols=3, loc="upper left", frameon=True)
    return figure


def share_chart(frame: pd.DataFrame) -> charts.Figure:
    """Share of (layers - 1) x the prepare kernel's own time that is saved: a dot per case."""
    table, drawn = savings(frame).dropna(subset="share"), decode_rows(frame)
    drawn = drawn[drawn.backend.isin((EACH, ONCE, PREPARE))]
    title = "How much of the prepare kernels' time is saved"
    figure, (axis,) = charts.panels([title], (6.4, 4.0), drawn, (LENGTH, SHARE))
    within = table.groupby("layers").share.transform(lambda own: charts.spread(own.index, 0.12))
    aside = charts.spread(table.layers, 0.5) + within
    table = table.assign(place=_by_length(axis, table) + aside)
    looks = style.looks(sorted(table.layers.unique()))
    charts.dots(axis, table, "place", "share", by="layers", looks=looks)
    axis.axhline(NEEDED_SHARE, **style.RULE, linestyle="--")
    axis.text(-0.2, NEEDED_SHARE + 0.01, "expected at least", va="bottom")
    axis.set_ylim(0, 1.1 * max(1, table.share.max()))
    axis.legend(title="layers", loc="upper left", ncols=3, frameon=True)
    return figure


def tile_chart(facts: SchedulerFacts, batches: Mapping[str, Sequence[int]]) -> charts.Figure:
    """Work tiles over SMs, a panel per batch: time in KV blocks to the right, a bar per tile.

    `batches` names lengths, as many as `facts.batch_size`; a request keeps its colour.
    """
    parts = {}
    for name, lengths in batches.items():
        plan = plan_splits(facts, np.array(lengths))
        tiles = assign_tiles(plan)
        busy = 100 * balance(tiles, num_sms=facts.usable_sms)
        ends = dict.fromkeys((plan.num_splits.min(), plan.num_splits.max()))
        splits = " to ".join(map(str, ends))
        parts[f"{name}: {splits} splits\n{len(tiles)} tiles, {busy:.0f} % busy"] = tiles
    return _tiles_figure(facts, parts, (3.6 * len(batches), 4.6), share="y")


def stale_chart(
    facts: SchedulerFacts, told: Sequence[int], attended: Sequence[int]
) -> charts.Figure:
    """Tiles of the lengths `attended`: with their own schedule, and with that of `told`."""
    parts = {}
    for name, lengths in {"fresh": attended, "stale": told}.items():
        plan = plan_splits(facts, np.array(lengths))
        tiles = assign_tiles(plan, np.array(attended))
        last = max(tile.end for tile in tiles)
        parts[f"{name} metadata: {plan.num_splits.max()} splits at most, {last} blocks"] = tiles
    return _tiles_figure(facts, parts, (8.4, 4.2), share="xy")


def _by_length(axis: charts.Axes, table: pd.DataFrame) -> pd.Series:
    """Name the lengths of `table` on the x axis, evenly apart; the place of each row's length."""
    lengths = sorted(table.kv_len.unique())
    charts.categories(axis, "x", (f"{length:,}" for length in lengths))
    return table.kv_len.map(lengths.index)


def _tiles_figure(
    facts: SchedulerFacts, parts: Mapping[str, list[Tile]], size: tuple[float, float], share: str
) -> charts.Figure:
    note = (
        f"model, not a measurement: {facts.num_qo_heads}/{facts.num_kv_heads} heads, "
        f"head_dim {facts.head_dim}, batch {facts.batch_size}, {facts.usable_sms} SMs, "
        f"cap {facts.split_cap}; cost = blocks"
    )
    time = f"work of an SM, KV blocks of {facts.tile[1]} tokens"
    figure, axes = charts.panels(list(parts), size, note, (time, "SM"), share=share)
    # Hues for the first few requests that are taken, then greys by turns.
    taken = dict.fromkeys(tile.request for tiles in parts.values() for tile in tiles)
    colors = dict(zip(taken, chain(style.PALETTE, cycle(style.GREYS)), strict=False))
    for axis, tiles in zip(axes, parts.values(), strict=True):
        work = pd.DataFrame(vars(tile) for tile in tiles if tile.blocks)
        shown = work.request.map(colors)
        axis.barh(work.sm, work.blocks, 1.0, work.start, color=shown, edgecolor="white", lw=0.25)
        axis.set_ylim(facts.usable_sms - 0.5, -0.5)
        axis.grid(visible=False)
    return figure
