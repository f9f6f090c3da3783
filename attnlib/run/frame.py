"""From a study's frame to the rows and ratios that tables and figures share.

A frame is what `study.load_or_measure` gives, one row a record. Ratios pair two backends round by
round, within one case, release and timer; nothing else is ever divided. All of them refuse rows of
different GPUs, power limits, timers or schemas (`store.require_comparable`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..core.spec import AttnSpec
from ..kinds.cost import Ceilings
from ..kinds.decode.case import DecodeCase
from ..kinds.item import Item
from ..measure.stats import paired_ratio
from .store import require_comparable

if TYPE_CHECKING:
    from .study import Study

CASE = ["heads", "head_dim", "dtype", "kv_dtype", "page_size", "batch_size", "kv_len", "lengths"]
SHAPE = ["heads", "page_size", "batch_size", "kv_len"]
FA2, FA3, AUTO = "flashinfer-fa2", "flashinfer-fa3", "flashinfer-auto"
GRAPH_AUTO, CUDA_CORES = "flashinfer-graph-auto", "flashinfer-cuda-cores"
LABELS = {FA2: "fa2", FA3: "fa3", AUTO: "auto", CUDA_CORES: "CUDA cores"}


def ceilings(frame: pd.DataFrame, needed: Sequence[str] = ("copy", "matmul")) -> Ceilings:
    """Rates measured in the same study: median over rounds. ValueError if a needed one lacks."""
    names = ("copy", "matmul", "read", "launch", "gather")
    found = frame[frame.backend.isin(names) & (frame.status == "ok")]
    require_comparable(found)
    rates = {}
    for name in names:
        rows = found[found.backend == name]
        if rows.empty and name in needed:
            raise ValueError(f"frame must hold a {name!r} ceiling measured ok, it has none")
        rates[name] = float((rows.work_per_call / rows.run_us).median())
    return Ceilings(
        copy_gbps=rates["copy"] / 1e3,
        matmul_tflops=rates["matmul"] / 1e6,
        num_sms=int(frame.num_sms.max()),
        read_gbps=rates["read"] / 1e3,
        launch_us=1 / rates["launch"],
        gather_per_us=rates["gather"],
    )


def decode_rows(
    frame: pd.DataFrame, *, release: str | None = None, timer: str = "graph"
) -> pd.DataFrame:
    """Decode records that are ok and not throttled, of one timer and (if named) one release."""
    rows = frame[frame.heads.notna() & (frame.status == "ok") & (frame.timer == timer)]
    rows = rows[~rows.throttled]
    if release is not None:
        rows = rows[rows.release == release]
    counts = ["num_qo_heads", "num_kv_heads", "head_dim", "page_size", "batch_size", "kv_len"]
    return rows.astype({name: int for name in (*counts, "seed")})


def of_cases(frame: pd.DataFrame, cases: Iterable[DecodeCase]) -> pd.DataFrame:
    """The rows of `frame` that measure one of `cases`, in the frame's order."""
    wanted = set(cases)
    decode = frame[frame.heads.notna()]
    measured = [case_of(row) in wanted for _, row in decode.iterrows()]
    return decode.loc[np.array(measured, dtype=bool)]


def of_study(frame: pd.DataFrame, study: Study) -> pd.DataFrame:
    """The decode rows that `study` asks for: of a frame that another study lends, its own part."""
    wanted = {item for grid in study.grids for item in grid.items()}
    decode = frame[frame.heads.notna()]
    asked = [
        Item(row.backend, row.timer, case_of(row), row.release) in wanted
        for _, row in decode.iterrows()
    ]
    return decode.loc[np.array(asked, dtype=bool)]


def medians(rows: pd.DataFrame, value: str = "run_us", *, by: Sequence[str] = CASE) -> pd.DataFrame:
    """Median of `value` over rounds: one row a case (columns `by`), one column a backend."""
    require_comparable(rows)
    return rows.pivot_table(index=list(by), columns="backend", values=value, aggfunc="median")


def ratios(
    rows: pd.DataFrame, numerator: str, denominator: str, *, by: Sequence[str] = CASE
) -> pd.DataFrame:
    """Paired ratio of two backends' run times, a row a case: ratio, low, high, pairs (rounds)."""
    found = [
        case | vars(paired_ratio(above, below))
        for case, above, below in paired_times(rows, numerator, denominator, by=by)
    ]
    return pd.DataFrame(found, columns=[*by, "ratio", "low", "high", "pairs"])


def paired_times(
    rows: pd.DataFrame, numerator: str, denominator: str, *, by: Sequence[str] = CASE
) -> Iterator[tuple[dict[str, Any], list[float], list[float]]]:
    """Case by case (columns `by`): its fields, and both backends' times of rounds that have both.

    ValueError for rows that must not be compared (`store.require_comparable`).
    """
    require_comparable(rows[rows.backend.isin((numerator, denominator))])
    wide = rows.pivot_table(index=[*by, "round"], columns="backend", values="run_us")
    wide = wide.reindex(columns=[numerator, denominator]).dropna()
    for key, group in wide.groupby(level=list(by)):
        case = dict(zip(by, key, strict=True))
        yield case, group[numerator].tolist(), group[denominator].tolist()


def same_against_same(rows: pd.DataFrame) -> pd.DataFrame:
    """A/A: each case and backend against itself, round 1 over 0, 3 over 2, ...: a row a pair."""
    require_comparable(rows)
    wide = rows.pivot_table(index=[*CASE, "backend"], columns="round", values="run_us")
    even, odd = wide[wide.columns[0::2]], wide[wide.columns[1::2]]
    pairs = [
        (odd[after] / even[before]).rename("ratio").reset_index().assign(pair=number)
        for number, (before, after) in enumerate(zip(even, odd, strict=False))
    ]
    return pd.concat(pairs, ignore_index=True).dropna(subset="ratio")


def release_order(frame: pd.DataFrame) -> list[str]:
    """The releases in a frame, oldest first."""
    from packaging.version import Version

    return sorted((r for r in frame.release.unique() if r), key=Version)


def case_of(row: pd.Series) -> DecodeCase:
    """The `DecodeCase` of a row with the case columns (seed 0 where it has none)."""
    qo, kv = (int(n) for n in row.heads.split("/"))
    spec = AttnSpec(qo, kv, int(row.head_dim), int(row.page_size), row["dtype"], row.kv_dtype)
    return DecodeCase(
        spec, int(row.batch_size), int(row.kv_len), row.lengths, int(row.get("seed", 0))
    )
