"""Layers of gpt-oss, whose every other one has a window of 128 tokens, with sinks and without.

By the two that vLLM runs such layers with on Hopper, L2 cold: XQA (its FlashInfer backend) and
FlashAttention-3 with its schedule made before.
"""

from dataclasses import replace
from itertools import product

from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...run.study import Grid, Study

LAYER = AttnSpec(64, 8, 64, 16)
WINDOWS = (0, 128)
SHAPES = ((1, 8192), (32, 8192), (128, 2048))
CASES = tuple(
    DecodeCase(replace(LAYER, window=window, sinks=sinks), *shape, "ragged")
    for shape, window, sinks in product(SHAPES, WINDOWS, (False, True))
)
XQA, FLASH_ATTENTION = ("flashinfer-xqa",), ("flash-attn-3-precomputed",)
COLD = ("graph-cold",)

STUDY = Study(
    name="attention_sinks",
    question="What do attention sinks and a sliding window cost a decode call?",
    grids=(
        Grid(CASES, (*XQA, *FLASH_ATTENTION), timers=COLD, rounds=4, again=XQA),
        Grid(CASES[4:8], (*XQA, *FLASH_ATTENTION), timers=COLD, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-f9835d78",
    ceilings=(),
)
