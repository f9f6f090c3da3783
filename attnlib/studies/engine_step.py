"""Does a fix reach the user of an engine? Decode steps of SGLang, arm against arm.

A saving is microseconds per step by `arm` in place of `base`, above 0 where `arm` is faster. Arms
that take turns are compared step by step: a round's saving is the median of the differences of
neighbouring steps. For the others it is the difference of the medians of two processes, over the
steps in which their requests were equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd

from ..kinds.engine.case import IN_TURNS, SIDE_BY_SIDE, WARM_TURNS, EngineCase
from ..measure.stats import judge_savings
from ..run.frame import good_rows, launches, release_order, require_comparable
from ..run.study import Grid, Study

LLAMA, QWEN = "llama-3.1-8b", "qwen3-32b-tp4"
SCHEDULE = tuple(EngineCase(QWEN, batch, 1024) for batch in (1, 16))
"""All layers of Qwen3-32B, with the shapes that one GPU of four has."""
UNEVEN = "12000+900+40+3000+17+7000+2000+600"
GROUPS = EngineCase("qwen3-0.6b", 8, 12_000, 128, "offline", tp=2, lengths=UNEVEN, dp=2)
"""Each of two GPUs attends for requests of its own (DP attention); one request is long."""
NOW, EAGER, FUSED = "sglang", "sglang-eager", "sglang-fused"
ONE_LAUNCH, LAYER, GUARDED = "sglang-one-launch", "sglang-layer", "sglang-guarded"
SPLITS = "sglang-upstream-splits"
FA2, FA3, PLANNED = "sglang-fa2", "sglang-fa3", "sglang-planned"
HOST = ("host",)

STUDY = Study(
    name="engine_step",
    question="What is a faster kernel or schedule worth to a user of SGLang, per decode step?",
    # In the order of the engines' processes, so that each starts once per round.
    grids=(
        Grid(SCHEDULE[:1], (*SIDE_BY_SIDE["fa3"], LAYER), timers=("profiler",), headline=True),
        *(Grid((GROUPS,), (arm,), timers=HOST) for arm in (NOW, LAYER, GUARDED)),
    ),
    reference_machine="nvidia-h200-677adb93",
    ceilings=(),
)
Compared = Sequence[tuple[str, str, tuple[EngineCase, ...]]]
"""Arm, base and cases of each comparison."""
PREPARE = "prepare_varlen_num_blocks"
SIZES = ["model", "tp", "batch_size", "kv_len", "lengths", "driver", "context"]
JUDGED = ["step_us", "saved_us", "low", "high", "rounds", "gain", "own_spread_us", "verdict"]


def savings(frame: pd.DataFrame, compared: Compared, timer: str = "host") -> pd.DataFrame:
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
            rounds = rounds_of(of_case, case, arm, base)
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


def rounds_of(rows: pd.DataFrame, case: EngineCase, arm: str, base: str) -> pd.DataFrame:
    """A row per round that has both arms, among the rows of this case and one release.

    `step_us`: the median step of `base`. `saved_us`: what `arm` saves of it. `own_spread_us`: how
    far an arm's steps lie from its own next ones, the larger of both arms, in place of A/A items;
    NaN where the arms took no turns with each other. Their steps count at equal contexts alone.
    """
    rows = rows[rows.backend.isin((arm, base))]
    require_comparable(rows)
    took_turns = rows.reported_backend.str.contains(IN_TURNS).all() and base in case.in_turns(arm)
    side_by_side = [len(case.in_turns(name)) for name in (arm, base)]
    wide = rows.pivot(index="round", columns="backend", values="steps_us")
    wide = wide.reindex(columns=[arm, base]).dropna()
    lines = []
    for arm_us, base_us in zip(wide[arm].map(np.array), wide[base].map(np.array), strict=True):
        own_spread = np.nan
        if took_turns:
            saved = np.median(base_us - arm_us)
            own_spread = max(_own_spread(arm_us), _own_spread(base_us))
        else:
            arm_us, base_us = _of_equal_contexts((arm_us, base_us), side_by_side)
            saved = np.median(base_us) - np.median(arm_us)
        lines.append((np.median(base_us), saved, own_spread))
    return pd.DataFrame(lines, columns=["step_us", "saved_us", "own_spread_us"], dtype=float)


def _of_equal_contexts(
    sides: Sequence[np.ndarray], side_by_side: Sequence[int]
) -> list[np.ndarray]:
    """Of the steps of two processes those at the same lengths: requests grow by a token in a step
    of any of the arms that are side by side in a process."""
    grown = [
        (WARM_TURNS + np.arange(len(us))) * arms
        for us, arms in zip(sides, side_by_side, strict=True)
    ]
    first, last = max(tokens[0] for tokens in grown), min(tokens[-1] for tokens in grown)
    if first > last:
        raise ValueError(f"two processes must have steps at equal contexts, got {sides}")
    return [
        us[(first <= tokens) & (tokens <= last)] for us, tokens in zip(sides, grown, strict=True)
    ]


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
