"""Rows of the study `engine_modes`: every mode of an engine in one table, and what pairs with what.

As in `rows`, nothing is drawn here, and two rows are divided only within a case, round and timer.
`backend` holds a short name: fa2 and fa3 are FlashInfer's, whichever wrapper a mode goes through,
`library` is FlashAttention-3 itself. `group` is the mode, with paged prefill split by whether the
cache held a prefix. Decode has one query a request and no mask to choose.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ...core.spec import CUSTOM_MASKS
from ...run import frame as frames
from ...run.frame import decode_rows

FA2, FA3, AUTO, LIBRARY = "fa2", "fa3", "auto", "library"
NAMES = {
    "flashinfer-fa2": FA2,
    "flashinfer-fa3": FA3,
    "flashinfer-auto": AUTO,
    "flashinfer-prefill-fa2": FA2,
    "flashinfer-prefill-fa3": FA3,
    "flashinfer-prefill-auto": AUTO,
    "fa3-extend": LIBRARY,
}
DECODE, PREFIX = "decode", "prefill_paged, prefix"
FEW = (DECODE, "target_verify", "draft_extend", "dllm_extend")
"""Groups with few queries a request, which engines capture in CUDA graphs."""
MANY = ("prefill_paged", PREFIX, "prefill_ragged")
"""Groups of prefill, which engines launch eagerly."""
GROUPS = (*FEW, *MANY)
GRAPH, EAGER = "graph", "profiler"
PLANNED = {GRAPH: "for a graph", EAGER: "for eager"}
"""Timer -> how its calls were planned."""
SIZES = ["group", "heads", "page_size", "q_len", "batch_size", "kv_len"]


def mode_rows(frame: pd.DataFrame, timer: str | None = None) -> pd.DataFrame:
    """Attention records that are ok and not throttled, of one timer, or of each mode's usual one.

    The usual one is that of the way an engine calls a mode: in a graph for few queries a request,
    planned for eager in prefill. Columns of the frame, and `group`.
    """
    rows = pd.concat([decode_rows(frame, timer=name) for name in (GRAPH, EAGER)])
    # A frame of decode alone has no such columns, one of all modes has gaps in them.
    known = {"mode": DECODE, "mask": "causal", "q_len": 1}
    rows = rows.reindex(columns=list(dict.fromkeys([*frame.columns, *known])))
    objects = rows.astype(dict.fromkeys(known, object))
    rows = objects.assign(**{name: objects[name].fillna(usual) for name, usual in known.items()})
    named = np.where(rows.q_len < rows.kv_len, PREFIX, rows["mode"])
    rows = rows.assign(
        backend=rows.backend.map(NAMES),
        group=rows["mode"].where(rows["mode"] != "prefill_paged", named),
    ).astype({"q_len": int})
    asked = timer or rows.group.map(usual_timer)
    return rows[rows.timer == asked]


def usual_timer(group: str) -> str:
    """The timer of the way in which an engine calls a group's mode."""
    return EAGER if group in MANY else GRAPH


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the rows of a custom mask, which only fa2 takes."""
    return rows[~rows["mask"].isin(CUSTOM_MASKS)]


def over(rows: pd.DataFrame, numerator: str, denominator: str) -> pd.DataFrame:
    """`frame.over` of each timer: a row a case and timer, in the order of `GROUPS`."""
    parts = list(rows.groupby("timer")) or [(GRAPH, rows)]
    found = [frames.over(part, numerator, denominator).assign(timer=t) for t, part in parts]
    return in_order(pd.concat([part for part in found if len(part)] or found[:1]))


def times(rows: pd.DataFrame, value: str = "run_us") -> pd.DataFrame:
    """`frame.times` of each timer: a row a case and timer, a column a backend, in that order."""
    parts = list(rows.groupby("timer")) or [(GRAPH, rows)]
    return in_order(pd.concat([frames.times(part, value).assign(timer=t) for t, part in parts]))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of `GROUPS`, then of heads, queries, batch and tokens."""
    places = table.group.map(GROUPS.index) if len(table) else table.group
    ordered = table.assign(place=places).sort_values(["place", *SIZES[1:]], kind="stable")
    return ordered.drop(columns="place").reset_index(drop=True)
