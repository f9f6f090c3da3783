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
from ..core.spec import require_type
from ..measure.calls.cost import Ceilings
from ..measure.calls.form import Item
from ..measure.spans import Kernel
from ..measure.stats import (
    FASTER,
    SLOWER,
    Pair,
    Ratio,
    Saving,
    judge_ratios,
    judge_savings,
)
from . import schema
from .rows import CASE_PREFIX, case_names

if TYPE_CHECKING:
    import pyarrow as pa

CASE = [
    "heads",
    "head_dim",
    "dtype",
    "kv_dtype",
    "page_size",
    "batch_size",
    "kv_len",
    "lengths",
]
SHAPE = ["heads", "page_size", "batch_size", "kv_len"]


COUNTS = tuple(
    column.name.removeprefix(CASE_PREFIX)
    for column in schema.COLUMNS
    if column.name.startswith(CASE_PREFIX) and column.type == schema.COUNT
)
"""Columns of a case that are integers."""
_COLUMNS = (
    "model",
    "driver",
    "builder",
    "heads",
    "num_qo_heads",
    "top_k",
    *CASE,
    "mode",
    "mask",
    "q_lengths",
    "group",
    "num_kv_heads",
    "window",
    "seed",
    "context",
    "max_ctx",
    "seq_len_delta",
    "pool_size",
    "layers",
    "q_len",
    "output_len",
    "tp",
    "dp",
    "swa",
    *COUNTS,
)
COLUMNS = tuple(dict.fromkeys(_COLUMNS))  # each once, where it is named first
"""Columns that say what a case is, in the order in which tables are sorted by them."""
FA2 = "flashinfer-fa2"
FA3 = "flashinfer-fa3"
AUTO = "flashinfer-auto"
GRAPH_AUTO = "flashinfer-graph-auto"
CUDA_CORES = "flashinfer-cuda-cores"
RATIO_COLUMNS = [field.name for field in fields(Ratio)]
SAVING_COLUMNS = [field.name for field in fields(Saving)]
COMPARABLE = ("gpu_id", "power_limit_w", "timer", "schema")
"""Columns that must not differ within one comparison: each moves times, whatever the backend."""
SERVED = "served."
SHOWN = [column for column in schema.COLUMNS if column.in_frame]
PLAIN = [column.name for column in SHOWN if not column.is_member]
MEMBERS = [column for column in SHOWN if column.is_member]
"""Columns of records that a frame has: as they are, and without their group's name."""
CEILINGS = ("copy", "matmul")
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, software and hardware thermal slowdown, power brake: the machine is not well,
and a measurement taken then is left out."""
_LABELLED = [entry for entry in TABLE.values() if entry.label]
LABELS = {entry.name: entry.label for entry in _LABELLED}


def frame_of(table: pa.Table, items: Sequence[Item]) -> pd.DataFrame:
    """A row per record, in the table's order; `items` are those of its rows (`rows.validate`).

    `case` holds the case (None of a ceiling) and its fields stand beside it; `repeat` marks A/A
    items, the same item measured again. `kernels` is a tuple of `Kernel`; `steps_us` has the
    samples of cases that keep them (`NamedCase.keeps_samples`); what records say as `served`
    stands beside it. Times are medians in us, `plan_samples` has all of them; `drift` is the last
    third of the samples over the first, less 1.
    """
    run_us = table["run_us"].to_pylist()
    plan_us = table["plan_us"].to_pylist()
    frame = table.select(PLAIN).to_pandas()
    frame["repeat"] = [item.again > 0 for item in items]
    frame = pd.concat(
        [frame, _case_columns(table, items)],
        axis=1,
    )
    frame["run_us"] = [_median(samples) for samples in run_us]
    frame["plan_us"] = [_median(samples) for samples in plan_us]
    frame["plan_samples"] = plan_us
    frame["settle_us"] = _numbers(table, "settle_us")
    frame["peak_bytes"] = _numbers(table, "peak_bytes")
    frame["drift"] = [_drift(samples) for samples in run_us]
    kernels = table["kernels"].to_pylist()
    frame["kernels"] = [_kernels(row) for row in kernels]
    keeps_samples = []
    for item in items:
        has_case = item.case is not None
        keeps_samples.append(has_case and item.case.keeps_samples)
    if any(keeps_samples):
        steps = pd.Series(
            [tuple(samples) for samples in run_us],
            dtype=object,
        )
        frame["steps_us"] = steps.where(keeps_samples, None)
    for name in table.column_names:
        if name.startswith(SERVED):
            _add(frame, name, table[name].to_pandas())
    before = _numbers(table, "state_before.throttle_reasons").astype(int)
    after = _numbers(table, "state_after.throttle_reasons").astype(int)
    frame["throttled"] = ((before | after) & THROTTLED) > 0
    for column in MEMBERS:
        _add(frame, column.name, _member(table, column))
    return frame


def _add(frame: pd.DataFrame, column: str, values: object) -> None:
    """Append a member without its group's name; ValueError where a frame has that name."""
    _, _, name = column.partition(".")
    if name in frame:
        raise ValueError(f"{column} must have a name of its own: a frame has {name} already")
    frame[name] = values


