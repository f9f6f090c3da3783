"""XQA, which vLLM's FlashInfer backend decodes with on Hopper, beside its rivals, L2 cold.

Records of `H200` are older: four rounds. Those of the H100 also have cuDNN's decode, whose wrapper
was removed. Layers of models at vLLM's usual page of 16 tokens. Each shape asks one thing of XQA's
rule, which knows the number of requests and the page table's width: for a request and KV head as
many blocks as fit the SMs once, so one from 67 such pairs on (an H200 has 132 SMs, and an H100).
"""

from ..core.spec import AttnSpec
from ..kinds.decode.case import DecodeCase
from ..run.study import Grid, Study

LAYERS = {
    "Llama-3.1-8B": AttnSpec(32, 8, 128, 16),
    "Llama-3.1-70B on 8": AttnSpec(8, 1, 128, 16),
    "Qwen3-235B-A22B on 4": AttnSpec(16, 1, 128, 16),
    "gpt-oss": AttnSpec(64, 8, 64, 16),
    "Llama-2-7B": AttnSpec(32, 32, 128, 16),
    "Gemma-3-12B": AttnSpec(16, 8, 256, 16),
}
"""Heads on one GPU; windows and sinks of gpt-oss and Gemma-3 are left out."""
SHAPES = {
    "one request": (1, 8192, "fixed"),
    "few": (8, 8192, "fixed"),
    "many": (32, 8192, "fixed"),
    "short": (128, 2048, "fixed"),
    "unequal": (64, 8192, "ragged"),
    "one long": (32, 65536, "one_long"),
}
"""Name -> (requests, tokens of the longest, lengths)."""
CASES = tuple(DecodeCase(spec, *shape) for spec in LAYERS.values() for shape in SHAPES.values())
XQA, FLASH_ATTENTION = "flashinfer-xqa", "flash-attn-3-precomputed"
FLASHINFER = (XQA, "flashinfer-fa2", "flashinfer-fa2-planned")
RELEASE = "0.7.2.post1"
"""What vLLM 0.33.0 pins."""
COLD = ("graph-cold",)
H200 = "nvidia-h200-84993e41"

STUDY = Study(
    name="xqa_rivals",
    question="Is XQA, which vLLM's FlashInfer backend decodes with on Hopper, the fastest there?",
    grids=(
        Grid(CASES, FLASHINFER, (RELEASE,), COLD, rounds=3),
        Grid(CASES, (FLASH_ATTENTION,), timers=COLD, rounds=3),
        Grid(CASES[::3], (), (RELEASE,), COLD, rounds=3, again=FLASHINFER[:1]),
        Grid(CASES[2:6:3], FLASHINFER, (RELEASE,), COLD, headline=True),
        Grid(CASES[2:6:3], (FLASH_ATTENTION,), timers=COLD, headline=True),
    ),
    reference_machine="nvidia-h100-80gb-hbm3-ec1ed40c",
    ceilings=(),
)
