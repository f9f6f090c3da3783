"""Timers against each other, A/A noise, cold caches, on cases that fit a cache or do not."""

from ..run.study import Grid, Study
from .fa3_decode_regression import FIXED, PINNED, decode_case

TRUST = (
    decode_case((8, 1), 16, 1, 1024),
    decode_case((32, 8), 16, 1, 4096),
    decode_case((16, 2), 16, 16, 8192),
    decode_case((32, 8), 16, 16, 8192),
    decode_case((32, 8), 16, 128, 4096),
)
"""From 0.5 MiB, which any cache holds, to 2 GiB, which none does."""
TIMERS = ("graph", "graph-cold", "eager", "profiler")

STUDY = Study(
    name="measurement_trust",
    question="How far can a number of this workbench be trusted?",
    grids=(
        Grid(TRUST, PINNED, (FIXED,), rounds=10),
        Grid(TRUST, PINNED, (FIXED,), timers=TIMERS, rounds=4, again=PINNED[:2]),
        Grid(TRUST, PINNED[:1], (FIXED,), timers=TIMERS, rounds=4, headline=True),
        Grid(TRUST, PINNED[::2], (FIXED,), rounds=4, headline=True),
    ),
    reference_machine="nvidia-h200-b6c8df1f",
)
