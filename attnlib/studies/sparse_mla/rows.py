"""Rows of MLA studies: one design per library and release, whatever the cache's format.

The libraries read different caches that hold the same tokens, one of them quantised. So that both
pair up, `case` is here the one over a bfloat16 cache, of either; `in_format` gives the other.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from ...kinds.mla.case import MlaCase
from ...run.frame import whole_counts
from .study import FLASHINFER_RELEASES

SHAPE = ["num_qo_heads", "top_k", "batch_size", "kv_len"]
OLD, NEW = FLASHINFER_RELEASES
FA2, FA3, OLD_FA2, OLD_FA3 = f"fa2 {NEW}", f"fa3 {NEW}", f"fa2 {OLD}", f"fa3 {OLD}"
FLASHMLA, FLASHMLA_DENSE = "FlashMLA FP8", "FlashMLA bf16"
DESIGNS = {
    "flashinfer-mla-fa2": "fa2",
    "flashinfer-mla-fa3": "fa3",
    "flashmla-sparse-fp8": FLASHMLA,
    "flashmla-dense": FLASHMLA_DENSE,
}


def mla_records(frame: pd.DataFrame) -> pd.DataFrame:
    """MLA records of timer `graph`, whatever their status; `backend` is the design."""
    rows = frame[frame.backend.isin(DESIGNS) & (frame.timer == "graph")]
    names = rows.backend.map(DESIGNS) + rows.release.map(lambda r: f" {r}" if r else "")
    cases = [in_format(case, "bfloat16") for case in rows.case]
    return whole_counts(rows.assign(backend=names, case=cases).drop(columns=["heads", "kv_format"]))


def mla_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The same that are ok and not throttled."""
    rows = mla_records(frame)
    return rows[(rows.status == "ok") & ~rows.throttled]


def sparse_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """`mla_rows` over chosen tokens."""
    rows = mla_rows(frame)
    return rows[rows.top_k > 0]


def in_format(case: MlaCase, kv_format: str) -> MlaCase:
    """`case` over a cache of `kv_format`: the same tokens."""
    return replace(case, spec=replace(case.spec, kv_format=kv_format))
