"""The tables of the study `fa3_decode_regression`: graph timer unless they say otherwise, us."""

import numpy as np
import pandas as pd

from ...core.gpu import SLOW_MHZ
from ...kinds.cost import Ceilings, decode_cost, predict_fa3
from ...run.bisect import Bisection
from ...run.frame import (
    AUTO,
    CASE,
    CUDA_CORES,
    FA2,
    FA3,
    GRAPH_AUTO,
    LABELS,
    SHAPE,
    cases_of,
    decode_rows,
    intervals,
    over,
    release_order,
    times,
)
from ...run.store import require_comparable


def headline(frame: pd.DataFrame, limit: Ceilings, release: str) -> pd.DataFrame:
    """Memory floor and time of every mode, and fa3 / fa2 with its interval over rounds."""
    rows, modes = decode_rows(frame, release=release), [FA2, FA3, AUTO, CUDA_CORES]
    table = over(rows, FA3, FA2).merge(times(rows)[["case", *modes]], on="case")
    table["floor"] = [decode_cost(case).floor_us(limit) for case in table.case]
    shown = table[[*SHAPE, "floor", *modes]].rename(columns=LABELS).round(1)
    verdict = {
        "fa3 / fa2": table.ratio.round(2),
        "interval": intervals(table),
        "rounds": table.rounds,
    }
    return shown.assign(**verdict)


def slowdown_grid(frame: pd.DataFrame, release: str) -> pd.DataFrame:
    """fa3 / fa2 of every case with head_dim 128, bfloat16 and equal lengths."""
    return over(slowdown_rows(frame, release), FA3, FA2)[[*SHAPE, "ratio"]]


def slowdown_rows(frame: pd.DataFrame, release: str) -> pd.DataFrame:
    """The records that `slowdown_grid` pairs."""
    rows = decode_rows(frame, release=release)
    plain = (rows.lengths == "fixed") & (rows.dtype == "bfloat16") & (rows.head_dim == 128)
    return rows[plain & rows.page_size.isin((1, 16)) & rows.backend.isin((FA2, FA3))]


def slowdown_summary(grid: pd.DataFrame) -> pd.DataFrame:
    """Smallest, median and largest slowdown for each head count, mildest first."""
    summary = grid.groupby("heads").ratio.agg(["count", "min", "median", "max"])
    return summary.sort_values("median").round(2).rename(columns={"count": "cases"})


def extremes(grid: pd.DataFrame, count: int = 4) -> pd.DataFrame:
    """The mildest and the worst cases of a slowdown grid."""
    ordered = grid.sort_values(["ratio", *SHAPE])
    picked = pd.concat([ordered.head(count), ordered.tail(count)]).drop_duplicates()
    return picked.round(2).reset_index(drop=True)


def predictions(frame: pd.DataFrame, limit: Ceilings, release: str) -> pd.DataFrame:
    """What fa3's schedule predicts (`cost.predict_fa3`) beside what was measured."""
    rows = decode_rows(frame, release=release)
    measured = times(rows[rows.backend == FA3])
    found = [predict_fa3(case, limit) for case in measured.case]
    told = pd.DataFrame({**vars(each), "predicted": each.run_us} for each in found)
    table = measured[CASE].join(told).assign(measured=measured[FA3])
    table["bound by"] = np.where(table.tensor_us >= table.traffic_us, "tensor cores", "traffic")
    return table.assign(error=table.measured / table.predicted)


def prediction_table(frame: pd.DataFrame, limit: Ceilings, release: str) -> pd.DataFrame:
    """`predictions`, rounded for reading."""
    table = predictions(frame, limit, release)
    columns = [*SHAPE, "work_items", "busy_sms", "kv_reads", "bound by", "predicted", "measured"]
    return table[columns].round(1).assign(**{"measured / predicted": table.error.round(2)})


def over_floor(frame: pd.DataFrame, limit: Ceilings, release: str) -> pd.DataFrame:
    """Time over memory floor of each case and kernel family, with the batch's KV bytes in MiB."""
    rows = decode_rows(frame, release=release)
    require_comparable(rows)
    found = rows.groupby(["case", "kernel_family"], sort=False).run_us.median().reset_index()
    costs = found.case.map(decode_cost)
    return (
        found[["kernel_family"]]
        .rename(columns={"kernel_family": "family"})
        .assign(
            mib=[cost.kv_bytes / 2**20 for cost in costs],
            over_floor=found.run_us / [cost.floor_us(limit) for cost in costs],
        )
    )


