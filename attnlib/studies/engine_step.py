"""Does a fix reach the user of an engine? Decode steps of SGLang, arm against arm.

A saving is microseconds per step by `arm` in place of `base`, above 0 where `arm` is faster. Arms
that take turns are compared step by step: a round's saving is the median of the differences of
neighbouring steps. For the others it is the difference of the medians of two processes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from ..kinds.engine.case import IN_TURNS, SIDE_BY_SIDE, EngineCase
from ..measure.stats import judge_savings
from ..run.frame import good_rows, launches, release_order
from ..run.store import require_comparable
from ..run.study import Grid, Study

LLAMA, QWEN = "llama-3.1-8b", "qwen3-32b-tp4"
METADATA = (
    *(EngineCase(LLAMA, batch, 1024) for batch in (1, 16, 32, 128)),
    *(EngineCase(LLAMA, batch, 8192) for batch in (1, 16, 32)),
)
"""As far as they fit: 128 x 8,192 tokens need 128 GiB of cache."""
SCHEDULE = tuple(EngineCase(QWEN, batch, 1024) for batch in (1, 16))
"""All layers of Qwen3-32B, with the shapes that one GPU of four has."""
KERNELS = tuple(EngineCase(LLAMA, batch, 8192) for batch in (1, 16))
SERVED = (
    EngineCase(LLAMA, 64, 32768, lengths="chat"),
    EngineCase(LLAMA, 32, 65536, lengths="retrieval"),
    EngineCase(LLAMA, 40, 100_000, lengths="one_long"),
)
"""Lengths that people serve."""
OFFLINE = tuple(replace(case, driver="offline") for case in SERVED)
RANKS = tuple(EngineCase("qwen3-half", n, 1024, 128, "offline", tp=2) for n in (1, 16))
"""Over two GPUs with a real all-reduce; each has the shapes of one GPU of four."""
GROUPS = EngineCase(
    model="qwen3-0.6b",
    batch_size=8,
    kv_len=12_000,
    output_len=128,
    driver="offline",
    tp=2,
    lengths="12000+900+40+3000+17+7000+2000+600",
    dp=2,
)
"""Each of two GPUs attends for requests of its own (DP attention); one request is long."""
NOW, EAGER, FUSED = "sglang", "sglang-eager", "sglang-fused"
ONE_LAUNCH, LAYER, GUARDED = "sglang-one-launch", "sglang-layer", "sglang-guarded"
SPLITS = "sglang-upstream-splits"
FLASH_ATTN_3_ARMS = (*SIDE_BY_SIDE["fa3"], LAYER)
FLASHINFER_ARMS = SIDE_BY_SIDE["flashinfer"]
FA2, FA3, PLANNED = "sglang-fa2", "sglang-fa3", "sglang-planned"
HOST, PROFILER = ("host",), ("profiler",)

STUDY = Study(
    name="engine_step",
    question="What is a faster kernel or schedule worth to a user of SGLang, per decode step?",
    # In the order of the engines' processes, so that each starts once per round; traces come last.
    grids=(
        Grid(METADATA, FLASH_ATTN_3_ARMS, timers=HOST, rounds=3),
        Grid(METADATA[2:3], FLASH_ATTN_3_ARMS, timers=PROFILER),
        Grid(SCHEDULE, FLASH_ATTN_3_ARMS, timers=HOST, rounds=3),
        Grid(SCHEDULE[:1], FLASH_ATTN_3_ARMS, timers=PROFILER),
        Grid(KERNELS, FLASHINFER_ARMS, timers=HOST, rounds=3),
        Grid(SERVED, (FA2, PLANNED), timers=HOST, rounds=3),
        Grid(KERNELS[1:], FLASHINFER_ARMS, timers=PROFILER),
        Grid(OFFLINE, (FA2,), timers=HOST, rounds=2),
        Grid(OFFLINE, (PLANNED,), timers=HOST, rounds=2),
        Grid(RANKS, (NOW,), timers=HOST, rounds=2),
        Grid(RANKS, (LAYER,), timers=HOST, rounds=2),
        Grid((GROUPS,), (NOW,), timers=HOST),
        Grid((GROUPS,), (LAYER,), timers=HOST),
        Grid((GROUPS,), (GUARDED,), timers=HOST),
        Grid(METADATA[:3:2], FLASH_ATTN_3_ARMS, timers=HOST, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-677adb93",
    ceilings=(),
)
TWO_GPUS = "nvidia-h200-04fdf2a2"
"""The machine that published the cases of `RANKS`."""
Compared = tuple[tuple[str, str, tuple[EngineCase, ...]], ...]
COMPARED: Compared = (
    (FA2, FA3, KERNELS),
    (PLANNED, FA2, (*KERNELS, *SERVED, *OFFLINE)),
    (NOW, EAGER, (*METADATA, *SCHEDULE)),
    (NOW, LAYER, (*SCHEDULE, *METADATA, *RANKS)),
    (FUSED, NOW, (*METADATA, *SCHEDULE)),
    (ONE_LAUNCH, NOW, (*METADATA, *SCHEDULE)),
)
"""Arm, base and cases of each comparison, in the order of the tables."""
PREPARE = "prepare_varlen_num_blocks"
SIZES = ["model", "tp", "batch_size", "kv_len", "lengths", "driver", "context"]
JUDGED = ["step_us", "saved_us", "low", "high", "rounds", "gain", "own_spread_us", "verdict"]


def savings(
    frame: pd.DataFrame, compared: Compared = COMPARED, timer: str = "host"
) -> pd.DataFrame:
    """What `arm` saves of a step of `base`, a row per comparison and release on record.

    Columns: arm, base, release, case, `SIZES`, step_us (of base), saved_us, low, high, rounds, gain
    (% of the step), own_spread_us and verdict. All rows are judged as one table; where arms took
    turns, a saving within `own_spread_us` is ambiguous.
    """
    rows = good_rows(frame, timer)
    lines, times = [], []
    for arm, base, cases in compared:
        for release, case in product(["", *release_order(rows)], cases):
            of_case = rows[(rows.release == release) & (rows.case == case)]
            rounds = rounds_of(of_case, arm, base)
            if rounds.empty:
                continue
            times.append((rounds.step_us, rounds.step_us - rounds.saved_us))
            lines.append(
                {
                    "arm": arm,
                    "base": base,
                    "release": release,
                    "case": case,
                    **{name: getattr(case, name) for name in SIZES},
                    "step_us": rounds.step_us.median(),
                    "own_spread_us": rounds.own_spread_us.max(),
                }
            )
    if not lines:
        return pd.DataFrame()
    table = pd.DataFrame(lines).join(pd.DataFrame(judge_savings(times)))
    table = table.rename(columns={"saved": "saved_us"})
    table["gain"] = 100 * table.saved_us / table.step_us
    within = table.saved_us.abs() <= table.own_spread_us
    table["verdict"] = table.verdict.mask(within, "ambiguous")
    return table[["arm", "base", "release", "case", *SIZES, *JUDGED]]


def rounds_of(rows: pd.DataFrame, arm: str, base: str) -> pd.DataFrame:
    """A row per round that has both arms, among the rows of one case and release.

    `step_us`: the median step of `base`. `saved_us`: what `arm` saves of it. `own_spread_us`: how
    far an arm's steps lie from its own next ones, the larger of both arms, in place of A/A items;
    NaN where the arms took no turns.
    """
    rows = rows[rows.backend.isin((arm, base))]
    require_comparable(rows)
    # Records say so since 2026-11-22; before, the arms of metadata alone took turns.
    took_turns = rows.reported_backend.str.contains(IN_TURNS).all()
    took_turns |= {arm, base} <= {NOW, EAGER, FUSED, ONE_LAUNCH} and (rows.driver == "steps").all()
    wide = rows.pivot(index="round", columns="backend", values="steps_us")
    wide = wide.reindex(columns=[arm, base]).dropna()
    lines = []
    for arm_us, base_us in zip(wide[arm].map(np.array), wide[base].map(np.array), strict=True):
        saved, own_spread = np.median(base_us) - np.median(arm_us), np.nan
        if took_turns:
            saved = np.median(base_us - arm_us)
            own_spread = max(_own_spread(arm_us), _own_spread(base_us))
        lines.append((np.median(base_us), saved, own_spread))
    return pd.DataFrame(lines, columns=["step_us", "saved_us", "own_spread_us"], dtype=float)


def _own_spread(steps_us: np.ndarray) -> float:
    """How far steps lie from the next step of the same arm: the median difference."""
    return abs(float(np.median(steps_us[1::2] - steps_us[:-1:2])))


def launches_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Launches of one traced step, all and those that prepare the schedule, with their time."""
    rows = good_rows(frame[frame.case.notna()], "profiler")
    prepare_us = [
        sum(kernel.gpu_us for kernel in kernels if PREPARE in kernel.name)
        for kernels in rows.kernels
    ]
    table = rows[["model", "batch_size", "kv_len", "backend"]].assign(
        launches=launches(rows), prepare=launches(rows, PREPARE)
    )
    table["prepare, us"] = np.round(prepare_us, 1)
    return table.reset_index(drop=True)
