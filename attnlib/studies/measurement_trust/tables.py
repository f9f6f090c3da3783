"""Tables of the measurement itself: A/A noise, timers against each other, verdicts."""

import numpy as np
import pandas as pd

from ...run.frame import SHAPE, cases_of, decode_rows, over, same_against_same

TIMERS = ("profiler", "graph", "graph-cold", "eager")
AGREE = 0.02
"""Timers agree when they differ by no more than this from the profiler's kernel time."""
LENGTHS_US = {"up to 30": 30, "to 100": 100, "to 1,000": 1000, "longer": np.inf}
LONG_US = 20.0
"""Shorter kernels are within reach of the timers' own overheads."""


def aa_pairs(frame: pd.DataFrame) -> pd.DataFrame:
    """A/A pairs of every backend at the cases with the most rounds, graph timer."""
    return same_against_same(decode_rows(frame))


def aa_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A/A by backend: pairs, and how far apart two processes lie (median, 95th percentile, %)."""
    pairs = aa_pairs(frame)
    effect = 100 * np.expm1(np.abs(np.log(pairs.ratio)))
    grouped = effect.groupby(pairs.backend)
    table = grouped.agg(["size", "median", lambda e: np.percentile(e, 95), "max"])
    return table.set_axis(["pairs", "median %", "95th %", "largest %"], axis=1).round(2)


def timer_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median time of each case and backend by each timer, and graph over profiler."""
    return _by_timer(frame).drop(columns="case")


def drifts(frame: pd.DataFrame) -> pd.DataFrame:
    """By the time of a call in a graph, us: records, how many of them drift (the last
    samples over the first ones) and, of these, how many get slower."""
    rows = frame[frame.timer.isin(("graph", "graph-cold")) & frame.case.notna()]
    rows = rows[(rows.status == "ok") & ~rows.repeat]
    rows = rows.assign(unsettled=rows.drift.abs() > AGREE)
    call = pd.cut(rows.run_us, [0, *LENGTHS_US.values()], labels=list(LENGTHS_US))
    rows = rows.assign(call=call, slower=rows.unsettled & (rows.drift > 0))
    table = rows.groupby("call", observed=True).agg(
        records=("id", "size"), drift=("unsettled", "sum"), slower=("slower", "sum")
    )
    table.insert(2, "drift, %", (100 * table.drift / table.records).round(1))
    return table.reset_index(names="call, us")


def verdicts(rows: pd.DataFrame, numerator: str, denominator: str) -> pd.DataFrame:
    """Verdict on `numerator` against `denominator`, case by case, with interval and margin.

    ValueError if there is no case that both have a round of.
    """
    found = over(rows, numerator, denominator)
    if found.empty:
        both = f"{numerator!r} and {denominator!r}"
        raise ValueError(f"rows must hold a case of both {both}, none is")
    return found


def _by_timer(frame: pd.DataFrame) -> pd.DataFrame:
    rows = pd.concat([decode_rows(frame, timer=timer) for timer in TIMERS])
    wide = rows.pivot_table(
        index=["case", "backend"], columns="timer", values="run_us", aggfunc="median", sort=False
    )
    wide = wide.reindex(columns=list(TIMERS)).rename_axis(columns=None)
    shown = wide.round(1).assign(**{"graph / profiler": (wide.graph / wide.profiler).round(3)})
    table = cases_of(rows)[["case", *SHAPE]].merge(shown.reset_index(), on="case")
    return table.sort_values([*SHAPE, "backend"]).sort_values("profiler", ignore_index=True)
