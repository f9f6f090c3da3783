"""Decode steps of SGLang 0.5.23: metadata and schedule, arm against arm, by the configured context.

From 0.5.15 on SGLang's metadata kernel is launched over the page table of the whole configured
context (`--context-length`), not of the step's longest request. A saving is read as in
`engine_step`.
"""

import pandas as pd

from ..kinds.engine.case import SIDE_BY_SIDE, EngineCase
from ..run.study import Grid, Study
from . import engine_step
from .engine_step import EAGER, FUSED, LAYER, LLAMA, NOW, ONE_LAUNCH

CONTEXTS = (16_384, 131_072)
"""Tokens; the second is Llama-3.1's own, which SGLang takes where none is given."""
SIZES = ((1, 1024, "fixed"), (16, 1024, "fixed"), (64, 1024, "fixed"), (128, 1024, "ragged"))
CASES = tuple(
    EngineCase(LLAMA, batch, kv_len, lengths=lengths, context=context)
    for context in CONTEXTS
    for batch, kv_len, lengths in SIZES
)
STUDY = Study(
    name="engine_now",
    question="What do metadata and schedule cost a decode step of SGLang 0.5.23?",
    grids=(
        Grid(CASES, SIDE_BY_SIDE["fa3"], timers=("host",), rounds=2),
        Grid(CASES[5:6], SIDE_BY_SIDE["fa3"], timers=("host",), headline=True),
    ),
    ceilings=(),
)
COMPARED = tuple(
    (arm, base, CASES)
    for arm, base in ((NOW, EAGER), (NOW, LAYER), (FUSED, NOW), (ONE_LAUNCH, NOW))
)


def savings(frame: pd.DataFrame) -> pd.DataFrame:
    """`engine_step.savings` of these cases, with the context."""
    table = engine_step.savings(frame, COMPARED)
    table.insert(3, "context", [case.context for case in table.case])
    return table
