"""Timers against each other, A/A noise, cold caches, on cases that fit a cache or do not."""

from functools import partial

from ..run.frame import CUDA_CORES, FA2
from ..run.study import Grid, Study
from .fa3_decode_regression import FIXED, PAIR, PINNED, decode_case

TRUST = (
    decode_case((8, 1), page_size=16, batch_size=1, kv_len=1024),
    decode_case((32, 8), page_size=16, batch_size=1, kv_len=4096),
    decode_case((16, 2), page_size=16, batch_size=16, kv_len=8192),
    decode_case((32, 8), page_size=16, batch_size=16, kv_len=8192),
    decode_case((32, 8), page_size=16, batch_size=128, kv_len=4096),
)
"""From 0.5 MiB, which any cache holds, to 2 GiB, which none does."""
TIMERS = ("graph", "graph-cold", "eager", "profiler")
_trust = partial(Grid, TRUST, releases=(FIXED,), rounds=4)

STUDY = Study(
    name="measurement_trust",
    question="How far can a number of this workbench be trusted?",
    grids=(
        _trust(PINNED, rounds=10),
        _trust(PINNED, timers=TIMERS, again=PAIR),
        _trust((FA2,), timers=TIMERS, headline=True),
        _trust((FA2, CUDA_CORES), headline=True),
    ),
    reference_machine="nvidia-h200-b6c8df1f",
)
