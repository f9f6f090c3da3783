"""Decode with splits of the KV axis that an engine fixes, beside those that the library chooses.

SGLang's `--enable-deterministic-inference` makes a request's output independent of its batch: in a
CUDA graph fa2 splits no request, and FlashAttention-3 neither. vLLM 0.33.0 caps FlashAttention-3 at
32 splits in CUDA graphs.
"""

from itertools import product

from ...core.spec import AttnSpec
from ...kinds.decode.case import DecodeCase
from ...run.study import Grid, Study

LAYERS = (AttnSpec(32, 8, 128, 16), AttnSpec(16, 2, 128, 16))
"""Of Llama-3.1-8B, and of Qwen3-32B on one GPU of four."""
SHAPES = (
    *((1, 8192, "fixed"), (1, 65536, "fixed"), (4, 32768, "fixed")),
    *((32, 8192, "ragged"), (128, 2048, "ragged"), (32, 65536, "one_long")),
)
CASES = tuple(DecodeCase(layer, *shape) for layer, shape in product(LAYERS, SHAPES))
FREE, FIXED = "flashinfer-fa2", "flashinfer-fa2-fixed"
FREE_3, CAPPED, ONE = (
    "flash-attn-3-precomputed",
    "flash-attn-3-precomputed-32",
    "flash-attn-3-precomputed-1",
)
COLD = ("graph-cold",)

STUDY = Study(
    name="fixed_splits",
    question="What does it cost a decode call that an engine fixes its splits?",
    grids=(
        Grid(CASES, (FREE, FIXED), timers=COLD, rounds=4, again=(FREE,)),
        Grid(CASES, (FREE_3, CAPPED, ONE), timers=COLD, rounds=4, again=(FREE_3,)),
        Grid(CASES[:2], (FREE, FIXED), timers=COLD, rounds=4, headline=True),
    ),
    reference_machine="nvidia-h200-e0997f6a",
    ceilings=(),
)
