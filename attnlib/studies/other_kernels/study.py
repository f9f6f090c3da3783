"""Layers whose kernels of CUDA cores no other layer runs, for the policy to learn from.

On CUDA cores a group size, a head_dim and a cache's dtype have a kernel of their own; most of what
a policy of the other layers lost, it lost where it had the rates of another one (LOG.md,
2026-11-23). None of these layers is of those that judge (`unseen_layers`).
"""

from ...core.spec import AttnSpec
from ...run.study import Study
from ..layer_policy.study import FP8, cold_grids, drawn_cases

LAYERS = tuple(
    AttnSpec(*sizes)
    for sizes in (
        *((16, 8, 64, 1), (24, 8, 64, 16), (12, 2, 64, 1), (32, 2, 64, 64)),
        *((12, 4, 256, 16), (12, 2, 256, 64), (16, 1, 256, 1)),
        *((16, 8, 128, 64, "bfloat16", FP8), (12, 4, 128, 16, "bfloat16", FP8)),
        (48, 8, 128, 16, "bfloat16", FP8),
    )
)
CASES = drawn_cases(LAYERS, 12, "kernels of their own")
ROUNDS = 2

STUDY = Study(
    name="other_kernels",
    question="Which backend decodes fastest in layers with kernels of their own, cold?",
    grids=cold_grids(CASES, rounds=ROUNDS, live=60),
    reference_machine="nvidia-h200-02d4e030",
    ceilings=("copy", "read", "launch"),
)
