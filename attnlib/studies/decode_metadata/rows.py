"""Rows of metadata studies: a design a builder, cases in columns of their own, launches counted.

As in `rows`, nothing is drawn here, and two rows are divided only within a case, round and timer.
`backend` holds the design's name, so that two releases of one library are two designs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

import numpy as np
import pandas as pd

from ...kinds.metadata.case import MetadataCase
from ...run.frame import CASE, decode_rows, medians, ratios

BY = [field.name for field in fields(MetadataCase)]
STEP_BY = [*CASE, "layers"]
SIZES = ["batch_size", "page_size", "max_ctx"]
OPS, SERIAL, FUSED, ALONE = "op by op", "serial", "fused", "fused, no overlap"
MERGED, TODAY = "SGLang 0.5.14", "SGLang 0.5.23"
"""The fused kernels as SGLang merged them, and its newest."""
RIVALS = (SERIAL, MERGED, TODAY)
DESIGNS = {
    "metadata-eager": OPS,
    "metadata-serial": SERIAL,
    "metadata-fused": FUSED,
    "metadata-fused-alone": ALONE,
    "sglang-metadata": "SGLang",
    "fa3-step-eager": OPS,
    "fa3-step-serial": SERIAL,
    "fa3-step-fused": FUSED,
}


def metadata_rows(
    frame: pd.DataFrame, builder: str = "decode", *, timer: str = "graph"
) -> pd.DataFrame:
    """Records of a builder that are ok and not throttled, of one timer; `backend` is the design."""
    named = (frame.builder == builder) & (frame.timer == timer)
    found = _named(frame[named & (frame.status == "ok") & ~frame.throttled])
    whole = ("batch_size", "page_size", "max_ctx", "seq_len_delta", "pool_size", "topk", "seed")
    return found.astype({name: int for name in (*whole, "draft_tokens")} | {"swa": bool})


def step_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Records of whole steps that are ok and not throttled, graph timer; `backend` is the design.

    Of a frame that has no step, none.
    """
    if "layers" not in frame:
        return frame.iloc[:0].reindex(columns=list(dict.fromkeys([*frame.columns, *STEP_BY])))
    return _named(decode_rows(frame[frame.layers.notna()])).astype({"layers": int})


def of_sizes(rows: pd.DataFrame, cases: Iterable[MetadataCase]) -> pd.DataFrame:
    """The rows that measure one of `cases`, in their order."""
    wanted = set(cases)
    measured = [case_of(row) in wanted for _, row in rows.iterrows()]
    return rows.loc[np.array(measured, dtype=bool)]


def case_of(row: pd.Series) -> MetadataCase:
    """The `MetadataCase` of a row with the columns `BY`."""
    return MetadataCase(**{name: row[name] for name in BY})


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Median time (us) over rounds: a row a case with the columns `BY`, a column a design."""
    return medians(rows, by=BY).reset_index().rename_axis(columns=None)


def over(rows: pd.DataFrame, numerator: str, denominator: str) -> pd.DataFrame:
    """Paired ratio of two designs, a row a case: `BY`, ratio, low, high, pairs (rounds)."""
    return ratios(rows, numerator, denominator, by=BY)


def against_best(rows: pd.DataFrame) -> pd.DataFrame:
    """`FUSED` over the rival that comes closest to it or beats it, case by case, named."""
    there = [name for name in (OPS, *RIVALS) if name in set(rows.backend)]
    found = pd.concat([over(rows, FUSED, name).assign(rival=name) for name in there])
    worst = found.sort_values(["ratio", "rival"], ascending=False).drop_duplicates(BY)
    return worst.sort_values(BY).reset_index(drop=True)


def launches(kernels: pd.Series) -> pd.Series:
    """Kernels and memory copies of a call, from the labels of a frame (`name x4, other`)."""
    return kernels.map(lambda label: sum(_count(part) for part in label.split(", ")))


def launches_of(kernels: pd.Series, name: str) -> pd.Series:
    """The same, counting only kernels whose name contains `name`."""
    return kernels.map(lambda label: sum(_count(p) for p in label.split(", ") if name in p))


def _count(label: str) -> float:
    counted = re.search(r" x([\d.]+)$", label)
    return float(counted[1]) if counted else 1.0


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    names = rows.backend.map(DESIGNS) + rows.release.map(lambda r: f" {r}" if r else "")
    return rows.assign(backend=names)
