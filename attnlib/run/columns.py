"""From the columns of published records to the DataFrame that studies read: a row per record.

The columns are taken as they are in the Parquet file. Only what a table needs is derived from the
raw samples: median times, drift, launches. A `Case` object is made once per distinct key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..kinds.cases import Case, case_from_dict
from ..kinds.decode.case import DecodeCase
from ..kinds.engine.case import EngineCase
from ..kinds.extend.case import ExtendCase
from ..kinds.mla.case import MlaCase
from ..kinds.plan.case import PlanCase
from ..kinds.step.case import StepCase
from ..measure.spans import Kernel
from .record import THROTTLED, present_name

if TYPE_CHECKING:
    import pyarrow as pa

AS_THEY_ARE = (
    "id",
    "study",
    "round",
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
    frame.insert(3, "backend", table["backend"].to_pandas().map(present_name))
    frame["repeat"] = _numbers(table, "again") > 0
    frame = pd.concat([frame, _case_columns(table)], axis=1)
    samples = _samples(table, "run_us")
    frame["run_us"] = _medians(samples, len(frame))
    frame["plan_us"] = _medians(_samples(table, "plan_us"), len(frame))
    frame["settle_us"] = _numbers(table, "settle_us")
    frame["samples"] = np.bincount(samples.row, minlength=len(frame))
    frame["drift"] = _drifts(samples, len(frame))
    frame["kernels"] = [tuple(Kernel(**k) for k in row) for row in table["kernels"].to_pylist()]
    frame["kernel_us"] = [round(sum(k.gpu_us for k in kernels), 3) for kernels in frame.kernels]
    engine = [isinstance(case, EngineCase) for case in frame.case]
    if any(engine):
        samples = zip(table["run_us"].to_pylist(), engine, strict=True)
        frame["steps_us"] = [tuple(steps) if is_engine else None for steps, is_engine in samples]
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
    if not names:  # ceilings alone
        nothing = np.full(table.num_rows, None, object)
        return pd.DataFrame({"case": nothing, "heads": nothing})
    fields = table.select(names).rename_columns([n.removeprefix(CASE_PREFIX) for n in names])
    frame = fields.to_pandas()
    keys = frame.groupby(list(frame), dropna=False, sort=False).ngroup()
    first_row, number_of = np.unique(keys, return_index=True, return_inverse=True)[1:]
    forms = [_without_nulls(form) for form in fields.take(first_row).to_pylist()]
    cases = [case_from_dict(form) if form else None for form in forms]
    described = {"case": cases, "heads": [heads_of(case) for case in cases]}
    by_row = {name: pd.Series(v, dtype=object)[number_of] for name, v in described.items()}
    frame = pd.concat([pd.DataFrame({n: v.to_numpy() for n, v in by_row.items()}), frame], axis=1)
    for name in {"window", "sinks"} & {*frame}:  # layers without them do not say so
        frame[name] = frame[name].astype(float).fillna(0).where(frame.heads.notna())
    return frame


def _without_nulls(form: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in form.items() if value is not None}


def heads_of(case: Case | None) -> str | None:
    """Query and KV heads of a case of attention, such as `32/8`."""
    call = case.decode if isinstance(case, StepCase | PlanCase) else case
    return call.spec.heads if isinstance(call, DecodeCase | MlaCase | ExtendCase) else None


def _samples(table: pa.Table, name: str) -> pd.DataFrame:
    """The numbers in a column of lists: a row each with `row`, `place` in its list, and `value`."""
    array = table[name].chunk(0)
    lengths = np.diff(array.offsets.to_numpy())
    rows = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(rows)) - np.repeat(lengths.cumsum() - lengths, lengths)
    frame = pd.DataFrame({"row": rows, "place": place, "value": array.flatten().to_numpy()})
    return frame.assign(length=lengths[rows])


def _medians(samples: pd.DataFrame, count: int) -> pd.Series:
    """The median of each of `count` rows; NaN for one without samples."""
    return samples.groupby("row").value.median().reindex(range(count))


def _drifts(samples: pd.DataFrame, count: int) -> pd.Series:
    """Median of the last third over that of the first, less 1; 0 with fewer than six values."""
    samples = samples[samples.length >= 6]
    third = samples.length // 3
    first = samples[samples.place < third]
    last = samples[samples.place >= samples.length - third]
    return (_medians(last, count) / _medians(first, count) - 1).fillna(0.0)
