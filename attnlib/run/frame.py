"""Records as a frame, and the rows, times and ratios that tables and figures share.

A frame has one row per record (`frame_of`). Ratios pair two backends round by round, within one
case, release and timer, and refuse rows of different GPUs, power limits, timers or schemas. A table
per case has the column `case` and the case's own columns, in the order of `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import nan
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from packaging.version import Version

from ..core.backends.table import TABLE
from ..kinds.cases import KINDS
from ..kinds.cost import Ceilings
from ..kinds.form import flat_fields
from ..kinds.item import Item
from ..measure.spans import Kernel
from ..measure.stats import FASTER, SLOWER, Pair, Ratio, Saving, judge_ratios, judge_savings
from .rows import CASE_PREFIX, case_names

if TYPE_CHECKING:
    import pyarrow as pa

CASE = ["heads", "head_dim", "dtype", "kv_dtype", "page_size", "batch_size", "kv_len", "lengths"]
SHAPE = ["heads", "page_size", "batch_size", "kv_len"]
FIELDS = [field for case in KINDS.values() for field in flat_fields(case)]
COUNTS = tuple(dict.fromkeys(field.name for field in FIELDS if field.type is int))
"""Columns of a case that are integers."""
_FIRST = ("model", "driver", "builder", "heads", "num_qo_heads", "top_k", *CASE)
COLUMNS = tuple(dict.fromkeys((*_FIRST, "mode", "mask", "q_lengths", "group", *COUNTS, "swa")))
"""Columns that say what a case is, in the order in which tables are sorted by them."""
FA2, FA3, AUTO = "flashinfer-fa2", "flashinfer-fa3", "flashinfer-auto"
GRAPH_AUTO, CUDA_CORES = "flashinfer-graph-auto", "flashinfer-cuda-cores"
RATIO_COLUMNS = [field.name for field in fields(Ratio)]
SAVING_COLUMNS = [field.name for field in fields(Saving)]
COMPARABLE = ("gpu_id", "power_limit_w", "timer", "schema")
"""Columns that must not differ within one comparison: each moves times, whatever the backend."""
AS_THEY_ARE = [
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
    "command",
]
"""Columns of records that a frame has as they are."""
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, software and hardware thermal slowdown, power brake: the machine is not well,
and a measurement taken then is left out."""
LABELS = {entry.name: entry.label for entry in TABLE.values() if entry.label}


def frame_of(table: pa.Table, items: Sequence[Item]) -> pd.DataFrame:
    """A row per record, in the table's order; `items` are those of its rows (`rows.validate`).

    `case` holds the `Case` (None of a ceiling) and its fields stand beside it; `repeat` marks A/A
    items, the same item measured again. `kernels` is a tuple of `Kernel`; `steps_us` has the
    samples of an engine's case. Times are medians in us, `plan_samples` has all of them; `drift`
    is the last third of the samples over the first, less 1.
    """
    run_us = table["run_us"].to_pylist()
    plan_us = table["plan_us"].to_pylist()
    frame = table.select(AS_THEY_ARE).to_pandas()
    frame["repeat"] = [item.again > 0 for item in items]
    frame = pd.concat([frame, _case_columns(table, items)], axis=1)
    frame["run_us"] = [_median(samples) for samples in run_us]
    frame["plan_us"] = [_median(samples) for samples in plan_us]
    frame["plan_samples"] = plan_us
    frame["settle_us"] = _numbers(table, "settle_us")
    frame["peak_bytes"] = _numbers(table, "peak_bytes")
    frame["drift"] = [_drift(samples) for samples in run_us]
    frame["kernels"] = [tuple(Kernel(**k) for k in row) for row in table["kernels"].to_pylist()]
    is_engine = [item.case is not None and item.case.kind == "engine" for item in items]
    if any(is_engine):
        steps = pd.Series([tuple(samples) for samples in run_us], dtype=object)
        frame["steps_us"] = steps.where(is_engine, None)
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


def _case_columns(table: pa.Table, items: Sequence[Item]) -> pd.DataFrame:
    """`case`, `heads` and the fields of the cases."""
    names = case_names(table)
    fields = table.select(names).rename_columns([name.removeprefix(CASE_PREFIX) for name in names])
    frame = fields.to_pandas()
    cases = [item.case for item in items]
    heads = {id(case): heads_of(case) for case in cases}
    frame.insert(0, "case", pd.Series(cases, dtype=object))
    frame.insert(1, "heads", [heads[id(case)] for case in cases])
    if "window" in frame:  # layers without one do not say so
        frame["window"] = frame["window"].astype(float).fillna(0).where(frame.heads.notna())
    return frame


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    """A column as floats; 0 where the table or the row has none."""
    if name not in table.column_names:
        return np.zeros(table.num_rows)
    return table[name].to_pandas().fillna(0).to_numpy(float)


