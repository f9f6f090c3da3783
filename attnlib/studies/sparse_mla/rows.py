"""Rows of MLA studies: a design a library and release, shapes without the cache's format.

As in `rows`, nothing is drawn here. The libraries read different caches, so a shape (`BY`) leaves
`kv_format` out: both formats of a shape hold the same tokens, one of them quantised.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from ...core.spec import MlaSpec
from ...kinds.mla.case import MlaCase
from ...measure.stats import judge
from ...run.frame import medians, paired_times, ratios
from .study import FLASHINFER_RELEASES

SHAPE = ["num_qo_heads", "top_k", "batch_size", "kv_len"]
REST = ["page_size", "seed"]
BY = [*SHAPE, *REST, "lengths"]
OLD, NEW = FLASHINFER_RELEASES
FA2, FA3, OLD_FA2, OLD_FA3 = f"fa2 {NEW}", f"fa3 {NEW}", f"fa2 {OLD}", f"fa3 {OLD}"
FLASHMLA, FLASHMLA_DENSE = "FlashMLA FP8", "FlashMLA bf16"
DESIGNS = {
    "flashinfer-mla-fa2": "fa2",
    "flashinfer-mla-fa3": "fa3",
    "flashmla-sparse-fp8": FLASHMLA,
    "flashmla-dense": FLASHMLA_DENSE,
}
FLOOR = 0.0
"""An A/A floor is one machine's, and this one has none: `stats.MIN_EFFECT` holds."""


def mla_records(frame: pd.DataFrame) -> pd.DataFrame:
    """MLA records of timer `graph`, whatever their status; `backend` is the design."""
    rows = frame[frame.backend.isin(DESIGNS) & (frame.timer == "graph")]
    names = rows.backend.map(DESIGNS) + rows.release.map(lambda r: f" {r}" if r else "")
    return rows.assign(backend=names).astype({name: int for name in (*SHAPE, *REST)})


def mla_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The same that are ok and not throttled."""
    rows = mla_records(frame)
    return rows[(rows.status == "ok") & ~rows.throttled]


def sparse_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """`mla_rows` over chosen tokens."""
    rows = mla_rows(frame)
    return rows[rows.top_k > 0]


def of_shapes(rows: pd.DataFrame, shapes: Iterable[tuple[int, ...]]) -> pd.DataFrame:
    """The rows whose `SHAPE` is one of `shapes`, in their order."""
    wanted = set(shapes)
    kept = [tuple(shape) in wanted for shape in rows[SHAPE].to_numpy().tolist()]
    return rows.loc[np.array(kept, dtype=bool)]


def case_of(row: pd.Series, kv_format: str) -> MlaCase:
    """The `MlaCase` of a row with the columns `BY`, over a cache of `kv_format`."""
    heads, top_k, batch, kv_len, page_size, seed = (int(row[name]) for name in (*SHAPE, *REST))
    return MlaCase(MlaSpec(heads, top_k, page_size, kv_format), batch, kv_len, row.lengths, seed)


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Median time (us) over rounds: a row a shape with the columns `BY`, a column a design."""
    return medians(rows, by=BY).reset_index().rename_axis(columns=None)


def over(rows: pd.DataFrame, numerator: str, denominator: str) -> pd.DataFrame:
    """Paired ratio of two designs, a row a shape: `BY`, ratio, low, high, pairs (rounds)."""
    return ratios(rows, numerator, denominator, by=BY)


def judged(rows: pd.DataFrame, numerator: str, denominator: str) -> pd.DataFrame:
    """`over` with the verdict on `numerator` in the column `verdict`."""
    words = [
        judge(above, below, noise=FLOOR).word
        for _, above, below in paired_times(rows, numerator, denominator, by=BY)
    ]
    return over(rows, numerator, denominator).assign(verdict=words)
