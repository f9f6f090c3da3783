"""Figures of the study `sparse_mla`: each draws one table of `mla` or `mla_rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...draw import charts, style
from ...draw.style import Look
from ...kinds.cost import Ceilings, mla_cost
from ...run.frame import over
from .model import first_lost_token, pool_tokens
from .tables import (
    BOTH,
    FA3,
    FLASHMLA,
    FLASHMLA_DENSE,
    FORMAT_OF,
    NEW,
    OLD,
    against_bounds,
    in_format,
    mla_records,
    sparse_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = {
    FA3: Look(style.BLUE, "o"),
    f"bound of {FA3}": Look(style.BLUE),
    FLASHMLA: Look(style.VERMILION, "s"),
    f"bound of {FLASHMLA}": Look(style.VERMILION),
}
HEAD_MARKERS = {16: "o", 32: "s", 64: "D", 128: "^"}
PANELS = ((2048, 256), (2048, 64), (512, 64), (2048, 1))
"""(top_k, batch) of the panels over heads: outside the L2 first."""
HEADS = "query heads per GPU"
FACTOR = 2**1.3
"""Either way, where the colours of `ratio_heatmap` end."""
OUTCOMES = {
    f"FlashInfer {OLD}": Look(style.VERMILION, "x"),
    f"FlashInfer {NEW}": Look(style.BLUE, "o"),
    "FlashMLA": Look(style.GREEN, "s"),
}
ASIDE = 1.08
"""Factor between the libraries' places: most of their dots would lie on one another."""


def ratio_heatmap(frame: pd.DataFrame) -> Figure:
    """fa3 over FlashMLA at the commonest kv_len: a panel per top-k; below 1 fa3 is faster."""
    return charts.heatmap(
        _commonest(over(sparse_rows(frame), FA3, FLASHMLA)),
        frame,
        axes=("batch_size", "num_qo_heads"),
        panel="top_k",
        labels=charts.Labels("batch", HEADS, "top-k {}"),
        title="time of FlashInfer fa3 (bf16) / FlashMLA (FP8)",
        size=(4.2, 2.9),
        ends=(1 / FACTOR, FACTOR),
        log=True,
    )


def heads_chart(frame: pd.DataFrame, limit: Ceilings) -> Figure:
    """Time over heads per GPU of both kernels, with the bound of each cache dashed."""
    table = _commonest(against_bounds(sparse_rows(frame), limit))
    parts = [(k, table[(table.top_k == k[0]) & (table.batch_size == k[1])]) for k in PANELS]
    parts = [(key, rows) for key, rows in parts if rows.num_qo_heads.nunique() > 1]
    figure, axes = charts.panels(
        [f"top-k {top_k}, batch {batch}" for (top_k, batch), _ in parts],
        (2.4 * len(parts) + 1.4, 3.2),
        source=frame,
        x=HEADS,
        y="time of one call in a graph, us",
    )
    for axis, (_, rows) in zip(axes, parts, strict=True):
        times = rows.pivot(index="num_qo_heads", columns="design", values="us")
        bounds = rows.pivot(index="num_qo_heads", columns="design", values="bound_us")
        charts.lines(axis, times.join(bounds.add_prefix("bound of ")), LOOKS)
        axis.set_ylim(bottom=0)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4 if len(parts) > 1 else 2)
    return figure


def bound_chart(frame: pd.DataFrame, limit: Ceilings) -> Figure:
    """Measured time over the bound, commonest kv_len; hollow where the L2 holds the tokens."""
    table = _commonest(against_bounds(sparse_rows(frame), limit))
    table = table[table.design.isin(BOTH)]
    read = [mla_cost(in_format(r.case, FORMAT_OF[r.design])).kv_bytes for r in table.itertuples()]
    hollow = "tokens fit the L2"
    table = table.assign(**{hollow: np.array(read) <= frame.l2_mib.max() * 2**20})
    figure, (axis,) = charts.panels(
        ["Time of a call over the longer of its bounds"], (6.4, 4.6), source=frame
    )
    charts.against(
        axis,
        table.rename(columns={"num_qo_heads": "heads"}),
        x="bound_us",
        y="us",
        color="design",
        marker="heads",
        palette={name: LOOKS[name].color for name in BOTH},
        markers=HEAD_MARKERS,
        hollow=hollow,
        loc="lower right",
    )
    axis.set(xlabel="bound, us", ylabel="measured, us")
    return figure


def overflow_chart(frame: pd.DataFrame) -> Figure:
    """Worst relative error of a record over the tokens of its cache, with the 32-bit limit."""
    rows = mla_records(frame)
    rows = rows[rows.oracle_error.notna()]
    old, new, flashmla = OUTCOMES
    library = np.where(rows.release == OLD, old, new)
    library = np.where(rows.backend.isin((FLASHMLA, FLASHMLA_DENSE)), flashmla, library)
    tokens = [pool_tokens(case) / 1e6 for case in rows.case]
    aside = [ASIDE ** (list(OUTCOMES).index(name) - 1) for name in library]
    rows = rows.assign(library=library, millions=np.multiply(tokens, aside))
    figure, (axis,) = charts.panels(
        ["Worst error by size of the cache"],
        (6.4, 3.6),
        source=frame,
        x="tokens in the cache of a layer, millions",
        y="worst row's relative error",
    )
    charts.dots(
        axis,
        rows,
        x="millions",
        y="oracle_error",
        by="library",
        looks=OUTCOMES,
    )
    limit = first_lost_token()
    axis.axvline(limit / 1e6, color="0.35", linestyle="--", linewidth=1, label=f"token {limit:,}")
    style.log_axes(axis, "x", "y")
    axis.legend(loc="best", frameon=True)
    return figure


def _commonest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the commonest kv_len."""
    return table[table.kv_len.isin(table.kv_len.mode())]
