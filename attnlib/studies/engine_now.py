"""Decode steps of SGLang 0.5.23 (torch 2.14.1): metadata and schedule, arm against arm."""

from dataclasses import replace

from ..kinds.engine.case import EngineCase
from ..run.study import Grid, Study
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
"""The machine with `SHORTER`, and with a second set of graphs (`LAYER`) in the same process."""
ALL = CASES + SHORTER
COMPARED = ((NOW, EAGER, ALL), (NOW, LAYER, ALL), (FUSED, NOW, ALL), (ONE_LAUNCH, NOW, ALL))
"""For `engine_step.savings`."""