def _case_columns(table: pa.Table, items: Sequence[Item]) -> pd.DataFrame:
    """`case`, `heads` and the fields of the cases."""
    names = case_names(table)
    fields = [name.removeprefix(CASE_PREFIX) for name in names]
    frame = table.select(names).rename_columns(fields).to_pandas()
    cases = [item.case for item in items]
    heads = {id(case): heads_of(case) for case in cases}
    frame.insert(0, "case", pd.Series(cases, dtype=object))
    frame.insert(
        1,
        "heads",
        [heads[id(case)] for case in cases],
    )
    if "window" in frame:
        window = frame["window"].astype(float)
        window = window.fillna(0)  # layers without one do not say so
        frame["window"] = window.where(frame.heads.notna())
    return frame


def _kernels(row: Sequence[dict[str, Any]]) -> tuple[Kernel, ...]:
    return tuple(Kernel(**kernel) for kernel in row)


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    """A column as floats; 0 where the table or the row has none."""
    if name not in table.column_names:
        return np.zeros(table.num_rows)
    column = table[name].to_pandas()
    return column.fillna(0).to_numpy(float)


def _member(table: pa.Table, column: schema.Column) -> object:
    """A column that a table may lack: empty, or of numbers NaN, where it or the row has none."""
    is_text = column.type == schema.TEXT
    if column.name not in table.column_names:
        return "" if is_text else nan
    values = table[column.name].to_pandas()
    if is_text:
        return values
    is_whole = column.type == schema.COUNT and values.notna().all()
    return values.astype(int if is_whole else float)


def item_of(row: Any) -> Item:
    """The item of a row of a frame (`DataFrame.itertuples`)."""
    return Item(
        backend=row.backend,
        timer=row.timer,
        case=row.case,
        release=row.release,
        again=int(row.repeat),
    )


def heads_of(case: Any) -> str | None:
    """Query and KV heads of a case of attention, such as `32/8`."""
    spec = getattr(getattr(case, "decode", case), "spec", None)
    return spec.heads if spec else None


def _median(samples: Sequence[float]) -> float:
    return median(samples) if samples else nan


def _drift(samples: Sequence[float]) -> float:
    """Median of the last third over that of the first, less 1; 0 with fewer than six values."""
    third = len(samples) // 3
    if third < 2:
        return 0.0
    first = median(samples[:third])
    last = median(samples[-third:])
    return last / first - 1


def require_frame(name: str, value: object) -> None:
    """ValueError unless `value` is a frame, as records are loaded."""
    require_type(name, value, pd.DataFrame, such_as="attnlib.load(study, machine)")


def require_comparable(rows: pd.DataFrame) -> None:
    """ValueError, naming column and values, unless all rows share what `COMPARABLE` names."""
    for name in COMPARABLE:
        seen = rows[name].unique().tolist()
        if len(seen) > 1:
            raise ValueError(
                f"{name} must be the same in all rows of a comparison, "
                f"got {seen[0]!r} and {seen[1]!r}"
            )


