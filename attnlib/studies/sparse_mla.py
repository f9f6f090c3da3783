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
from ..measure.calls.mla.case import MlaCase
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
HEADS = (128, 64, 32, 16)
TOP_K = (512, 1024, 2048)
SPARSE_BATCHES = (8, 64)
SPARSE_LEN, DENSE_LEN = 32768, 8192
OVERFLOW_MACHINE = "nvidia-h200-2ef2f3bb"
EITHER_SIDE = (
    MlaCase(MlaSpec(16, top_k=2048), batch_size=56, kv_len=131072),
    MlaCase(MlaSpec(16, top_k=2048), batch_size=57, kv_len=131072),
)
"""7,340,032 and 7,471,104 tokens: on either side of the first token that wraps, 7,456,541."""


def _sparse(heads: int, top_k: int, batch: int, kv_format: str) -> MlaCase:
    return MlaCase(MlaSpec(heads, top_k, kv_format=kv_format), batch, SPARSE_LEN)


def _dense(heads: int, batch: int, kv_format: str) -> MlaCase:
    return MlaCase(MlaSpec(heads, top_k=0, kv_format=kv_format), batch, DENSE_LEN)


def _cases(kv_format: str, backend: str) -> tuple[MlaCase, ...]:
    """The shapes that a kernel supports: its name says if it is for sparse or dense ones alone."""
    cases = []
    if "dense" not in backend:
        for heads, top_k, batch in product(HEADS, TOP_K, SPARSE_BATCHES):
            cases.append(_sparse(heads, top_k, batch, kv_format))
    if "sparse" not in backend:
        for heads, batch in product((128, 16), (1, 64)):
            cases.append(_dense(heads, batch, kv_format))
    return tuple(cases)


COLD = ("graph-cold",)
ALL_SHAPES = []
LIVE = []
for _format, _backend in KERNELS:
    _release = "0.7.2" if _backend.startswith("flashinfer") else ""
    _shapes = _cases(_format, _backend)
    _all = Grid(
        cases=_shapes,
        backends=(_backend,),
        releases=(_release,),
        timers=COLD,
        rounds=4,
    )
    ALL_SHAPES.append(_all)
    if _backend != "flashmla-dense":
        _live = _sparse(heads=64, top_k=2048, batch=64, kv_format=_format)
        LIVE.append(replace(_all, cases=(_live,), headline=True))

FLASH_ATTN_3 = "flash-attn-3-mla"
_FEW = [_sparse(heads, 512, 8, "bfloat16") for heads in HEADS]
_MANY = [_sparse(heads, 1024, 64, "bfloat16") for heads in HEADS]
AGAIN = (
    *_FEW,
    *_MANY,
    _dense(128, 1, "bfloat16"),
    _dense(16, 64, "bfloat16"),
)
OVERFLOWING = ("flashinfer-mla-fa2", "flashinfer-mla-fa3")

STUDY = Study(
    name="sparse_mla",
    question="Which kernel decodes sparse MLA fastest on Hopper, over which cache format?",
    grids=(
        *ALL_SHAPES,
        Grid(AGAIN, (), timers=COLD, rounds=4, again=(FLASH_ATTN_3,)),
        Grid(EITHER_SIDE, OVERFLOWING, releases=("0.6.4", "0.6.13"), rounds=3),
        *LIVE,
    ),
    reference_machine="nvidia-h200-89dc5463",
)


def kernel_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The good rows; `backend` is the kernel's name and `case` the one over bfloat16.

    So all kernels of a shape pair up, whatever their cache format.
    """
    rows = good_rows(frame[frame.top_k.notna()], "graph-cold")
    names = []
    plain_cases = []
    for row in rows.itertuples():
        names.append(KERNELS[row.kv_format, row.backend])
        plain_spec = replace(row.case.spec, kv_format="bfloat16")
        plain_cases.append(replace(row.case, spec=plain_spec))
    rows = rows.drop(columns=["heads", "kv_format"])
    rows = rows.assign(backend=names, case=plain_cases)
    return rows.rename(columns={"num_qo_heads": "heads"})
