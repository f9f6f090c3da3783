"""MLA decode on Hopper over a bfloat16 and an FP8 cache, each by the kernels that engines run.

FlashAttention-3 is SGLang's build (sglang-kernel 0.4.2 in `versions`): that of tokenspeed-fa3 has
no kernel of 64 by 512 dims, answers wrong without an error, and is refused. Its published rounds
were taken in a row, one to three minutes before the others' turns, on the same GPU.
"""

from dataclasses import replace
from itertools import product

from ...core.spec import MlaSpec
from ...kinds.mla.case import MlaCase
from ...run.study import Grid, Study

RIVALS = {
    ("bfloat16", "flashinfer-mla-fa3"): "FlashInfer fa3, bf16",
    ("bfloat16", "flash-attn-3-mla"): "FlashAttention-3, bf16",
    ("bfloat16", "flashmla-sparse-bf16"): "FlashMLA prefill, bf16",
    ("bfloat16", "flashmla-dense"): "FlashMLA dense, bf16",
    ("fp8-576", "flashinfer-mla-fa3"): "FlashInfer fa3, FP8",
    ("fp8-656", "flashmla-sparse-fp8"): "FlashMLA, FP8",
}
"""Cache format and backend -> name. SGLang 0.5.23 and vLLM 0.33.0 take FlashAttention-3 over
bfloat16 and FlashMLA over FP8; vLLM has FlashMLA over bfloat16 and FlashInfer's fa3 over either by
name."""
RELEASE = "0.7.2"
"""Of FlashInfer."""
SHAPES = (
    *((*shape, 32768) for shape in product((128, 64, 32, 16), (512, 1024, 2048), (8, 64))),
    *((heads, 0, batch, 8192) for heads, batch in product((128, 16), (1, 64))),
)
"""(heads, top_k, batch, kv_len); top-k 0 is dense."""


def _grid(kv_format: str, name: str) -> Grid:
    """A rival at every shape that it has a kernel for, warm and cold."""
    cases = tuple(
        MlaCase(MlaSpec(heads, top_k, kv_format=kv_format), batch, kv_len)
        for heads, top_k, batch, kv_len in SHAPES
        if ("dense" not in name if top_k else "sparse" not in name)
    )
    release = RELEASE if name.startswith("flashinfer") else ""
    return Grid(cases, (name,), (release,), ("graph", "graph-cold"), rounds=4)


GRIDS = {name: _grid(*name) for name in RIVALS}
FA3 = GRIDS["bfloat16", "flash-attn-3-mla"]

STUDY = Study(
    name="mla_rivals",
    question="Which kernel decodes sparse MLA fastest over either cache format, of those that "
    "engines run on Hopper?",
    grids=(
        *GRIDS.values(),
        replace(FA3, cases=FA3.cases[::3], backends=(), again=FA3.backends),
        *(replace(grid, cases=grid.cases[11:12], headline=True) for grid in GRIDS.values()),
    ),
    reference_machine="nvidia-h200-89dc5463",
    ceilings=("copy", "read", "matmul", "launch"),
)