def ceilings(frame: pd.DataFrame, needed: Sequence[str] = CEILINGS) -> Ceilings:
    """Rates of this GPU that were measured in the same study, the median over rounds.

    Parameters
    ----------
    frame : pandas.DataFrame
        Records of one study, as `load` gives them.
    needed : sequence of {"copy", "matmul"}, optional
        The ceilings that must be there.

    Returns
    -------
    Ceilings
        `copy_gbps` (read and write) and `matmul_tflops`; NaN where one was not measured.

    Raises
    ------
    ValueError
        If a needed one is not on record, or for records of different GPUs.

    Examples
    --------
    >>> import attnlib
    >>> study = attnlib.STUDIES["fa3_decode_regression"]
    >>> frame = attnlib.load(study.name, study.reference_machine)
    >>> bool(1000 < attnlib.ceilings(frame).copy_gbps < 4800)
    True
    """
    require_frame("frame", frame)
    is_ceiling = frame.backend.isin(CEILINGS)
    measured = frame[is_ceiling & (frame.status == "ok")]
    require_comparable(measured)
    rates = {}
    for name in CEILINGS:
        rows = measured[measured.backend == name]
        if rows.empty and name in needed:
            raise ValueError(f"frame must hold a {name!r} ceiling measured ok, it has none")
        rate = rows.work_per_call / rows.run_us
        rates[name] = float(rate.median())
    return Ceilings(
        copy_gbps=rates["copy"] / 1e3,
        matmul_tflops=rates["matmul"] / 1e6,
    )


def good_rows(frame: pd.DataFrame, timer: str = "graph") -> pd.DataFrame:
    """Records of one timer that are ok, not throttled and no A/A repeats; counts as integers.

    Parameters
    ----------
    frame : pandas.DataFrame
        Records of one study, as `load` gives them.
    timer : str
        How the calls were timed: `graph`, `graph-cold`, `profiler` or another of GLOSSARY.md.

    Returns
    -------
    pandas.DataFrame
        The rows that are left; none is an empty table.

    Raises
    ------
    ValueError
        For what is no DataFrame.
    AttributeError
        For a table without the columns of records.

    Examples
    --------
    >>> import attnlib
    >>> study = attnlib.STUDIES["fa3_decode_regression"]
    >>> frame = attnlib.load(study.name, study.reference_machine)
    >>> rows = attnlib.good_rows(frame)
    >>> sorted(rows.status.unique()), sorted(rows.timer.unique())
    (['ok'], ['graph'])
    """
    require_frame("frame", frame)
    is_ok = (frame.status == "ok") & ~frame.throttled
    is_first = ~frame.repeat  # no A/A item
    rows = frame[is_ok & is_first & (frame.timer == timer)]
    # Cases that lack a count made floats of it in the frame.
    counts = {}
    for name in rows.columns.intersection(COUNTS, sort=False):
        column = rows[name]
        if column.dtype == float and column.notna().all():
            counts[name] = column.astype(int)
    return rows.assign(**counts)


def decode_rows(
    frame: pd.DataFrame,
    *,
    release: str | None = None,
    timer: str = "graph",
) -> pd.DataFrame:
    """The `good_rows` of attention with heads, of one timer and (if named) one release.

    Parameters
    ----------
    frame : pandas.DataFrame
        Records of one study, as `load` gives them.
    release : str, optional
        Of the library under study; by default all.
    timer : str
        How the calls were timed: `graph`, `graph-cold`, `profiler` or another of GLOSSARY.md.

    Returns
    -------
    pandas.DataFrame
        The rows that are left; none is an empty table.

    Raises
    ------
    ValueError
        For what is no DataFrame.
    AttributeError
        For a table without the columns of records.

    Examples
    --------
    >>> import attnlib
    >>> study = attnlib.STUDIES["fa3_decode_regression"]
    >>> frame = attnlib.load(study.name, study.reference_machine)
    >>> rows = attnlib.decode_rows(frame, release="0.6.3")
    >>> sorted(rows.release.unique())
    ['0.6.3']
    """
    require_frame("frame", frame)
    rows = frame[frame.heads.notna()]
    if release is not None:
        rows = rows[rows.release == release]
    return good_rows(rows, timer)


