"""Figures of FA3's schedule: what preparing it once saves, how it splits, which SM does what.

The first two draw records; the others draw the model, for which nothing is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...core.schedule.facts import SchedulerFacts
from ...core.schedule.splits import plan_splits
from ...draw import charts, style
from ...run.frame import decode_rows
from . import vectors
from .tables import EACH, NEEDED_SHARE, ONCE, PREPARE, SGLANG_SAVES_US, savings
from .tiles import Tile, assign_tiles, balance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BATCHES, LENGTHS = (1, 4, 16, 64, 128), (512, 2048, 8192, 32768, 131072)


def savings_chart(frame: pd.DataFrame, layers: int = 64) -> Figure:
    """Microseconds saved in a step over kv_len: a panel per page size, a dot per batch size.

    Bars are 95 % intervals over rounds; those of very long steps leave the picture.
    """
    table, drawn = savings(frame), decode_rows(frame)
    table = table[table.layers == layers]
    pages = sorted(table.page_size.unique())
    figure, axes = charts.panels(
        [f"{layers} layers, page size {page}" for page in pages],
        (4.8 * len(pages), 4.2),
        source=drawn[drawn.backend.isin((EACH, ONCE)) & (drawn.layers == layers)],
        x="kv_len, tokens",
        y="saved, us per step",
        share="y",
    )
    for axis, page in zip(axes, pages, strict=True):
        _draw_savings(axis, table[table.page_size == page])
    axes[0].set_ylim(table.saved.min() - 150, max(table.saved.max(), SGLANG_SAVES_US) + 150)
    axes[-1].legend(title="batch size", ncols=3, loc="lower left", frameon=True)
    return figure


def share_chart(frame: pd.DataFrame) -> Figure:
    """Share of (layers - 1) x the prepare kernel's own time that is saved: a dot per case."""
    table, drawn = savings(frame).dropna(subset="share"), decode_rows(frame)
    lengths = sorted(table.kv_len.unique())
    figure, (axis,) = charts.panels(
        ["How much of the prepare kernels' time is saved"],
        (6.4, 4.0),
        source=drawn[drawn.backend.isin((EACH, ONCE, PREPARE))],
        x="kv_len, tokens",
        y="saved / ((layers - 1) x prepare)",
    )
    within = table.groupby("layers").share.transform(lambda own: charts.spread(own.index, 0.12))
    aside = charts.spread(table.layers, 0.5) + within
    table = table.assign(place=table.kv_len.map(lengths.index) + aside)
    looks = style.looks(sorted(table.layers.unique()))
    charts.dots(axis, table, x="place", y="share", by="layers", looks=looks)
    axis.axhline(NEEDED_SHARE, **style.RULE, linestyle="--")
    axis.text(-0.2, NEEDED_SHARE + 0.01, "expected at least", va="bottom")
    charts.categories(axis, "x", (f"{length:,}" for length in lengths))
    axis.set_ylim(0, 1.15)
    axis.legend(title="layers", loc="upper right", ncols=3, frameon=True)
    return figure


def tile_chart(facts: SchedulerFacts, batches: Mapping[str, Sequence[int]]) -> Figure:
    """Work tiles over SMs, a panel per batch: time in KV blocks to the right, a bar per tile.

    `batches` names lengths, as many as `facts.batch_size`; a request keeps its colour.
    """
    parts = {}
    for name, lengths in batches.items():
        plan = plan_splits(facts, np.array(lengths))
        tiles = assign_tiles(plan)
        busy = 100 * balance(tiles, num_sms=facts.usable_sms)
        counted = f"{len(tiles)} tiles, {busy:.0f} % busy"
        parts[f"{name}: {_span(plan.num_splits)} splits\n{counted}"] = tiles
    return _tiles_figure(facts, parts, (3.6 * len(batches), 4.6), share="y")


def stale_chart(facts: SchedulerFacts, told: Sequence[int], attended: Sequence[int]) -> Figure:
    """Tiles of the lengths `attended`: with their own schedule, and with that of `told`."""
    parts = {}
    for name, lengths in {"fresh": attended, "stale": told}.items():
        plan = plan_splits(facts, np.array(lengths))
        tiles = assign_tiles(plan, np.array(attended))
        last = max(tile.end for tile in tiles)
        most = f"{plan.num_splits.max()} splits at most, {last} blocks"
        parts[f"{name} metadata: {most}"] = tiles
    return _tiles_figure(facts, parts, (8.4, 4.2), share="xy")


