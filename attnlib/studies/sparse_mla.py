"""Sparse MLA decode on Hopper over a bfloat16 and an FP8 cache, by the kernels that engines run.

Heads are those of one GPU with tensor parallelism 1, 2, 4 and 8 of DeepSeek's 128. The L2 is cold.
FlashAttention-3 is SGLang's build (sglang-kernel 0.4.2 in `versions`): the tokenspeed-fa3 build has
no kernel for 64 x 512 dims and returns wrong output without an error, so it is refused. Its rounds
ran in a row, one to three minutes before those of the other kernels, on the same GPU.
"""

from dataclasses import replace
from itertools import product

import pandas as pd

from ..core.spec import MlaSpec
from ..kinds.mla.case import MlaCase
from ..run.frame import good_rows
from ..run.study import Grid, Study

KERNELS = {
    ("bfloat16", "flashinfer-mla-fa3"): "FlashInfer fa3, bf16",
    ("bfloat16", "flash-attn-3-mla"): "FlashAttention-3, bf16",
    ("bfloat16", "flashmla-sparse-bf16"): "FlashMLA prefill, bf16",
    ("bfloat16", "flashmla-dense"): "FlashMLA dense, bf16",
    ("fp8-576", "flashinfer-mla-fa3"): "FlashInfer fa3, FP8",
    ("fp8-656", "flashmla-sparse-fp8"): "FlashMLA, FP8",
}
"""(cache format, backend) -> name. SGLang 0.5.23 and vLLM 0.33.0 run FlashAttention-3 over bfloat16
and FlashMLA over FP8."""
SHAPES = (
    *((*shape, 32768) for shape in product((128, 64, 32, 16), (512, 1024, 2048), (8, 64))),
    *((heads, 0, batch, 8192) for heads, batch in product((128, 16), (1, 64))),
)
"""(heads, top_k, batch, kv_len); top_k 0 is dense."""
OVERFLOW_MACHINE = "nvidia-h200-2ef2f3bb"
EITHER_SIDE = tuple(MlaCase(MlaSpec(16, top_k=2048), batch, 131072) for batch in (56, 57))
"""7,340,032 and 7,471,104 tokens: on either side of the first token that wraps, 7,456,541."""


def _grid(kv_format: str, backend: str) -> Grid:
    """A kernel at every shape that it supports."""
    kind = "sparse" if "sparse" in backend else "dense" if "dense" in backend else ""
    cases = tuple(
        MlaCase(MlaSpec(heads, top_k, kv_format=kv_format), batch, kv_len)
        for heads, top_k, batch, kv_len in SHAPES
        if not kind or (kind == "sparse") == (top_k > 0)
    )
    release = "0.7.2" if backend.startswith("flashinfer") else ""
    return Grid(cases, (backend,), (release,), ("graph-cold",), rounds=4)


GRIDS = {key: _grid(*key) for key in KERNELS}
_FA3 = GRIDS["bfloat16", "flash-attn-3-mla"]

STUDY = Study(
    name="sparse_mla",
    question="Which kernel decodes sparse MLA fastest on Hopper, over which cache format?",
    grids=(
        *GRIDS.values(),
        replace(_FA3, cases=_FA3.cases[::3], backends=(), again=_FA3.backends),
        Grid(
            EITHER_SIDE, ("flashinfer-mla-fa2", "flashinfer-mla-fa3"), ("0.6.4", "0.6.13"), rounds=3
        ),
        *(replace(grid, cases=grid.cases[11:12], headline=True) for grid in GRIDS.values()),
    ),
    reference_machine="nvidia-h200-89dc5463",
)


def kernel_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The good rows; `backend` is the kernel's name and `case` the one over bfloat16.

    So all kernels of a shape pair up, whatever their cache format.
    """
    rows = good_rows(frame[frame.top_k.notna()], "graph-cold")
    names = [KERNELS[key] for key in zip(rows.kv_format, rows.backend, strict=True)]
    plain = [replace(case, spec=replace(case.spec, kv_format="bfloat16")) for case in rows.case]
    rows = rows.assign(backend=names, case=plain).drop(columns=["heads", "kv_format"])
    return rows.rename(columns={"num_qo_heads": "heads"})
