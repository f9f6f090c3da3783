"""Layers that judge the policy: it learns from none of them.

Drawn by a seed that LOG.md names (2026-11-23), with their batches, before any of their times was
seen, and measured on a GPU that taught nothing.
"""

from ...run.study import Grid, Study
from ..layer_policy.study import COLD, FLASHINFER, ONCE, RELEASE, drawn_cases, on_both
from ..other_layers import study as second

SEED = "unseen layers, third draw"
SEEN = {*second.SEEN, *second.LAYERS}
LAYERS = second.drawn_layers(SEED, SEEN)
CASES = drawn_cases(LAYERS, 10, SEED)
ROUNDS = 2

STUDY = Study(
    name="unseen_layers",
    question="Is the policy right in layers that it has never seen, on another GPU?",
    grids=(
        *on_both(CASES, ONCE, timers=COLD, rounds=ROUNDS),
        Grid(CASES[::10], (), (RELEASE,), timers=COLD, rounds=ROUNDS, again=FLASHINFER[:1]),
        *on_both(CASES[::30], ONCE, timers=COLD, headline=True),
    ),
    reference_machine="nvidia-h200-ee19d27f",
    ceilings=("copy", "read", "launch"),
)