def item_of(row: Any) -> Item:
    """The item of a row of a frame (`DataFrame.itertuples`)."""
    return Item(row.backend, row.timer, row.case, row.release, again=int(row.repeat))


def heads_of(case: Any) -> str | None:
    """Query and KV heads of a case of attention, such as `32/8`."""
    spec = getattr(getattr(case, "decode", case), "spec", None)
    return spec.heads if spec else None


def _median(samples: Sequence[float]) -> float:
    return median(samples) if samples else nan


def _drift(samples: Sequence[float]) -> float:
    """Median of the last third over that of the first, less 1; 0 with fewer than six values."""
    third = len(samples) // 3
    return median(samples[-third:]) / median(samples[:third]) - 1 if third > 1 else 0.0


def require_comparable(rows: pd.DataFrame) -> None:
    """ValueError, naming column and values, unless all rows share what `COMPARABLE` names."""
    for name in COMPARABLE:
        seen = rows[name].unique().tolist()
        if len(seen) > 1:
            raise ValueError(
                f"{name} must be the same in all rows of a comparison, "
                f"got {seen[0]!r} and {seen[1]!r}"
            )


def ceilings(frame: pd.DataFrame, needed: Sequence[str] = ("copy", "matmul")) -> Ceilings:
    """Rates measured in the same study: median over rounds. ValueError if a needed one lacks."""
    names = ("copy", "matmul")
    measured = frame[frame.backend.isin(names) & (frame.status == "ok")]
    require_comparable(measured)
    rates = {}
    for name in names:
        rows = measured[measured.backend == name]
        if rows.empty and name in needed:
            raise ValueError(f"frame must hold a {name!r} ceiling measured ok, it has none")
        rates[name] = float((rows.work_per_call / rows.run_us).median())
    return Ceilings(copy_gbps=rates["copy"] / 1e3, matmul_tflops=rates["matmul"] / 1e6)


def good_rows(frame: pd.DataFrame, timer: str = "graph") -> pd.DataFrame:
    """Records of one timer that are ok, not throttled and no A/A repeats; counts as integers."""
    good = (frame.timer == timer) & (frame.status == "ok") & ~frame.throttled & ~frame.repeat
    rows = frame[good]
    # Cases that lack a count made floats of it in the frame.
    floats = [rows[name] for name in COUNTS if name in rows and rows[name].dtype == float]
    counts = {column.name: column.astype(int) for column in floats if column.notna().all()}
    return rows.assign(**counts)


def decode_rows(
    frame: pd.DataFrame, *, release: str | None = None, timer: str = "graph"
) -> pd.DataFrame:
    """`good_rows` of attention with heads, of one timer and (if named) one release."""
    rows = frame[frame.heads.notna()]
    return good_rows(rows if release is None else rows[rows.release == release], timer)


