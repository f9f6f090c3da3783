"""Layers that judge the policy: it learns from none of them.

Drawn by a seed that LOG.md names (2026-11-23), with their batches, before any of their times was
seen, and measured on a GPU that taught nothing.
"""

from ...run.study import Study
from ..layer_policy.study import cold_grids, drawn_cases
from ..other_layers import study as second

SEED = "unseen layers, third draw"
SEEN = {*second.SEEN, *second.LAYERS}
LAYERS = second.drawn_layers(SEED, SEEN)
CASES = drawn_cases(LAYERS, 10, SEED)
ROUNDS = 2
"""Three were planned, and device time was for two."""

STUDY = Study(
    name="unseen_layers",
    question="Is the policy right in layers that it has never seen, on another GPU?",
    grids=cold_grids(CASES, rounds=ROUNDS),
    reference_machine="nvidia-h200-ee19d27f",
    ceilings=("copy", "read", "launch"),
)
