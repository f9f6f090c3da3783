"""Sparse MLA decode on one GPU: FlashMLA over an FP8 cache, FlashInfer over a bfloat16 one.

The cases come in pairs that differ in `kv_format` alone: the same tokens, one of them quantised.
Heads are those of a GPU under tensor parallelism 1, 2, 4 and 8 of DeepSeek's 128.
"""

from itertools import product

from ...core.spec import MlaSpec
from ...kinds.mla.case import MlaCase
from ...run.study import Grid, Study

HEADS = (128, 64, 32, 16)
BATCHES = (1, 8, 64, 256)
TOP_K = (512, 2048)
SPARSE_SHAPES = (
    *((heads, top_k, batch, 32768) for heads, top_k, batch in product(HEADS, TOP_K, BATCHES)),
    *((h, 2048, batch, kv) for h, batch, kv in product((128, 16), (1, 64), (8192, 131072))),
)
"""(heads, top_k, batch, kv_len): all at 32k, the other contexts at the ends of heads."""
HEADLINE_SHAPES = tuple((heads, 2048, 64, 32768) for heads in HEADS)


def _cases(shapes: tuple[tuple[int, ...], ...], kv_format: str) -> tuple[MlaCase, ...]:
    return tuple(
        MlaCase(MlaSpec(heads, top_k, kv_format=kv_format), batch, kv_len)
        for heads, top_k, batch, kv_len in shapes
    )


FLASHINFER = ("flashinfer-mla-fa2", "flashinfer-mla-fa3")
FLASHINFER_RELEASES = ("0.6.4", "0.6.13")
FLASHMLA = ("flashmla-sparse-fp8",)
BFLOAT16 = _cases(SPARSE_SHAPES, "bfloat16")
FP8 = _cases(SPARSE_SHAPES, "fp8-656")
HEADLINE = _cases(HEADLINE_SHAPES, "bfloat16")
DENSE = tuple(MlaCase(MlaSpec(heads), batch, 8192) for heads, batch in product((128, 16), (1, 64)))

STUDY = Study(
    name="sparse_mla",
    question="Which kernel decodes sparse MLA fastest, for how many heads, tokens and requests?",
    grids=(
        Grid(BFLOAT16, FLASHINFER, FLASHINFER_RELEASES, rounds=4),
        Grid(FP8, FLASHMLA, rounds=4),
        Grid(DENSE, FLASHINFER, FLASHINFER_RELEASES, rounds=4),
        Grid(DENSE, ("flashmla-dense",), rounds=4),
        Grid(BFLOAT16[::4], (), FLASHINFER_RELEASES, rounds=4, again=FLASHINFER[1:]),
        Grid(HEADLINE, FLASHINFER, FLASHINFER_RELEASES, rounds=3, headline=True),
        Grid(_cases(HEADLINE_SHAPES, "fp8-656"), FLASHMLA, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-fcf100fc",
    ceilings=("copy", "read", "matmul", "launch"),
)
