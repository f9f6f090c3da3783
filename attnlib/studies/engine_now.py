"""Decode steps of SGLang 0.5.23 (torch 2.14.1): metadata and schedule, arm against arm.

From 0.5.15 on SGLang's metadata kernel is launched over the page table of the whole configured
context (`--context-length`), not of the step's longest request. A saving is read as in
`engine_step`.
"""

from dataclasses import replace

import pandas as pd

from ..kinds.engine.case import EngineCase
from ..run.study import Grid, Study
from . import engine_step
from .engine_step import EAGER, FUSED, LAYER, LLAMA, NOW, ONE_LAUNCH

CASES = tuple(
    EngineCase(LLAMA, batch, 1024, lengths=lengths, context=131_072)
    for batch, lengths in ((1, "fixed"), (16, "fixed"), (64, "fixed"), (128, "ragged"))
)
"""The context is Llama-3.1's own, which SGLang takes where none is given."""
SHORTER = tuple(replace(case, context=16_384) for case in CASES)
METADATA = (NOW, EAGER, FUSED, ONE_LAUNCH)
STUDY = Study(
    name="engine_now",
    question="What does decode metadata cost a step of SGLang 0.5.23?",
    grids=(
        Grid(CASES, METADATA, timers=("host",), rounds=2),
        Grid(CASES[1:2], METADATA, timers=("host",), headline=True),
    ),
    reference_machine="nvidia-h100-80gb-hbm3-ef6837d8",
    ceilings=(),
)
TWO_SETS = "nvidia-h100-80gb-hbm3-0ebd715c"
"""The machine with `SHORTER`, and with the schedule in layers in turns with the other arms: its
graphs were a second set in the same process."""
PAIRS = ((NOW, EAGER), (NOW, LAYER), (FUSED, NOW), (ONE_LAUNCH, NOW))
COMPARED = tuple((arm, base, CASES + SHORTER) for arm, base in PAIRS)


def savings(frame: pd.DataFrame) -> pd.DataFrame:
    """`engine_step.savings` of these cases, with the context."""
    table = engine_step.savings(frame, COMPARED)
    table.insert(3, "context", [case.context for case in table.case])
    return table