def cases_of(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per case: `case` and its own columns, in the order of `COLUMNS`."""
    first_rows = rows[["case", *rows.columns.intersection(COLUMNS)]][~rows.case.duplicated()]
    known = [name for name in COLUMNS if name in first_rows and first_rows[name].notna().all()]
    first_rows = first_rows[["case", *known]]
    return first_rows.sort_values(known, kind="stable", ignore_index=True) if known else first_rows


def times(rows: pd.DataFrame, value: str = "run_us") -> pd.DataFrame:
    """Median of `value` over rounds: a row per case, a column per backend."""
    require_comparable(rows)
    wide = rows.pivot_table(value, "case", "backend", "median", sort=False)
    return cases_of(rows).merge(wide.sort_index(axis=1).reset_index(), on="case")


def over(rows: pd.DataFrame, a: str, b: str, *, not_slower: float = 0.0) -> pd.DataFrame:
    """Time of side `a` over time of side `b` and the verdict on `a`, a row per case.

    A side is a backend, or a backend of one release: `flashinfer-fa2==0.6.3`. Rounds that have both
    sides are paired. Columns: case, the case's, ratio, low, high, rounds, margin, verdict
    (`stats.judge_ratios`). `low` and `high` are the 95 % interval of the row; verdicts are those of
    the table (Holm). Raises ValueError for rows that must not be compared (`require_comparable`),
    and for two records of one round.
    """
    cases, sides = _paired_by_case(rows, a, b)
    judged = judge_ratios(sides, not_slower=not_slower)
    return pd.concat([cases, pd.DataFrame(judged, columns=RATIO_COLUMNS)], axis=1)


def side_rows(rows: pd.DataFrame, side: str) -> pd.DataFrame:
    """The rows of a side: a backend, or a backend of one release (`backend==release`)."""
    backend, _, release = side.partition("==")
    rows = rows[rows.backend == backend]
    return rows[rows.release == release] if release else rows


def savings(rows: pd.DataFrame, base: str, new: str) -> pd.DataFrame:
    """What side `new` saves of the time of side `base`, a row per case that both have.

    Columns: case, the case's, base_us, new_us (medians), saved, low, high (us), rounds, verdict
    (`stats.judge_savings`). Sides and errors are those of `over`.
    """
    cases, sides = _paired_by_case(rows, base, new)
    base_us = [float(np.median(before)) for before, _ in sides]
    new_us = [float(np.median(after)) for _, after in sides]
    judged = pd.DataFrame(judge_savings(sides), columns=SAVING_COLUMNS)
    return pd.concat([cases.assign(base_us=base_us, new_us=new_us), judged], axis=1)


def _paired_by_case(rows: pd.DataFrame, a: str, b: str) -> tuple[pd.DataFrame, list[Pair]]:
    """The cases that both sides ran, with their columns, and the times of both, round by round."""
    sides = [side_rows(rows, side) for side in (a, b)]
    require_comparable(pd.concat(sides))
    times_us = []
    for side, part in zip((a, b), sides, strict=True):
        times_us.append(part[["case", "round", "run_us"]].dropna())
        if times_us[-1].duplicated(["case", "round"]).any():
            raise ValueError(f"rows must have one record of {side!r} per case and round, not two")
    paired = times_us[0].merge(times_us[1], on=["case", "round"], suffixes=("_a", "_b"))
    cases = cases_of(rows)
    cases = cases[cases.case.isin(paired.case)].reset_index(drop=True)
    by_case = dict(iter(paired.sort_values("round").groupby("case", sort=False)))
    parts = [by_case[case] for case in cases.case]
    return cases, [(part.run_us_a.to_numpy(), part.run_us_b.to_numpy()) for part in parts]


def aa_check(frame: pd.DataFrame) -> str:
    """One line: how many A/A rows (an item and the same item again) are called faster or slower.

    A row that is, is a false verdict: it says how far the verdicts of this study can be trusted.
    All rows are judged as one table.
    """
    good = frame[(frame.status == "ok") & ~frame.throttled & frame.case.notna()]
    item = ["timer", "backend", "release", "case"]
    columns = [*item, "round", "run_us"]
    pairs = good.loc[good.repeat, columns].merge(good.loc[~good.repeat, columns], on=columns[:-1])
    groups = [part for _, part in pairs.groupby(item, sort=False)]
    judged = judge_ratios([(part.run_us_x.to_numpy(), part.run_us_y) for part in groups])
    if not judged:
        return "no A/A rows on record"
    count = sum(ratio.verdict in (FASTER, SLOWER) for ratio in judged)
    return f"{count} of {len(judged)} A/A rows came out faster or slower"


def launches(rows: pd.DataFrame, name: str = "") -> pd.Series:
    """Launches per call, by the trace, of kernels and copies whose name contains `name`."""
    return rows.kernels.map(lambda kernels: sum(k.launches for k in kernels if name in k.name))


def tally(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """Per value of `by`: shapes, least, median and most ratio, and the count of each verdict."""
    # Not crosstab: some releases of pandas 3 refuse an index with duplicates, as concat leaves it.
    counts = table.groupby(by).verdict.value_counts().unstack(fill_value=0)
    ends = table.ratio.groupby(table[by]).agg(["size", "min", "median", "max"]).round(2)
    ends = ends.set_axis(["shapes", "least", "median", "most"], axis=1)
    return pd.concat([ends, counts], axis=1).reset_index()


def release_order(frame: pd.DataFrame) -> list[str]:
    """The releases in a frame, oldest first."""
    return sorted((r for r in frame.release.unique() if r), key=Version)


def intervals(table: pd.DataFrame, decimals: int = 2) -> list[str]:
    """`low to high` of each row in words; `one round` where there is no interval."""
    bounds = zip(table.low, table.high, strict=True)
    return [
        "one round" if np.isnan(low) else f"{low:.{decimals}f} to {high:.{decimals}f}"
        for low, high in bounds
    ]
