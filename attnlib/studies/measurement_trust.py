"""Timers against each other, A/A noise, cold caches, on cases that fit a cache or do not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd

from ..measure.stats import LEAST_ROUNDS
from ..run.figures import charts, style
from ..run.frame import CUDA_CORES, FA2, aa_check, decode_rows, over
from ..run.store import data_root, load, machines, published_path
from ..run.study import Grid, Study
from .fa3_decode_regression import FIXED, PAIR, PINNED, REGRESSED, decode_case
from .fa3_decode_regression import STUDY as REGRESSION

_case = partial(decode_case, page_size=16)
TRUST = (
    _case((8, 1), batch_size=1, kv_len=1024),
    _case((32, 8), batch_size=1, kv_len=4096),
    _case((16, 2), batch_size=16, kv_len=8192),
    _case((32, 8), batch_size=16, kv_len=8192),
    _case((32, 8), batch_size=128, kv_len=4096),
)
"""From 0.5 MiB, which any cache holds, to 2 GiB, which none does."""
TIMERS = ("graph", "graph-cold", "eager", "profiler")
_trust = partial(Grid, TRUST, releases=(FIXED,), rounds=4)

STUDY = Study(
    name="measurement_trust",
    question="How far can a number of this workbench be trusted?",
    grids=(
        _trust(PINNED, rounds=10),
        _trust(PINNED, timers=TIMERS, again=PAIR),
        _trust((FA2,), timers=TIMERS, headline=True),
        _trust((FA2, CUDA_CORES), headline=True),
    ),
    reference_machine="nvidia-h200-b6c8df1f",
)

ROUNDS = (2, 3, 4, 6, 10)
"""Numbers of rounds that `by_rounds` compares."""
AGREE = 0.1
LONG_US = 30
"""From here on a call is no short one (`measure.stats`)."""
FRAMEWORKS = {"TRTLLM": "TensorRT-LLM", "VLLM": "vLLM"}
SIZES = ["gpu", "num_qo_heads", "num_kv_heads", "head_dim", "batch_size", "kv_len"]
POWER_CAP = 4
"""SwPowerCap among NVML's reasons for a lower clock."""


def false_verdicts(studies: Sequence[str]) -> pd.DataFrame:
    """How often the same code came out faster or slower than itself, a row per GPU.

    Of `studies`, the A/A rows of three rounds or more, since fewer have no verdict.
    """
    lines = []
    for name in studies:
        for machine in machines(name):
            frame = load(name, machine)
            judged = _judged_again(frame)
            if judged.empty:
                continue
            kept = pd.concat([frame[~frame.repeat], judged])
            false, _, rows, *_ = aa_check(kept).split()
            line = {
                "GPU": frame.gpu.max(),
                "tables": 1,
                "A/A rows": int(rows),
                "false verdicts": int(false),
            }
            lines.append(line)
    columns = ["GPU", "tables", "A/A rows", "false verdicts"]
    table = pd.DataFrame(lines, columns=columns)
    return table.groupby("GPU", as_index=False).sum()


def _judged_again(frame: pd.DataFrame) -> pd.DataFrame:
    """The A/A rows that have the rounds for a verdict."""
    again = frame[frame.repeat]
    if again.empty:
        return again
    item = ["timer", "backend", "release", "case"]
    groups = again.groupby(item, sort=False)
    rounds = groups["round"].transform("nunique")
    return again[rounds >= LEAST_ROUNDS]


def by_rounds(
    frame: pd.DataFrame,
    a: str = CUDA_CORES,
    b: str = FA2,
) -> pd.DataFrame:
    """Half the width of the interval of a / b, percent, by the number of rounds, a row per call."""
    rows = decode_rows(frame)
    most = rows["round"].max() + 1
    columns = {}
    for count in ROUNDS:
        if count > most:
            continue
        first = rows[rows["round"] < count]
        table = over(first, a, b).set_index("case")
        half = np.sqrt(table.high / table.low) - 1
        columns[f"{count} rounds, ± %"] = 100 * half
    base = rows[rows.backend == b]
    us = base.groupby("case", sort=False).run_us.median()
    wide = pd.DataFrame(columns).assign(us=us)
    wide = wide.sort_values("us")
    labels = [case.label for case in wide.index]
    wide.insert(0, "call", labels)
    wide.insert(1, f"{b}, us", wide.pop("us"))
    return wide.reset_index(drop=True)


