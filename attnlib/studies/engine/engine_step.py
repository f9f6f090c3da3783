"""Does a fix reach the user of an engine? Decode steps of SGLang, arm against arm.

A saving is microseconds per step by `arm` in place of `base`, above 0 where `arm` is faster. Arms
that take turns are compared step by step: a round's saving is the median of the differences of
neighbouring steps. For the others it is the difference of the medians of two processes, over the
steps in which their requests were equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from ...measure.stats import judge_savings
from ...run.frame import good_rows, release_order, require_comparable
from ...run.study import Study
from .case import EngineCase

LLAMA = "llama-3.1-8b"
QWEN = "qwen3-32b-tp4"
SCHEDULE = (
    EngineCase(QWEN, 1, 1024),
    EngineCase(QWEN, 16, 1024),
)
"""All layers of Qwen3-32B, with the shapes that one GPU of four has."""
GROUPS = EngineCase(
    "qwen3-0.6b",
    batch_size=8,
    kv_len=12_000,
    output_len=128,
    driver="offline",
    tp=2,
    lengths="12000+900+40+3000+17+7000+2000+600",
    dp=2,
)
"""Each of two GPUs attends for requests of its own (DP attention); one request is long."""
DECIMALS = {"us": 0, "ms": 2}
"""Of an interval in these units."""
NOW = "sglang"
EAGER = "sglang-eager"
FUSED = "sglang-fused"
ONE_LAUNCH = "sglang-one-launch"
LAYER = "sglang-layer"
GROUP_ARMS = {
    LAYER: "in each layer",
    "sglang": "once per step",
    "sglang-guarded": "once per step, with attnlib.guard",
}
"""Where the schedule was made for `GROUPS`, in words."""
SPLITS = "sglang-upstream-splits"
FA2 = "sglang-fa2"
FA3 = "sglang-fa3"
PLANNED = "sglang-planned"
TURNS: tuple[tuple[str, ...], ...] = (
    (NOW, EAGER, FUSED, ONE_LAUNCH),
    (FA2, FA3, PLANNED),
)
"""Arms that took turns step by step in one process of the driver `steps`."""
IN_TURNS = "in turns"
"""In `reported_backend` of the records of such steps."""
WARM_TURNS = 4
"""Steps of each arm before those on record; every step of any arm added a token."""
RETIRED = (
    "its driver inside SGLang is gone. Its published records load with attnlib.load; "
    "`python -m attnlib serve` loads a server, `python -m attnlib diagnose TRACE` reads its steps"
)
"""What to do in place of measuring a study of whole engines."""

STUDY = Study(
    name="engine_step",
    question="What is a faster kernel or schedule worth to a user of SGLang, per decode step?",
    reference_machine="nvidia-h200-677adb93",
    retired=RETIRED,
)
Compared = Sequence[tuple[str, str, tuple[EngineCase, ...]]]
"""Arm, base and cases of each comparison."""
PREPARE = "prepare_varlen_num_blocks"
SIZES = [
    "model",
    "tp",
    "batch_size",
    "kv_len",
    "lengths",
    "driver",
    "context",
]
JUDGED = [
    "step_us",
    "saved_us",
    "low",
    "high",
    "rounds",
    "gain",
    "own_spread_us",
    "verdict",
]


def savings(
    frame: pd.DataFrame,
    compared: Compared,
    timer: str = "host",
) -> pd.DataFrame:
    """What `arm` saves of a step of `base`, a row per comparison and release on record.

    Columns: arm, base, release, case, `SIZES`, step_us (of base), saved_us, low, high, rounds, gain
    (% of the step), own_spread_us and verdict. All rows are judged as one table; where arms took
    turns, a saving within `own_spread_us` is inconclusive.
    """
    rows = good_rows(frame, timer)
    lines = []
    times = []
    for arm, base, cases in compared:
        for release, case in product(["", *release_order(rows)], cases):
            of_release = rows[rows.release == release]
            of_case = of_release[of_release.case == case]
            rounds = rounds_of(of_case, case, arm, base)
            if rounds.empty:
                continue
            times.append((rounds.step_us, rounds.step_us - rounds.saved_us))
            line = {
                "arm": arm,
                "base": base,
                "release": release,
                "case": case,
                "step_us": rounds.step_us.median(),
                "own_spread_us": rounds.own_spread_us.max(),
            }
            for name in SIZES:
                line[name] = getattr(case, name)
            lines.append(line)
    if not lines:
        return pd.DataFrame()
    judged = pd.DataFrame(judge_savings(times))
    table = pd.DataFrame(lines).join(judged)
    table = table.rename(columns={"saved": "saved_us"})
    table["gain"] = 100 * table.saved_us / table.step_us
    within = table.saved_us.abs() <= table.own_spread_us
    table["verdict"] = table.verdict.mask(within, "inconclusive")
    return table[["arm", "base", "release", "case", *SIZES, *JUDGED]]


ARM_WORDS = {
    NOW: "SGLang's own",
    EAGER: "metadata op by op",
    FUSED: "METADATA=fused",
    ONE_LAUNCH: "METADATA=one-launch",
    LAYER: "schedule in each layer",
    SPLITS: "SPLITS=upstream",
    FA2: "FlashInfer fa2",
    FA3: "FlashInfer fa3",
    PLANNED: "FlashInfer fa2, DECODE=planned",
}
"""Arms as a reader switches them on."""


def saved_table(table: pd.DataFrame, *, per: str = "step", unit: str = "us") -> pd.DataFrame:
    """A table of `savings` as a reader wants it, the largest share first.

    `per` is what takes the time, `unit` `us` or `ms`.
    """
    scale = 1e3 if unit == "ms" else 1.0
    first = table.sort_values("gain", ascending=False)
    interval = []
    for low, high in zip(first.low, first.high, strict=True):
        interval.append(f"{low / scale:.{DECIMALS[unit]}f} to {high / scale:.{DECIMALS[unit]}f}")
    shown = {
        "with": first["arm"].map(ARM_WORDS),
        "against": first["base"].map(ARM_WORDS),
        "requests": first.batch_size,
        f"{per} before, {unit}": first.step_us / scale,
        f"saved, {unit}": first.saved_us / scale,
        "95 % CI": interval,
        "saved, %": first.gain,
        "verdict": first.verdict,
    }
    if first.release.any():
        shown = {"SGLang": first.release} | shown
    return pd.DataFrame(shown)


def rounds_of(
    rows: pd.DataFrame,
    case: EngineCase,
    arm: str,
    base: str,
) -> pd.DataFrame:
    """A row per round that has both arms, among the rows of this case and one release.

    `step_us`: the median step of `base`. `saved_us`: what `arm` saves of it. `own_spread_us`: how
    far an arm's steps lie from its own next ones, the larger of both arms, in place of A/A items;
    NaN where the arms took no turns with each other. Their steps count at equal contexts alone.
    """
    rows = rows[rows.backend.isin((arm, base))]
    require_comparable(rows)
    took_turns = rows.reported_backend.str.contains(IN_TURNS).all()
    took_turns = took_turns and base in side_by_side(case, arm)
    wide = rows.pivot(
        index="round",
        columns="backend",
        values="steps_us",
    )
    wide = wide.reindex(columns=[arm, base]).dropna()
    lines = []
    for of_arm, of_base in zip(wide[arm], wide[base], strict=True):
        arm_us = np.array(of_arm)
        base_us = np.array(of_base)
        own_spread = np.nan
        if took_turns:
            saved = np.median(base_us - arm_us)
            own_spread = max(_own_spread(arm_us), _own_spread(base_us))
        else:
            arms = side_by_side(case, arm)
            bases = side_by_side(case, base)
            counts = [len(arms), len(bases)]
            arm_us, base_us = _of_equal_contexts([arm_us, base_us], counts)
            saved = np.median(base_us) - np.median(arm_us)
        lines.append((np.median(base_us), saved, own_spread))
    return pd.DataFrame(
        lines,
        columns=["step_us", "saved_us", "own_spread_us"],
        dtype=float,
    )


def side_by_side(case: EngineCase, arm: str) -> tuple[str, ...]:
    """The arms that one process measured together with `arm`, itself included."""
    if case.driver == "offline":
        return (arm,)
    for arms in TURNS:
        if case.lengths != "fixed":
            # FlashInfer's fa3 was left out there: its steps took up to 0.2 s.
            arms = tuple(name for name in arms if name != FA3)
        if arm in arms:
            return arms
    return (arm,)


def _of_equal_contexts(
    sides: list[np.ndarray],
    arms: list[int],
) -> list[np.ndarray]:
    """Of the steps of two processes those at the same lengths: requests grow by a token in a step
    of any of the `arms`, so many, that are side by side in a process."""
    grown = []
    for us, count in zip(sides, arms, strict=True):
        turns = WARM_TURNS + np.arange(len(us))
        grown.append(turns * count)
    first = max(tokens[0] for tokens in grown)
    last = min(tokens[-1] for tokens in grown)
    if first > last:
        raise ValueError(f"two processes must have steps at equal contexts, got {sides}")
    kept = []
    for us, tokens in zip(sides, grown, strict=True):
        is_shared = (first <= tokens) & (tokens <= last)
        kept.append(us[is_shared])
    return kept


def _own_spread(steps_us: np.ndarray) -> float:
    """How far steps lie from the next step of the same arm: the median difference."""
    earlier = steps_us[:-1:2]
    later = steps_us[1::2]
    return abs(float(np.median(later - earlier)))


def group_tokens(frame: pd.DataFrame) -> pd.DataFrame:
    """What users got under DP attention, by where the schedule was made: a row per arm.

    `other tokens` counts the requests whose tokens differ from those with a schedule per layer.
    """
    groups = frame[frame.case == GROUPS].drop_duplicates("backend").set_index("backend")
    outputs = {}
    for arm, reported in groups.reported_backend.items():
        digests = reported.partition("outputs ")[2]
        if digests:
            outputs[arm] = digests.split("-")
    lines = []
    for arm, words in GROUP_ARMS.items():
        line: dict[str, Any] = {"schedule": words, "engine": "serves"}
        if arm in outputs:
            pairs = zip(outputs[arm], outputs[LAYER], strict=True)
            line["other tokens"] = sum(mine != theirs for mine, theirs in pairs)
            line["of requests"] = GROUPS.batch_size
        else:
            line["engine"] = "stops with an error"
        lines.append(line)
    return pd.DataFrame(lines).astype({"other tokens": "Int64", "of requests": "Int64"})
