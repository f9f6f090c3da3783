"""The figures of sparse MLA decode. Each draws one table of `mla` or `mla_rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...draw import style
from ...kinds.cost import Ceilings, mla_cost
from .model import first_lost_token, pool_tokens
from ...run.frame import over
from .rows import FA3, FLASHMLA, FLASHMLA_DENSE, NEW, OLD, in_format, mla_records, sparse_rows
from .tables import BOTH, FORMAT_OF, against_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOK = {FA3: ("#0072B2", "o"), FLASHMLA: ("#D55E00", "s")}
HEAD_MARKERS = {16: "o", 32: "s", 64: "D", 128: "^"}
PANELS = ((2048, 256), (2048, 64), (512, 64), (2048, 1))
"""(top_k, batch) of the panels over heads: outside the L2 first."""
OUTCOMES = {
    f"FlashInfer {OLD}": ("#D55E00", "x"),
    f"FlashInfer {NEW}": ("#0072B2", "o"),
    "FlashMLA": ("#009E73", "s"),
}


def ratio_heatmap(frame: pd.DataFrame) -> Figure:
    """fa3 over FlashMLA at the commonest kv_len: a panel a top-k; below 1 FlashInfer is faster."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    style.apply()
    table = over(sparse_rows(frame), FA3, FLASHMLA)
    table = table[table.kv_len.isin(table.kv_len.mode())]
    panels = list(table.groupby("top_k")) or [("none", table)]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 2.9), squeeze=False, layout="constrained"
    )
    for axis, (top_k, rows) in zip(axes[0], panels, strict=True):
        wide = rows.pivot_table(index="num_qo_heads", columns="batch_size", values="ratio")
        if rows.empty:
            axis.set_visible(False)
            continue
        # The sign of the logarithm is the colour: white where both take the same time.
        sns.heatmap(
            np.log2(wide.sort_index(ascending=False)),
            ax=axis,
            vmin=-1.3,
            vmax=1.3,
            cmap="PuOr",
            annot=wide.sort_index(ascending=False),
            fmt=".2f",
            cbar=False,
            linewidths=0.5,
        )
        axis.set(xlabel="batch", ylabel="", title=f"top-k {top_k}")
        axis.tick_params(axis="y", rotation=0)
    axes[0][0].set_ylabel("query heads a GPU")
    figure.suptitle(
        "time of FlashInfer fa3 (bf16) / FlashMLA (FP8)", fontsize=10, x=0.01, ha="left"
    )
    style.add_footer(figure, frame)
    return figure


def heads_chart(frame: pd.DataFrame, limit: Ceilings) -> Figure:
    """Time over heads a GPU of both kernels, with the bound of each cache dashed."""
    import matplotlib.pyplot as plt

    style.apply()
    table = against_bounds(sparse_rows(frame), limit)
    table = table[table.kv_len.isin(table.kv_len.mode())]
    panels = [
        (key, table[(table.top_k == key[0]) & (table.batch_size == key[1])]) for key in PANELS
    ]
    panels = [(key, rows) for key, rows in panels if rows.num_qo_heads.nunique() > 1]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(2.4 * len(panels) + 1.4, 3.2), squeeze=False, layout="constrained"
    )
    for axis, ((top_k, batch), rows) in zip(axes[0], panels, strict=True):
        _draw_heads(axis, rows)
        axis.set_title(f"top-k {top_k}, batch {batch}")
    axes[0][0].set_ylabel("time of one call in a graph, us")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4 if len(panels) > 1 else 2)
    style.add_footer(figure, frame)
    return figure