def split_table(facts: SchedulerFacts) -> pd.DataFrame:
    """Splits of a request where all are as long as the table: kv_len down, batch size across."""
    rows = {}
    for length in LENGTHS:
        wide = [_resized(facts, batch, length) for batch in BATCHES]
        rows[length] = [
            int(plan_splits(each, np.full(each.batch_size, length)).num_splits[0]) for each in wide
        ] + [wide[0].split_cap]
    table = pd.DataFrame(rows, index=[*BATCHES, "cap"]).T
    return table.rename_axis(index="kv_len", columns="batch size")


def model_agreement() -> pd.DataFrame:
    """The model's words beside those that FA3 wrote on a GPU, over all committed calls.

    A row a kind of word: how many, how many contradict the model, and how many of the open ones
    came out as the model chose.
    """
    _, calls = vectors.read(vectors.COMMITTED)
    judged = [vectors.compare(call, words) for call, words in calls if words is not None]
    words, alike = _summed(each.counts for each in judged), _summed(j.open_alike for j in judged)
    wrong = sum(_summed(each.wrong for each in judged).values())
    table = pd.DataFrame({"calls": len(judged), "words": words, "as the model chose": alike})
    table["contradict it"] = pd.Series({"specified": wrong, "tie": 0, "rounding": 0})
    return table.loc[["specified", "tie", "rounding", "padding"]].astype("Int64")


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _resized(facts: SchedulerFacts, batch_size: int, max_seqlen_k: int) -> SchedulerFacts:
    return replace(facts, batch_size=batch_size, max_seqlen_k=max_seqlen_k)


def _draw_savings(axis: Axes, table: pd.DataFrame) -> None:
    lengths, batches = (sorted(table[name].unique()) for name in ("kv_len", "batch_size"))
    aside = charts.spread(table.batch_size, 0.12 * (len(batches) - 1))
    table = table.assign(place=table.kv_len.map(lengths.index) + aside)
    looks = style.looks(batches)
    charts.dots(axis, table, x="place", y="saved", by="batch_size", looks=looks, interval="y")
    axis.axhline(0, **style.RULE)
    axis.axhline(SGLANG_SAVES_US, **style.RULE, linestyle="--")
    place = axis.get_yaxis_transform()
    axis.text(0.01, SGLANG_SAVES_US + 4, "SGLang's #21104", fontsize=8, transform=place)
    charts.categories(axis, "x", (f"{length:,}" for length in lengths))


def _tiles_figure(
    facts: SchedulerFacts, parts: Mapping[str, list[Tile]], size: tuple[float, float], share: str
) -> Figure:
    heads = f"{facts.num_qo_heads}/{facts.num_kv_heads}"
    note = (
        f"model, not a measurement: {heads} heads, head_dim {facts.head_dim}, batch "
        f"{facts.batch_size}, {facts.usable_sms} SMs, cap {facts.split_cap}; cost = blocks"
    )
    time = f"time, KV blocks of {facts.tile[1]} tokens"
    figure, axes = charts.panels(list(parts), size, source=note, x=time, y="SM", share=share)
    for axis, tiles in zip(axes, parts.values(), strict=True):
        colours, worked = _colours(tiles), [tile for tile in tiles if tile.blocks]
        axis.barh(
            [tile.sm for tile in worked],
            [tile.blocks for tile in worked],
            left=[tile.start for tile in worked],
            height=1.0,
            color=[colours[tile.request] for tile in worked],
            edgecolor="white",
            linewidth=0.25,
        )
        axis.set_ylim(facts.usable_sms - 0.5, -0.5)
        axis.grid(visible=False)
    return figure


def _span(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _colours(tiles: list[Tile]) -> dict[int, object]:
    """A colour a request: hues for the first few taken, then greys by turns."""
    taken = list(dict.fromkeys(tile.request for tile in tiles))
    greys = ("0.55", "0.70", "0.82")
    colours: dict[int, object] = dict(zip(taken, style.PALETTE, strict=False))
    later = taken[len(style.PALETTE) :]
    return colours | {request: greys[at % len(greys)] for at, request in enumerate(later)}
