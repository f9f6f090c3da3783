"""More layers for the policy to learn from, as `layer_policy` has them.

They judged a policy once, under the name of `unseen_layers`, and are seen since (LOG.md,
2026-11-23).
"""

from ...core.spec import AttnSpec
from ...run.study import Study
from ..layer_policy.study import FP8, OTHERS, cold_grids, drawn_cases

LAYERS = tuple(
    AttnSpec(*sizes)
    for sizes in (
        *((40, 40, 128, 64), (8, 8, 128, 1), (16, 8, 128, 16), (8, 4, 128, 64)),
        *((12, 4, 128, 1), (32, 8, 128, 64), (64, 16, 128, 1), (20, 4, 128, 16)),
        *((24, 4, 128, 64), (14, 2, 128, 16), (32, 4, 128, 1), (24, 3, 128, 64)),
        *((128, 8, 128, 1), (16, 1, 128, 64), (16, 2, 64, 64), (8, 8, 64, 16)),
        *((8, 4, 256, 1), (16, 8, 256, 16), (28, 4, 128, 16, "bfloat16", FP8)),
        *((16, 16, 128, 1, "bfloat16", FP8), (8, 1, 128, 64, FP8, FP8)),
    )
)
CASES = drawn_cases(LAYERS, 10, "unseen layers, drawn once")
ROUNDS = 2
"""Whole turns of what was planned: four, and device time was for two."""

STUDY = Study(
    name="more_layers",
    question="Which backend decodes fastest in more layers, cold?",
    grids=cold_grids(CASES, OTHERS, rounds=ROUNDS),
    reference_machine="nvidia-h200-54fb76dd",
    ceilings=("copy", "read", "launch"),
)
