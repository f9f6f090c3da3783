"""Rows of the study `engine_modes`: every mode of an engine in one table, and what pairs with what.

As in `rows`, nothing is drawn here, and two rows are divided only within a case, round and timer.
`backend` holds a short name: fa2 and fa3 are FlashInfer's, whichever wrapper a mode goes through,
`library` is FlashAttention-3 itself. `group` is the mode, with paged prefill split by whether the
cache held a prefix. Decode has one query a request and no mask to choose.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from ...core.spec import CUSTOM_MASKS
from ...kinds.decode.case import DecodeCase
from ...kinds.extend.case import ExtendCase
from ...run.frame import CASE, decode_rows, ratios
from ...run.frame import case_of as decode_case_of

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
BY = [*CASE, "mode", "mask", "q_len", "group"]
SIZES = ["group", "heads", "page_size", "q_len", "batch_size", "kv_len"]


def mode_rows(frame: pd.DataFrame, timer: str | None = None) -> pd.DataFrame:
    """Attention records that are ok and not throttled, of one timer, or of each mode's usual one.

    The usual one is that of the way an engine calls a mode: in a graph for few queries a request,
    planned for eager in prefill. Columns `BY`, and those of the frame.
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
    """Paired ratio of two backends, a row a case and timer: `BY`, timer, ratio, low, high, pairs.

    In the order of `GROUPS`.
    """
    found = [
        ratios(part, numerator, denominator, by=BY).assign(timer=timer)
        for timer, part in rows.groupby("timer")
    ]
    if not found:
        return pd.DataFrame(columns=[*BY, "ratio", "low", "high", "pairs", "timer"])
    return in_order(pd.concat([part for part in found if len(part)] or found[:1]))


def times(rows: pd.DataFrame, value: str = "run_us") -> pd.DataFrame:
    """Median of `value` (us) over rounds: a row a case and timer, a column a backend."""
    wide = rows.pivot_table(index=[*BY, "timer"], columns="backend", values=value, aggfunc="median")
    return in_order(wide.reset_index().rename_axis(columns=None))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of `GROUPS`, then of heads, queries, batch and tokens."""
    places = table.group.map(GROUPS.index) if len(table) else table.group
    ordered = table.assign(place=places).sort_values(["place", *SIZES[1:]], kind="stable")
    return ordered.drop(columns="place").reset_index(drop=True)


def of_modes(rows: pd.DataFrame, cases: Iterable[DecodeCase | ExtendCase]) -> pd.DataFrame:
    """The rows that measure one of `cases`."""
    wanted = set(cases)
    measured = [case_of(row) in wanted for _, row in rows.iterrows()]
    return rows.loc[np.array(measured, dtype=bool)]


def case_of(row: pd.Series) -> DecodeCase | ExtendCase:
    """The case of a row with the columns `BY`."""
    cached = decode_case_of(row)
    if row["mode"] == DECODE:
        return cached
    return ExtendCase(cached, row["mode"], int(row.q_len), row["mask"])
