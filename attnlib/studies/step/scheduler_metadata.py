"""FlashAttention-3's scheduler metadata: computed in every layer, or once per step.

A saving pairs the two ways round by round, in microseconds per step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import pandas as pd

from ...core.spec import AttnSpec
from ...measure.calls.decode.case import DecodeCase
from ...measure.stats import FASTER, SLOWER
from ...run import frame as frames
from ...run import store
from ...run.frame import decode_rows
from ...run.study import Grid, Study
from .case import EACH, ONCE, StepCase

MISMATCHES = store.PUBLISHED / "captures" / "metadata_mismatch.json"
"""What `tests/support/mismatch.py` recorded on a GPU."""


Sizes = Iterable[tuple[int, int, int]]
"""Batch, kv_len and page size of steps."""


def _qwen_steps(layers: int, sizes: Sizes) -> tuple[StepCase, ...]:
    """Steps of batch, kv_len and page size, of layers of Qwen3-32B on one GPU of four, as in
    SGLang's pull request."""
    steps = []
    for batch, kv_len, page_size in sizes:
        spec = AttnSpec(
            num_qo_heads=16,
            num_kv_heads=2,
            head_dim=128,
            page_size=page_size,
        )
        decode = DecodeCase(spec, batch, kv_len, "ragged")
        steps.append(StepCase(decode, layers))
    return tuple(steps)


BATCHES = (1, 4, 16, 64, 128)
LENGTHS = (512, 2048, 8192, 32768)
PAGES = (1, 64)
STEPS_64 = _qwen_steps(64, product(BATCHES, LENGTHS, PAGES))
FEW_SIZES = (
    (1, 2048, 64),
    (1, 8192, 64),
    (16, 2048, 64),
    (16, 8192, 64),
    (128, 2048, 64),
    (128, 8192, 64),
)
STEPS_32_80 = _qwen_steps(32, FEW_SIZES) + _qwen_steps(80, FEW_SIZES)
STEPS_EAGER = _qwen_steps(
    64,
    (
        (1, 2048, 64),
        (16, 2048, 64),
        (64, 2048, 64),
        (128, 2048, 64),
    ),
)
STEPS_AGAIN = _qwen_steps(
    64,
    (
        (1, 512, 1),
        (1, 8192, 64),
        (4, 2048, 1),
        (4, 32768, 64),
        (16, 8192, 1),
        (64, 512, 64),
        (64, 32768, 1),
        (128, 2048, 64),
    ),
)
STEPS_LIVE = _qwen_steps(
    64,
    (
        (1, 512, 1),
        (4, 8192, 1),
        (64, 512, 1),
        (128, 8192, 1),
    ),
)
WAYS = (EACH, ONCE)
_eager = partial(Grid, timers=("eager",), isolated=True)

STUDY = Study(
    name="scheduler_metadata",
    question="What does it save to compute FlashAttention-3's schedule once per step?",
    grids=(
        _eager(STEPS_EAGER, WAYS, rounds=4),
        _eager(STEPS_EAGER, (), rounds=2, again=WAYS),
        Grid(STEPS_64, WAYS, rounds=4),
        Grid(STEPS_32_80, WAYS, rounds=4),
        Grid(STEPS_AGAIN, (), rounds=4, again=(ONCE,)),
        Grid(STEPS_LIVE, WAYS, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-c9736401",
    ceilings=("copy",),
)
STEP = ["layers", "page_size", "kv_len", "batch_size"]
SAVING = [
    *STEP,
    "each",
    "once",
    "saved",
    "low",
    "high",
    "rounds",
    "verdict",
]


WORST_ROW = "error of the worst row"
SIDES = {
    "lengths-grown": "64 -> 8000",
    "lengths-shrunk": "8000 -> 64",
    "head-counts": "4, 1 -> 16, 4",
    "graph-padding": "3 -> 8, in a graph's buffer",
    "packing": "False -> packed",
    "sm-margin": "66 -> 0",
}
"""Name of a mismatch -> what the message of the guard does not say of it."""


def mismatch_table() -> pd.DataFrame:
    """What happened when a schedule of one call was passed to another, the worst first.

    The records say what differed between the calls, whether the schedule has more splits than the
    call has buffers for, the error of the output against float64, and what the guard did.
    """
    lines = []
    for told in json.loads(MISMATCHES.read_text()):
        error = told["relative error"]
        refused = told["with guard"].startswith("refused")
        line = {
            "the calls differ in": told["differs"] or "nothing",
            "made for -> used for": _sides(told),
            "output without guard": told["without guard"].removeprefix("output "),
            WORST_ROW: None if error is None else _in_size(error),
            "more splits than buffers": told["overruns"] or "no",
            "guard": "refuses" if refused else "passes",
        }
        if error is None and told["without guard"] == "wrong":
            line[WORST_ROW] = "not finite"
        lines.append(line)
    severity = {
        "wrong": 0,
        "refused by the library": 1,
        "right": 2,
    }
    return pd.DataFrame(lines).sort_values(
        "output without guard",
        key=lambda outputs: outputs.map(severity),
        kind="stable",
        ignore_index=True,
    )


def _in_size(error: float) -> str:
    """A small error in percent of the row, a large one as a multiple of it."""
    return f"{error:.2g} x the row" if error >= 1 else f"{error:.2%}"


def _sides(told: dict[str, Any]) -> str:
    """What a schedule was made for and what it was used for: `4 -> 16`."""
    if said := SIDES.get(told["name"]):
        return said
    values = re.search("must be (.*), got (.*)", told["with guard"])
    if values:
        return " -> ".join(values.groups())
    return "-"


def savings(frame: pd.DataFrame, *, timer: str = "graph") -> pd.DataFrame:
    """What a step saves, a row per case: `each` and `once` in us (medians over rounds), saved with
    low and high, rounds, verdict, and gain in % of `each`."""
    rows = decode_rows(frame, timer=timer)
    table = frames.savings(rows, EACH, ONCE)
    table = table.rename(columns={"base_us": "each", "new_us": "once"})
    table = table.sort_values(STEP, ignore_index=True)
    gain = 100 * table.saved / table.each
    return table[SAVING].assign(gain=gain)


def savings_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What one schedule per step saves: a row per number of layers, over all shapes."""
    lines = []
    for layers, part in savings(frame).groupby("layers"):
        line = {
            "layers": layers,
            "shapes": len(part),
            "saved per step, us: median": part.saved.median(),
            "least": part.saved.min(),
            "most": part.saved.max(),
            "saved, %: median": part.gain.median(),
            "faster": int((part.verdict == FASTER).sum()),
            "slower": int((part.verdict == SLOWER).sum()),
        }
        lines.append(line)
    return pd.DataFrame(lines)