def clocks(frame: pd.DataFrame, release: str) -> pd.DataFrame:
    """SM clock and power cap at the end of each measurement, by kernel family."""
    rows = decode_rows(frame, release=release)
    grouped = rows.assign(slow=rows.sm_clock_mhz < SLOW_MHZ).groupby("kernel_family")
    return pd.DataFrame(
        {
            "records": grouped.size(),
            "at power cap, %": (100 * grouped.power_capped.mean()).round(),
            f"below {SLOW_MHZ} MHz, %": (100 * grouped.slow.mean()).round(),
            "lowest, MHz": grouped.sm_clock_mhz.min(),
        }
    ).astype(int)


def launch_modes(frame: pd.DataFrame, release: str) -> pd.DataFrame:
    """fa2 and fa3 captured in a graph and launched eagerly, and the host time of their plan();
    `rounds` are the least and the most of the eager ones."""
    parts = {"": ("graph", "run_us"), " eager": ("eager", "run_us"), " plan": ("graph", "plan_us")}
    shown = cases_of(decode_rows(frame, release=release))[["case", *SHAPE]]
    for suffix, (timer, value) in parts.items():
        rows = decode_rows(frame, release=release, timer=timer)
        wide = times(rows, value).set_index("case").reindex(columns=[FA2, FA3]).round(1)
        shown = shown.join(wide.rename(columns=LABELS).add_suffix(suffix), on="case")
    eager = decode_rows(frame, release=release, timer="eager")
    ends = eager.groupby(["case", "backend"], sort=False).run_us.agg(["min", "max"])
    ends = ends.round().astype(int).astype(str)
    told = (ends["min"] + " to " + ends["max"]).unstack().reindex(columns=[FA2, FA3])
    shown = shown.join(told.rename(columns=LABELS).add_suffix(" eager, rounds"), on="case")
    return shown[[*SHAPE, *sorted(shown.columns.drop(["case", *SHAPE]))]]


def by_release(frame: pd.DataFrame) -> pd.DataFrame:
    """`auto` of both wrappers over the pinned fa2 of the same release, and the kernel that ran."""
    tables = []
    for release in release_order(frame):
        rows = decode_rows(frame, release=release)
        for backend in (AUTO, GRAPH_AUTO):
            ran = rows[rows.backend == backend].drop_duplicates("case")[["case", "kernel_family"]]
            found = over(rows, backend, FA2).merge(ran, on="case")
            tables.append(found.assign(release=release, backend=backend))
    return pd.concat(tables, ignore_index=True)


def release_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per release and wrapper: the kernels that ran, and auto / fa2 over the cases."""
    grouped = by_release(frame).groupby(["release", "backend"], sort=False)
    ran = grouped.kernel_family.agg(lambda names: ", ".join(sorted(set(names)))).rename("ran")
    ratios = grouped.ratio.agg(cases="size", lowest="min", median="median", highest="max")
    return ratios.round(2).assign(ran=ran)[["ran", *ratios]].reset_index()


def across_releases(frame: pd.DataFrame, backend: str) -> pd.DataFrame:
    """Times of one backend, a column per release."""
    rows = decode_rows(frame)
    rows = rows[rows.backend == backend]
    require_comparable(rows)
    wide = rows.pivot_table(index=SHAPE, columns="release", values="run_us", aggfunc="median")
    return wide[release_order(rows)].round(1).reset_index().rename_axis(columns=None)


def variants(frame: pd.DataFrame, release: str) -> pd.DataFrame:
    """fa3 / fa2 beyond the grid: other head_dims, dtypes, page size 64, unequal lengths."""
    rows = decode_rows(frame, release=release)
    found = over(rows, FA3, FA2)
    columns = ["heads", "head_dim", "dtype", "page_size", "batch_size", "kv_len", "lengths"]
    return found[columns].assign(**{"fa3 / fa2": found.ratio.round(2)})


def bisection(found: Bisection) -> pd.DataFrame:
    """The steps of a bisection in the order taken, each over the reference, and what both ran."""
    steps = pd.DataFrame([step.to_dict() for step in found.steps])
    columns = ["release", "ran", "reference_ran", "ratio", "95 %", "verdict", "rounds"]
    return steps.assign(**{"95 %": intervals(steps)}).round({"ratio": 2})[columns]