def timers(frame: pd.DataFrame, backend: str = FA2) -> pd.DataFrame:
    """Median time (us) of a backend by each timer, a row per call, the shortest first."""
    is_ok = frame.status == "ok"
    is_mine = frame.backend == backend
    rows = frame[is_ok & is_mine & ~frame.repeat]
    wide = rows.pivot_table(
        values="run_us",
        index="case",
        columns="timer",
        aggfunc="median",
        sort=False,
    )
    wide = wide[[*TIMERS]].sort_values("graph")
    wide = wide.add_suffix(", us")
    wide.insert(0, "call", [case.label for case in wide.index])
    return wide.reset_index(drop=True)


def agreement() -> pd.DataFrame:
    """NVIDIA's published times (data/aiconfigurator.csv) over those of our fa2 on an H200."""
    theirs = pd.read_csv(data_root() / "aiconfigurator.csv", comment="#")
    theirs = theirs.replace({"framework": FRAMEWORKS})
    frame = load(REGRESSION.name, REGRESSION.reference_machine)
    warm = decode_rows(frame, release=REGRESSED)
    is_alike = warm.lengths == "fixed"
    warm = warm[is_alike & (warm.backend == FA2)]
    ours = warm.groupby(SIZES).run_us.median()
    both = ours.reset_index().merge(theirs, on=SIZES)
    return both.assign(ratio=both.us / both.run_us)


def agreement_chart() -> charts.Figure:
    """`agreement`, a mark per shape; the band is 10 %, the legend counts long calls in it."""
    both = agreement()
    figure, (axis,) = charts.panels(
        ["NVIDIA's times of FlashAttention-3 and TensorRT-LLM over ours of fa2"],
        (8, 3.6),
        "ours: fa3_decode_regression; theirs: AIConfigurator 0.12.0, data/aiconfigurator.csv",
        ("our time (fa2, L2 warm, H200), us", "their time / our time"),
    )
    looks = style.looks(sorted(set(both.framework)))
    for name, look in looks.items():
        part = both[both.framework == name]
        long = part[part.run_us >= LONG_US]
        apart = (long.ratio - 1).abs()
        agree = (apart <= AGREE).sum()
        label = f"{name}: {agree} of {len(long)} within 10 % from {LONG_US} us"
        axis.scatter(
            part.run_us,
            part.ratio,
            s=16,
            color=look.color,
            marker=look.marker,
            label=label,
        )
    axis.axhspan(1 - AGREE, 1 + AGREE, color="0.9", zorder=0)
    style.log_axes(axis, "x")
    axis.legend(fontsize=8)
    return figure


def clocks(
    study: str,
    backends: Sequence[str],
    *,
    longer_than: float = 300,
) -> pd.DataFrame:
    """SM clock (MHz) of long calls, and how many ran into the power cap, by GPU and backend."""
    parts = []
    for machine in machines(study):
        path = published_path(study, machine)
        parts.append(pd.read_parquet(path))
    rows = pd.concat(parts)
    rows = rows[rows.status == "ok"]
    is_long = rows.run_us.map(np.median) > longer_than
    rows = rows[is_long & rows.backend.isin(backends)]
    rows = rows.assign(
        GPU=rows["machine.gpu"],
        clock=rows.sm_clock_mhz.map(np.median),
        capped=rows["state_after.throttle_reasons"] == POWER_CAP,
    )
    groups = rows.groupby(["GPU", "backend"])
    columns = {
        "records": groups.size(),
        "at the power cap": groups.capped.sum(),
        "median clock, MHz": groups.clock.median().round().astype(int),
        "lowest, MHz": groups.clock.min().round().astype(int),
    }
    return pd.DataFrame(columns).reset_index()
