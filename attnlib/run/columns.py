"""From the columns of published records to the DataFrame that studies read: a row per record.

The columns are taken as they are in the Parquet file. Only what a table needs is derived from the
raw samples: median times, drift, launches. A `Case` object is made once per distinct key.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..kinds.cases import Case, case_from_dict
from ..kinds.engine.case import EngineCase
from ..measure.spans import Kernel
from .record import THROTTLED

if TYPE_CHECKING:
    import pyarrow as pa

AS_THEY_ARE = (
    "id",
    "study",
    "round",
    "backend",
    "timer",
    "release",
    "status",
    "reason",
    "reported_backend",
    "kernel_family",
    "oracle_error",
    "work_per_call",
    "schema",
    "started_at",
)
CASE_PREFIX = "case."


def frame_of(table: pa.Table) -> pd.DataFrame:
    """A row per record, in the table's order.

    `case` holds the `Case` (None of a ceiling) and its fields stand beside it; `repeat` marks A/A
    items, the same item measured again. `kernels` is a tuple of `Kernel`; `steps_us` has the
    samples of an engine's case. Times are medians in us; `drift` is the last third of the samples
    over the first, less 1.
    """
    table = table.combine_chunks()
    frame = table.select([*AS_THEY_ARE]).to_pandas()
    frame["repeat"] = _numbers(table, "again") > 0
    frame = pd.concat([frame, _case_columns(table)], axis=1)
    run_us = table["run_us"].to_pylist()
    frame["run_us"] = [_median(samples) for samples in run_us]
    frame["plan_us"] = [_median(samples) for samples in table["plan_us"].to_pylist()]
    frame["settle_us"] = _numbers(table, "settle_us")
    frame["peak_bytes"] = _numbers(table, "peak_bytes")
    frame["drift"] = [_drift(samples) for samples in run_us]
    frame["kernels"] = [tuple(Kernel(**k) for k in row) for row in table["kernels"].to_pylist()]
    engine = [isinstance(case, EngineCase) for case in frame.case]
    if any(engine):
        steps = zip(run_us, engine, strict=True)
        frame["steps_us"] = [tuple(samples) if is_engine else None for samples, is_engine in steps]
    before = _numbers(table, "state_before.throttle_reasons").astype(int)
    after = _numbers(table, "state_after.throttle_reasons").astype(int)
    frame["throttled"] = ((before | after) & THROTTLED) > 0
    for name in ("gpu", "gpu_id", "compute_capability"):
        column = f"machine.{name}"
        frame[name] = table[column].to_pandas() if column in table.column_names else ""
    for name in ("power_limit_w", "num_sms"):
        frame[name] = _numbers(table, f"machine.{name}").astype(int)
    frame["l2_mib"] = _numbers(table, "machine.l2_mib")
    return frame


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column as floats; 0 where the table or the row has none."""
    if name not in table.column_names:
        return np.zeros(table.num_rows)
    return table[name].to_pandas().fillna(0).to_numpy(float)


def _case_columns(table: pa.Table) -> pd.DataFrame:
    """`case`, `heads` and the fields of the cases."""
    names = [name for name in table.column_names if name.startswith(CASE_PREFIX)]
    fields = table.select(names).rename_columns([n.removeprefix(CASE_PREFIX) for n in names])
    cases: list[Case | None] = []
    known: dict[tuple[Any, ...], Case] = {}
    for row in fields.to_pylist():
        form = {name: value for name, value in row.items() if value is not None}
        key = tuple(form.items())
        if form and key not in known:
            known[key] = case_from_dict(form)
        cases.append(known.get(key))
    frame = fields.to_pandas()
    frame.insert(0, "case", pd.Series(cases, dtype=object))
    frame.insert(1, "heads", [heads_of(case) for case in cases])
    if "window" in frame:  # layers without one do not say so
        frame["window"] = frame["window"].astype(float).fillna(0).where(frame.heads.notna())
    return frame


def heads_of(case: Case | None) -> str | None:
    """Query and KV heads of a case of attention, such as `32/8`."""
    spec = getattr(getattr(case, "decode", case), "spec", None)
    return spec.heads if spec else None


def _median(samples: Sequence[float]) -> float:
    return median(samples) if samples else nan


def _drift(samples: Sequence[float]) -> float:
    """Median of the last third over that of the first, less 1; 0 with fewer than six values."""
    third = len(samples) // 3
    return median(samples[-third:]) / median(samples[:third]) - 1 if third > 1 else 0.0
