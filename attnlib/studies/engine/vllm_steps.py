"""Decode steps of vLLM 0.33.0, backend against backend.

Each backend has a process of its own on one GPU; they take turns round by round, A B B A. A step is
the time of 49 output tokens less that of one, over 48; of repeats in a round the median counts. A
round in which a kernel was compiled for the first token has a step below zero, and is left out.
"""

from pathlib import Path

import pandas as pd

from ...measure.stats import judge_ratios

CAPTURES = Path(__file__).resolve().parents[2] / "data" / "captures"
ROUNDS = CAPTURES / "vllm_0330_rounds.jsonl.xz"
PLANNED = "flashinfer-planned"
FLASHINFER = "flashinfer"
DEFAULT = "flash"
"""FlashInfer's fa2 planned on the GPU, by FlashInfer's own plan, and FlashAttention-3, which vLLM
takes by default."""
WORDS = {
    PLANNED: "FLASHINFER, DECODE=planned",
    FLASHINFER: "FLASHINFER",
    DEFAULT: "FLASH_ATTN",
    "triton": "TRITON_ATTN",
    "flashinfer-again": "FLASHINFER again",
    "flash-again": "FLASH_ATTN again",
    "flash-guard": "FLASH_ATTN, GUARD",
    "flash-capture": "FLASH_ATTN, CAPTURE",
}
"""Arms as a reader switches them on; `again` is a second process of the same."""
COMPARED = (
    (PLANNED, FLASHINFER),
    (PLANNED, DEFAULT),
    ("triton", DEFAULT),
    ("flashinfer-again", FLASHINFER),
    ("flash-again", DEFAULT),
    ("flash-guard", DEFAULT),
    ("flash-capture", DEFAULT),
)
"""Arm and base; `again` is the same backend in a second process."""


def results(part: str) -> pd.DataFrame:
    """A row per line of the file of this `part`: time, agreement, calls, captured or control."""
    lines = pd.read_json(ROUNDS, lines=True)
    return lines[lines.part == part].dropna(axis="columns", how="all")


def step_ratios(layers: int) -> pd.DataFrame:
    """Step of `arm` / step of `base` for a model of `layers` layers, a row per batch and pair.

    Columns: batch, arm, base, base_us (median), ratio, low, high (95 % CI), rounds and verdict. All
    rows are judged as one table.
    """
    steps = results("time")
    steps = steps[steps.step_us > 0]
    steps = steps[steps.layers == layers]
    rows = []
    pairs = []
    for batch, part in steps.groupby("batch", sort=False):
        rounds = part.pivot_table(
            values="step_us",
            index="round",
            columns="arm",
            aggfunc="median",
        )
        for arm, base in COMPARED:
            if arm not in rounds or base not in rounds:
                continue
            both = rounds[[arm, base]].dropna()
            row = {
                "batch": batch,
                "arm": arm,
                "base": base,
                "base_us": both[base].median(),
            }
            rows.append(row)
            pairs.append((both[arm], both[base]))
    judged = pd.DataFrame(judge_ratios(pairs)).drop(columns="margin")
    return pd.DataFrame(rows).join(judged)


def speedup_table(layers: int) -> pd.DataFrame:
    """Speedup of a step by one backend over another, the largest first; pairs of one round are left
    out, since they have no interval."""
    judged = step_ratios(layers)
    judged = judged[judged["rounds"] > 1].sort_values("ratio")
    interval = []
    for low, high in zip(judged.low, judged.high, strict=True):
        interval.append(f"{1 / high:.2f} to {1 / low:.2f}")
    return pd.DataFrame(
        {
            "batch": judged.batch,
            "with": judged["arm"].map(WORDS),
            "over": judged["base"].map(WORDS),
            "step before, us": judged.base_us,
            "speedup": 1 / judged.ratio,
            "95 % CI": interval,
            "verdict": judged.verdict,
        }
    )