def bound_chart(frame: pd.DataFrame, limit: Ceilings) -> Figure:
    """Measured time over the bound , commonest kv_len; hollow where the L2 holds the tokens."""
    import matplotlib.pyplot as plt

    style.apply()
    table = against_bounds(sparse_rows(frame), limit)
    table = table[table.design.isin(BOTH) & table.kv_len.isin(table.kv_len.mode())]
    l2_bytes = frame.l2_mib.max() * 2**20
    read = [mla_cost(in_format(r.case, FORMAT_OF[r.design])).kv_bytes for r in table.itertuples()]
    table = table.assign(in_l2=np.array(read) <= l2_bytes)
    figure, axis = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    for (name, heads, in_l2), rows in table.groupby(["design", "num_qo_heads", "in_l2"]):
        color, face = LOOK[name][0], "none" if in_l2 else LOOK[name][0]
        look = {"edgecolors": color, "facecolors": face, "marker": HEAD_MARKERS.get(heads, "o")}
        axis.scatter(rows.bound_us, rows.us, s=30, **look)
    ends = [table.bound_us.min() / 1.5, table.bound_us.max() * 1.5]
    axis.plot(ends, ends, color="0.4", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="bound, us", ylabel="measured, us")
    style.plain_ticks(axis, "x", "y")
    axis.set_title("Time of a call over the longer of its bounds")
    _explain(axis, sorted(table.num_qo_heads.unique()))
    style.add_footer(figure, frame)
    return figure


def overflow_chart(frame: pd.DataFrame) -> Figure:
    """Worst relative error of a record over the tokens of its cache, with the 32-bit limit."""
    import matplotlib.pyplot as plt

    style.apply()
    rows = mla_records(frame)
    rows = rows[rows.oracle_error.notna()]
    tokens = [pool_tokens(case) for case in rows.case]
    old = rows.release == OLD
    names = list(OUTCOMES)
    flashmla = rows.backend.isin((FLASHMLA, FLASHMLA_DENSE))
    library = np.where(flashmla, names[2], np.where(old, names[0], names[1]))
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for place, (name, (color, marker)) in enumerate(OUTCOMES.items()):
        mine = library == name
        # Side by side: most of them would lie on one another.
        x = np.array(tokens)[mine] / 1e6 * 1.08 ** (place - 1)
        axis.scatter(x, rows.oracle_error[mine], s=22, color=color, marker=marker, label=name)
    limit = first_lost_token()
    axis.axvline(limit / 1e6, color="0.35", linestyle="--", linewidth=1, label=f"token {limit:,}")
    axis.set(xscale="log", yscale="log", xlabel="tokens in the cache of a layer, millions")
    axis.set_ylabel("worst row's relative error")
    style.plain_ticks(axis, "x", "y")
    axis.legend(loc="best", frameon=True)
    axis.set_title("Worst error by size of the cache")
    style.add_footer(figure, frame)
    return figure


def _draw_heads(axis: Axes, rows: pd.DataFrame) -> None:
    for name, (color, marker) in LOOK.items():
        own = rows[rows.design == name].sort_values("num_qo_heads")
        axis.plot(own.num_qo_heads, own.us, color=color, marker=marker, label=name)
        bound = f"bound of {name}"
        axis.plot(own.num_qo_heads, own.bound_us, color=color, linestyle="--", lw=1, label=bound)
    heads = sorted(rows.num_qo_heads.unique())
    axis.set(xscale="log", ylim=(0, None), xlabel="query heads a GPU")
    axis.set_xticks(heads, [str(count) for count in heads])
    axis.minorticks_off()


def _explain(axis: Axes, heads: list[int]) -> None:
    """A legend of colours, markers and filling, one entry each."""
    from matplotlib.lines import Line2D

    dot = {"linestyle": "", "markersize": 6}
    entries = [
        *(Line2D([], [], color=LOOK[n][0], marker="o", label=n, **dot) for n in BOTH),
        *(
            Line2D([], [], color="0.4", marker=HEAD_MARKERS.get(n, "o"), label=f"{n} heads", **dot)
            for n in heads
        ),
        Line2D([], [], color="0.4", marker="o", fillstyle="none", label="tokens fit the L2", **dot),
    ]
    axis.legend(handles=entries, loc="lower right", fontsize=7)
