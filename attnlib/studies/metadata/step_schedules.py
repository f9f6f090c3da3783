"""What FlashAttention-3's schedules cost a step: one launch for all layers, or one in each.

Times are what a step's metadata adds behind another kernel, attention left out. `metadata-fused` is
our metadata without a schedule.
"""

from __future__ import annotations

from ...run.study import Grid, Study
from .case import DECODE_MODELS, VERIFY_MODELS, MetadataCase, ways

TOKENS = 4
"""Drafts that a request verifies."""
DECODE = (
    MetadataCase("decode", 1, 64, 8192),
    MetadataCase("decode", 128, 64, 8192),
    MetadataCase("decode", 1024, 64, 8192),
    MetadataCase("decode", 128, 1, 8192),
)
VERIFY = (
    MetadataCase("decode", 1, 64, 8192, seq_len_delta=TOKENS),
    MetadataCase("decode", 128, 64, 8192, seq_len_delta=TOKENS),
    MetadataCase("decode", 1024, 64, 8192, seq_len_delta=TOKENS),
)
FUSED = "metadata-fused"
OF_DECODE = ways(DECODE_MODELS)
OF_VERIFY = ways(VERIFY_MODELS)
BEHIND = ("graph-behind",)

STUDY = Study(
    name="step_schedules",
    question="What do FlashAttention-3's schedules cost a step?",
    grids=(
        Grid(DECODE, (FUSED, *OF_DECODE), timers=BEHIND, rounds=4, headline=True),
        Grid(VERIFY, (FUSED, *OF_VERIFY), timers=BEHIND, rounds=4),
    ),
    reference_machine="",
    ceilings=(),
)
