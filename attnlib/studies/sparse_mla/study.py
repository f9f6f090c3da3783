"""Sparse MLA decode on one GPU: FlashMLA over an FP8 cache, FlashInfer over a bfloat16 one.

The cases come in pairs that differ in `kv_format` alone: the same tokens, one of them quantised.
Heads are those of a GPU under tensor parallelism 1, 2, 4 and 8 of DeepSeek's 128.
"""

from collections.abc import Iterator
from dataclasses import replace
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
RIVALS = {
    ("bfloat16", "flashinfer-mla-fa3"): "FlashInfer fa3, bf16",
    ("fp8-576", "flashinfer-mla-fa3"): "FlashInfer fa3, FP8",
    ("bfloat16", "fa3-mla"): "FlashAttention-3, bf16",
    ("bfloat16", "flashmla-sparse-bf16"): "FlashMLA prefill, bf16",
    ("fp8-656", "flashmla-sparse-fp8"): "FlashMLA, FP8",
    ("bfloat16", "flashmla-dense"): "FlashMLA dense, bf16",
}
"""What engines run on Hopper by cache format and backend: SGLang and vLLM FlashAttention-3 over
bfloat16 and FlashMLA over FP8, vLLM FlashInfer's fa3 over either too."""
RIVAL_RELEASE = "0.7.2"
RIVAL_SHAPES = tuple(
    (heads, top_k, batch, 32768)
    for heads, top_k, batch in product(HEADS, (512, 1024, 2048), (8, 64))
)
DENSE = tuple(MlaCase(MlaSpec(heads), batch, 8192) for heads, batch in product((128, 16), (1, 64)))


def _rivals() -> Iterator[Grid]:
    """Every rival at every shape that it has a kernel for, warm and cold, with A/A items."""
    dense = tuple((case.spec.num_qo_heads, 0, case.batch_size, case.kv_len) for case in DENSE)
    for (kv_format, name), _ in RIVALS.items():
        sparse = () if name == "flashmla-dense" else RIVAL_SHAPES
        shapes = sparse + (() if "sparse" in name else dense)
        releases = (RIVAL_RELEASE,) if name.startswith("flashinfer") else ("",)
        grid = Grid(_cases(shapes, kv_format), (name,), releases, ("graph", "graph-cold"), rounds=4)
        yield grid
        if name == "fa3-mla":
            yield replace(grid, cases=grid.cases[::3], backends=(), again=(name,))


STUDY = Study(
    name="sparse_mla",
    question="Which kernel decodes sparse MLA fastest, for how many heads, tokens and requests?",
    grids=(
        *_rivals(),
        Grid(BFLOAT16, FLASHINFER, FLASHINFER_RELEASES, rounds=4),
        Grid(BFLOAT16[::4], (), FLASHINFER_RELEASES[-1:], rounds=4, again=FLASHINFER[1:]),
        Grid(FP8, FLASHMLA, rounds=4),
        Grid(DENSE, FLASHINFER, FLASHINFER_RELEASES, rounds=4),
        Grid(DENSE, ("flashmla-dense",), rounds=4),
        Grid(HEADLINE, FLASHINFER, FLASHINFER_RELEASES, rounds=4, headline=True),
        Grid(_cases(HEADLINE_SHAPES, "fp8-656"), FLASHMLA, rounds=4, headline=True),
    ),
    reference_machine="nvidia-h200-d43faa58",
    ceilings=("copy", "read", "matmul", "launch"),
)