def cases_of(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per case: `case` and its own columns, in the order of `COLUMNS`."""
    first_rows = rows[~rows.case.duplicated()]
    known = []
    for name in COLUMNS:
        if name in first_rows and first_rows[name].notna().all():
            known.append(name)
    table = first_rows[["case", *known]]
    if not known:
        return table
    return table.sort_values(known, kind="stable", ignore_index=True)


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Median `run_us` over rounds: a row per case, a column per backend."""
    require_comparable(rows)
    wide = rows.pivot_table(
        values="run_us",
        index="case",
        columns="backend",
        aggfunc="median",
        sort=False,
    )
    wide = wide.sort_index(axis=1).reset_index()
    return cases_of(rows).merge(wide, on="case")


def over(
    rows: pd.DataFrame,
    a: str,
    b: str,
    *,
    not_slower: float = 0.0,
) -> pd.DataFrame:
    """Time of side `a` over time of side `b` and the verdict on `a`, a row per case.

    A side is a backend, or a backend of one release: `flashinfer-fa2==0.6.3`. Rounds that have both
    sides are paired. The interval is that of the row; verdicts are those of the table (Holm).

    Parameters
    ----------
    rows : pandas.DataFrame
        Records of one timer, as `good_rows` or `decode_rows` give them.
    a, b : str
        The sides.
    not_slower : float
        Asks for non-inferiority with this margin, such as 0.02 for 2 %; 0 asks for none.

    Returns
    -------
    pandas.DataFrame
        Columns: case, the case's, ratio, low, high (95 % interval), rounds, margin, verdict
        (`judge_ratios`).

    Raises
    ------
    ValueError
        For rows that must not be compared (of two GPUs, power limits or timers), and for two
        records of one side in a round.

    Examples
    --------
    >>> import attnlib
    >>> study = attnlib.STUDIES["fa3_decode_regression"]
    >>> frame = attnlib.load(study.name, study.reference_machine)
    >>> rows = attnlib.decode_rows(frame, release="0.6.3")
    >>> table = attnlib.over(rows, "flashinfer-fa3", "flashinfer-fa2")
    >>> bool(table.ratio.median() > 4)
    True
    """
    cases, sides = _paired_by_case(rows, a, b)
    ratios = judge_ratios(sides, not_slower=not_slower)
    judged = pd.DataFrame(ratios, columns=RATIO_COLUMNS)
    return pd.concat([cases, judged], axis=1)


def side_rows(rows: pd.DataFrame, side: str) -> pd.DataFrame:
    """The rows of a side: a backend, or a backend of one release (`backend==release`)."""
    backend, _, release = side.partition("==")
    rows = rows[rows.backend == backend]
    if release:
        rows = rows[rows.release == release]
    return rows


def savings(
    rows: pd.DataFrame,
    base: str,
    new: str,
) -> pd.DataFrame:
    """What side `new` saves of the time of side `base`, a row per case that both have.

    Parameters
    ----------
    rows : pandas.DataFrame
        Records of one timer, as `good_rows` or `decode_rows` give them.
    base, new : str
        The sides: a backend, or a backend of one release, as `over` takes them.

    Returns
    -------
    pandas.DataFrame
        Columns: case, the case's, base_us, new_us (medians), saved, low, high (us, 95 % interval),
        rounds, verdict (`stats.judge_savings`).

    Raises
    ------
    ValueError
        As `over` does.

    Examples
    --------
    >>> import attnlib
    >>> study = attnlib.STUDIES["fa3_decode_regression"]
    >>> frame = attnlib.load(study.name, study.reference_machine)
    >>> rows = attnlib.decode_rows(frame, release="0.6.3")
    >>> table = attnlib.savings(rows, "flashinfer-fa3", "flashinfer-fa2")
    >>> bool((table.new_us < table.base_us).mean() > 0.9)
    True
    """
    cases, sides = _paired_by_case(rows, base, new)
    cases["base_us"] = [float(np.median(before)) for before, _ in sides]
    cases["new_us"] = [float(np.median(after)) for _, after in sides]
    saved = judge_savings(sides)
    judged = pd.DataFrame(saved, columns=SAVING_COLUMNS)
    return pd.concat([cases, judged], axis=1)


def _paired_by_case(
    rows: pd.DataFrame,
    a: str,
    b: str,
) -> tuple[pd.DataFrame, list[Pair]]:
    """The cases that both sides ran, with their columns, and the times of both, round by round."""
    require_frame("rows", rows)
    sides = {
        a: side_rows(rows, a),
        b: side_rows(rows, b),
    }
    require_comparable(pd.concat(sides.values()))
    for side, part in sides.items():
        timed = part[["case", "round", "run_us"]].dropna()
        if timed.duplicated(["case", "round"]).any():
            raise ValueError(f"rows must have one record of {side!r} per case and round, not two")
    paired = round_pairs(sides[a], sides[b])
    paired = paired.sort_values("round")
    by_case = dict(iter(paired.groupby("case", sort=False)))
    cases = cases_of(rows)
    cases = cases[cases.case.isin(paired.case)]
    pairs = []
    for case in cases.case:
        part = by_case[case]
        a_us = part.run_us_a.to_numpy()
        b_us = part.run_us_b.to_numpy()
        pairs.append((a_us, b_us))
    return cases.reset_index(drop=True), pairs


def round_pairs(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """The times of two sides, `run_us_a` and `run_us_b`: a row per case and round of both."""
    columns = ["case", "round", "run_us"]
    return (
        a[columns]
        .dropna()
        .merge(
            b[columns].dropna(),
            on=["case", "round"],
            suffixes=("_a", "_b"),
        )
    )


def aa_check(frame: pd.DataFrame) -> str:
    """One line: how many A/A rows (an item and the same item again) are called faster or slower.

    A row that is, is a false verdict: it says how far the verdicts of this study can be trusted.
    All rows are judged as one table.

    Parameters
    ----------
    frame : pandas.DataFrame
        Records of one study, as `load` gives them.

    Returns
    -------
    str
        The count of false verdicts and of rows, or that there are none.

    Raises
    ------
    ValueError
        For what is no DataFrame.
    AttributeError
        For a table without the columns of records.

    Examples
    --------
    >>> import attnlib
    >>> study = attnlib.STUDIES["fa3_decode_regression"]
    >>> frame = attnlib.load(study.name, study.reference_machine)
    >>> attnlib.aa_check(frame).endswith("A/A rows came out faster or slower")
    True
    """
    require_frame("frame", frame)
    is_ok = (frame.status == "ok") & ~frame.throttled
    good = frame[is_ok & frame.case.notna()]
    item = ["timer", "backend", "release", "case"]
    times_us = good[[*item, "round", "run_us"]]
    paired = times_us[good.repeat].merge(
        times_us[~good.repeat],
        on=[*item, "round"],
        suffixes=("_again", "_first"),
    )
    pairs: list[Pair] = []
    for _, part in paired.groupby(item, sort=False):
        again_us = part.run_us_again.to_numpy()
        first_us = part.run_us_first.to_numpy()
        pairs.append((again_us, first_us))
    judged = judge_ratios(pairs)
    if not judged:
        return "no A/A rows on record"
    count = sum(ratio.verdict in (FASTER, SLOWER) for ratio in judged)
    return f"{count} of {len(judged)} A/A rows came out faster or slower"


def launches(rows: pd.DataFrame, name: str = "") -> pd.Series:
    """Launches per call, by the trace, of kernels and copies whose name contains `name`."""

    def of_row(kernels: tuple[Kernel, ...]) -> float:
        return sum(kernel.launches for kernel in kernels if name in kernel.name)

    return rows.kernels.map(of_row)


def tally(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """Per value of a column: shapes, least, median and most ratio, and the count of each verdict.

    Parameters
    ----------
    table : pandas.DataFrame
        What `over` gives.
    by : str
        The column.

    Returns
    -------
    pandas.DataFrame
        A row per value.

    Raises
    ------
    KeyError
        For a column that the table lacks.

    Examples
    --------
    >>> import attnlib
    >>> study = attnlib.STUDIES["fa3_decode_regression"]
    >>> frame = attnlib.load(study.name, study.reference_machine)
    >>> rows = attnlib.decode_rows(frame, release="0.6.3")
    >>> table = attnlib.over(rows, "flashinfer-fa3", "flashinfer-fa2")
    >>> attnlib.tally(table, "page_size").columns.tolist()[:5]
    ['page_size', 'shapes', 'least', 'median', 'most']
    """
    require_frame("table", table)
    # Not crosstab: some releases of pandas 3 refuse an index with duplicates, as concat leaves it.
    groups = table.groupby(by)
    counts = groups.verdict.value_counts().unstack(fill_value=0)
    ends = groups.ratio.agg(["size", "min", "median", "max"])
    ends.columns = ["shapes", "least", "median", "most"]
    table = pd.concat([ends.round(2), counts], axis=1)
    return table.reset_index()


def release_order(frame: pd.DataFrame) -> list[str]:
    """The releases in a frame, oldest first."""
    releases = filter(None, frame.release.unique())
    return sorted(releases, key=Version)


def intervals(
    table: pd.DataFrame,
    decimals: int = 2,
) -> list[str]:
    """`low to high` of each row in words; `one round` where there is no interval."""
    words = []
    for low, high in zip(table.low, table.high, strict=True):
        ends = f"{low:.{decimals}f} to {high:.{decimals}f}"
        words.append("one round" if np.isnan(low) else ends)
    return words
