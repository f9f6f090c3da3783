"""Figures of the study `sparse_mla`: each draws one table of `tables`."""

from __future__ import annotations

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

COLORS = {FA3: style.BLUE, FLASHMLA: style.VERMILION}
LOOKS = {
    FA3: Look(COLORS[FA3], "o"),
    f"bound of {FA3}": Look(COLORS[FA3]),
    FLASHMLA: Look(COLORS[FLASHMLA], "s"),
    f"bound of {FLASHMLA}": Look(COLORS[FLASHMLA]),
}
HEAD_MARKERS = {16: "o", 32: "s", 64: "D", 128: "^"}
PANELS = ((2048, 256), (2048, 64), (512, 64), (2048, 1))
"""(top_k, batch) of the panels over heads."""
PER_GPU = "query heads per GPU"
MAP = charts.Sizes("batch_size", "num_qo_heads", "top_k", ("batch, requests", PER_GPU), "top-k {}")
FACTOR = 2**1.3
"""Either way, where the colours of `ratio_heatmap` end."""
OUTCOMES = {
    f"FlashInfer {OLD}": Look(style.VERMILION, "x"),
    f"FlashInfer {NEW}": Look(style.BLUE, "o"),
    "FlashMLA": Look(style.GREEN, "s"),
}
ASIDE = 1.08
"""Factor between the libraries' places: most of their dots would lie on one another."""


def ratio_heatmap(frame: pd.DataFrame) -> charts.Figure:
    """fa3 over FlashMLA at the commonest kv_len: a panel per top-k; below 1 fa3 is faster."""
    found = _commonest(over(sparse_rows(frame), FA3, FLASHMLA))
    title, ends = "Time of FlashInfer fa3 (bf16) / FlashMLA (FP8)", (1 / FACTOR, FACTOR)
    return charts.heatmap(found, frame, MAP, title=title, inches=(4.2, 2.9), ends=ends, log=True)


def heads_chart(frame: pd.DataFrame, limit: Ceilings) -> charts.Figure:
    """Time over heads per GPU of both kernels, with the bound of each cache dashed."""
    table = _commonest(against_bounds(sparse_rows(frame), limit))
    parts = {
        f"top-k {top_k}, batch {batch}": table[(table.top_k == top_k) & (table.batch_size == batch)]
        for top_k, batch in PANELS
    }
    parts = {name: part for name, part in parts.items() if part.num_qo_heads.nunique() > 1}
    size = (2.4 * len(parts) + 1.4, 3.2)
    words = (PER_GPU, "time of one call in a graph, us")
    figure, axes = charts.panels(list(parts), size, frame, words)
    for axis, part in zip(axes, parts.values(), strict=True):
        wide = part.pivot(index="num_qo_heads", columns="design", values=["us", "bound_us"])
        charts.lines(axis, wide.us.join(wide.bound_us.add_prefix("bound of ")), LOOKS)
        axis.set_ylim(bottom=0)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4 if len(parts) > 1 else 2)
    return figure


def bound_chart(frame: pd.DataFrame, limit: Ceilings) -> charts.Figure:
    """Measured time against the bound, commonest kv_len; hollow where the L2 holds the tokens."""
    table = _commonest(against_bounds(sparse_rows(frame), limit))
    table = table[table.design.isin(BOTH)]
    read = [mla_cost(in_format(r.case, FORMAT_OF[r.design])).kv_bytes for r in table.itertuples()]
    table = table.rename(columns={"num_qo_heads": "heads"})
    table["tokens fit the L2"] = np.array(read) <= frame.l2_mib.max() * 2**20
    title = "Time of a call against its bound; line: measured = bound"
    figure, (axis,) = charts.panels([title], (6.4, 4.6), frame)
    kinds, looks = {"hue": "design", "style": "heads"}, {"palette": COLORS, "markers": HEAD_MARKERS}
    charts.against(axis, table, "bound_us", "us", kinds, hollow="tokens fit the L2", **looks)
    axis.set(xlabel="bound, us", ylabel="measured, us")
    return figure


def overflow_chart(frame: pd.DataFrame) -> charts.Figure:
    """Worst relative error of a record over the tokens of its cache, with the 32-bit limit."""
    rows = mla_records(frame)
    rows = rows[rows.oracle_error.notna()]
    tokens = [pool_tokens(case) / 1e6 for case in rows.case]
    old, new, flashmla = OUTCOMES
    library = np.where(rows.release == OLD, old, new)
    library = np.where(rows.backend.isin((FLASHMLA, FLASHMLA_DENSE)), flashmla, library)
    aside = pd.Series(library).map({old: 1 / ASIDE, new: 1.0, flashmla: ASIDE})
    rows = rows.assign(library=library, millions=tokens * aside.to_numpy())
    words = ("tokens in the cache of a layer, millions", "worst row's relative error")
    figure, (axis,) = charts.panels(["Worst error by size of the cache"], (6.4, 3.6), frame, words)
    charts.dots(axis, rows, "millions", "oracle_error", by="library", looks=OUTCOMES)
    limit = first_lost_token()
    axis.axvline(limit / 1e6, **style.RULE, linestyle="--", label=f"token {limit:,}")
    style.log_axes(axis, "x", "y")
    axis.legend(loc="best", frameon=True)
    return figure


def _commonest(table: pd.DataFrame) -> pd.DataFrame:
    return table[table.kv_len.isin(table.kv_len.mode())]
