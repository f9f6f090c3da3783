"""All metadata of a step in one launch: what that is worth, alone and before 32 layers."""

from ...run.study import Grid, Study
from ..metadata_in_step.study import LLAMA_STEPS

ALONE = ("flash-attn-3-two-launches", "flash-attn-3-one-launch")
BEFORE_LAYERS = ("flash-attn-3-step-fused", "flash-attn-3-step-one-launch")

STUDY = Study(
    name="one_launch",
    question="What does it save to write page table and FA3's schedule in one kernel?",
    grids=(
        Grid(LLAMA_STEPS, ALONE, rounds=4, again=ALONE[1:]),
        Grid(LLAMA_STEPS, BEFORE_LAYERS, rounds=4, again=BEFORE_LAYERS[1:]),
        Grid(LLAMA_STEPS[:4], ALONE, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-f9835d78",
    ceilings=("launch",),
)
