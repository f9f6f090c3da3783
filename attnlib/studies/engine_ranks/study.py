"""What the schedule once a step is worth over two GPUs of one tensor-parallel group.

On one GPU all of it is refused. Tables and checks are those of the study `engine_step`.
"""

from dataclasses import replace

from ...run.study import Grid, Study
from ..engine_step.study import HOST, LAYER, NOW, RANKS_LLAMA

RANKS = tuple(replace(case, model="qwen3-half") for case in RANKS_LLAMA)
"""Two GPUs' parts of four of Qwen3-32B, with the all-reduce of the two."""

STUDY = Study(
    name="engine_ranks",
    question="What is the schedule once a step worth over two GPUs of one tensor-parallel group?",
    grids=(
        *(Grid(RANKS, (arm,), timers=HOST, rounds=2) for arm in (NOW, LAYER)),
        *(Grid(RANKS[:1], (arm,), timers=HOST, rounds=2, headline=True) for arm in (NOW, LAYER)),
    ),
    reference_machine="nvidia-h200-04fdf2a2",
    ceilings=(),
)
