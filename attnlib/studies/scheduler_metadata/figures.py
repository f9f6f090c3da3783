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
from ...draw import style
from ...run.frame import decode_rows
from . import vectors
from .tables import EACH, NEEDED_SHARE, ONCE, PREPARE, SGLANG_SAVES_US, savings
from .tiles import Tile, assign_tiles, balance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BATCHES, LENGTHS = (1, 4, 16, 64, 128), (512, 2048, 8192, 32768, 131072)


def savings_chart(frame: pd.DataFrame, layers: int = 64) -> Figure:
    """Microseconds saved in a step over kv_len: a panel a page size, a dot a batch size.

    Bars are 95 % intervals over rounds; those of very long steps leave the picture.
    """
    import matplotlib.pyplot as plt

    style.apply()
    table = savings(frame)
    table = table[table.layers == layers]
    pages = sorted(table.page_size.unique())
    figure, axes = plt.subplots(
        1, len(pages), figsize=(4.8 * len(pages), 4.2), squeeze=False, sharey=True
    )
    figure.set_layout_engine("constrained")
    for axis, page in zip(axes[0], pages, strict=True):
        _draw_savings(axis, table[table.page_size == page])
        axis.set_title(f"{layers} layers, page size {page}")
    axes[0][0].set_ylabel("saved, us a step")
    axes[0][0].set_ylim(table.saved.min() - 150, max(table.saved.max(), SGLANG_SAVES_US) + 150)
    axes[0][-1].legend(title="batch size", ncols=3, loc="lower left", frameon=True)
    drawn = decode_rows(frame)
    drawn = drawn[drawn.backend.isin((EACH, ONCE)) & (drawn.layers == layers)]
    style.add_footer(figure, drawn)
    return figure


def share_chart(frame: pd.DataFrame) -> Figure:
    """Share of (layers - 1) x the prepare kernel's own time that is saved: a dot a case."""
    import matplotlib.pyplot as plt

    style.apply()
    table = savings(frame).dropna(subset="share")
    lengths = sorted(table.kv_len.unique())
    figure, axis = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    looks = zip(style.PALETTE, style.SHAPES, table.groupby("layers"), strict=False)
    for colour, shape, (layers, group) in looks:
        place = np.array([lengths.index(kv_len) for kv_len in group.kv_len], float)
        aside = 0.25 * (list(table.layers.unique()).index(layers) - 1)
        spread = np.linspace(-0.06, 0.06, len(group))
        look = {"s": 18, "color": colour, "marker": shape}
        axis.scatter(place + aside + spread, group.share, label=layers, **look)
    axis.axhline(NEEDED_SHARE, color="0.3", linewidth=1, linestyle="--")
    axis.text(-0.2, NEEDED_SHARE + 0.01, "expected at least", va="bottom")
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set(xlabel="kv_len, tokens", ylabel="saved / ((layers - 1) x prepare)", ylim=(0, 1.15))
    axis.set_title("How much of the prepare kernels' time is saved")
    axis.legend(title="layers", loc="upper right", ncols=3, frameon=True)
    drawn = decode_rows(frame)
    style.add_footer(figure, drawn[drawn.backend.isin((EACH, ONCE, PREPARE))])
    return figure


def tile_chart(facts: SchedulerFacts, batches: Mapping[str, Sequence[int]]) -> Figure:
    """Work tiles over SMs, a panel a batch: time in KV blocks to the right, a bar a tile.

    `batches` names lengths, as many as `facts.batch_size`; a request keeps its colour.
    """
    import matplotlib.pyplot as plt

    style.apply()
    figure, axes = plt.subplots(
        1, len(batches), figsize=(3.6 * len(batches), 4.6), squeeze=False, sharey=True
    )
    figure.set_layout_engine("constrained")
    for axis, (name, lengths) in zip(axes[0], batches.items(), strict=True):
        plan = plan_splits(facts, np.array(lengths))
        tiles = assign_tiles(plan)
        _draw_tiles(axis, tiles, facts)
        busy = balance(tiles, num_sms=facts.usable_sms)
        axis.set_title(
            f"{name}: {_span(plan.num_splits)} splits\n{len(tiles)} tiles, {100 * busy:.0f} % busy"
        )
    axes[0][0].set_ylabel("SM")
    style.write_footer(figure, _model_note(facts))
    return figure


def stale_chart(facts: SchedulerFacts, told: Sequence[int], attended: Sequence[int]) -> Figure:
    """Tiles of the lengths `attended`: with their own schedule, and with that of `told`."""
    import matplotlib.pyplot as plt

    style.apply()
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 4.2), sharey=True, sharex=True)
    figure.set_layout_engine("constrained")
    for axis, (name, lengths) in zip(axes, {"fresh": attended, "stale": told}.items(), strict=True):
        plan = plan_splits(facts, np.array(lengths))
        tiles = assign_tiles(plan, np.array(attended))
        _draw_tiles(axis, tiles, facts)
        last = max(tile.end for tile in tiles)
        axis.set_title(f"{name} metadata: {plan.num_splits.max()} splits at most, {last} blocks")
    axes[0].set_ylabel("SM")
    style.write_footer(figure, _model_note(facts))
    return figure


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
    lengths = sorted(table.kv_len.unique())
    batches = sorted(table.batch_size.unique())
    looks = zip(style.PALETTE, style.SHAPES, batches, strict=False)
    for number, (colour, shape, batch) in enumerate(looks):
        rows = table[table.batch_size == batch]
        place = np.array([lengths.index(kv_len) for kv_len in rows.kv_len])
        low, high = (rows.saved - rows.low).fillna(0), (rows.high - rows.saved).fillna(0)
        axis.errorbar(
            place + (number - (len(batches) - 1) / 2) * 0.12,
            rows.saved,
            yerr=[low, high],
            fmt=shape,
            markersize=4,
            linewidth=1,
            color=colour,
            label=f"{batch}",
        )
    axis.axhline(0, color="0.3", linewidth=1)
    axis.axhline(SGLANG_SAVES_US, color="0.3", linewidth=1, linestyle="--")
    place = axis.get_yaxis_transform()
    axis.text(0.01, SGLANG_SAVES_US + 4, "SGLang's #21104", fontsize=8, transform=place)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_xlabel("kv_len, tokens")


def _draw_tiles(axis: Axes, tiles: list[Tile], facts: SchedulerFacts) -> None:
    colours = _colours(tiles)
    worked = [tile for tile in tiles if tile.blocks]
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
    axis.set_xlabel(f"time, KV blocks of {facts.tile[1]} tokens")
    axis.grid(visible=False)


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


def _model_note(facts: SchedulerFacts) -> str:
    heads = f"{facts.num_qo_heads}/{facts.num_kv_heads}"
    return (
        f"model, not a measurement: {heads} heads, head_dim {facts.head_dim}, batch "
        f"{facts.batch_size}, {facts.usable_sms} SMs, cap {facts.split_cap}; cost = blocks"
    )
