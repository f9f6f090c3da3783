"""The studies: what was measured, on which machine. `attnlib measure NAME` repeats one.

`fa3_decode_regression` holds the story: a wide grid on the regressed release, and the headline
cases on every release around it, three rounds. `auto_resolution` asks each release what `auto`
runs, for 16-bit and FP8 tensors. Studies with a module of their own are in `catalog`.
"""

from __future__ import annotations

from itertools import product

from . import catalog
from .batch import AttnSpec, DecodeCase
from .cost import decode_cost
from .study import Grid, Study

REFERENCE_MACHINE = "nvidia-h200-bbfefd08"
"""The GPU whose records are published in data/ and shown in replay mode."""
TRUST_MACHINE = "nvidia-h200-5b90d8cb"
"""The GPU of `measurement_trust` and of the published bisects: another H200."""

BEFORE, REGRESSED, FIXED, NEWEST = "0.5.3", "0.6.3", "0.6.4", "0.7.2.post1"
AFFECTED = ("0.6.0", "0.6.1", "0.6.2", "0.6.3")
HEADS = ((32, 8), (16, 2), (8, 1), (32, 32))
PINNED = ("flashinfer-fa2", "flashinfer-fa3", "flashinfer-cuda-cores")
AUTO = ("flashinfer-auto",)
ALL_MODES = (*PINNED, *AUTO, "flashinfer-graph-auto")
FIX_PROOF = ("flashinfer-fa2", "flashinfer-auto", "flashinfer-graph-auto")
KV_LIMIT_BYTES = 33 * 2**30
"""Of the wide grid's cases: what an 80 GB GPU holds beside the oracle's float64 tensors."""


def _case(heads: tuple[int, int], page_size: int, batch_size: int, kv_len: int) -> DecodeCase:
    return DecodeCase(AttnSpec(*heads, head_dim=128, page_size=page_size), batch_size, kv_len)


def _wide_grid() -> tuple[DecodeCase, ...]:
    shapes = product(HEADS, (1, 16), (1, 4, 16, 64, 128), (1024, 4096, 16384, 65536, 131072))
    cases = (_case(heads, page, batch, kv_len) for heads, page, batch, kv_len in shapes)
    return tuple(case for case in cases if decode_cost(case).kv_bytes <= KV_LIMIT_BYTES)


HEADLINE = (
    _case((32, 8), 1, 1, 4096),
    _case((32, 8), 16, 16, 8192),
    _case((32, 8), 16, 128, 4096),
    _case((16, 2), 1, 16, 8192),
    _case((16, 2), 16, 1, 32768),
    _case((8, 1), 16, 64, 8192),
    _case((32, 32), 16, 4, 8192),
)


def _variants() -> tuple[DecodeCase, ...]:
    """Other head_dims, dtypes, page sizes and ragged lengths, beyond the wide grid's."""
    small = DecodeCase(AttnSpec(16, 4, 64, 64, "float16"), 16, 8192, "ragged")
    large = DecodeCase(AttnSpec(16, 4, 256, 16), 16, 8192)
    spec = AttnSpec(32, 8, 128, 64)
    usual = [DecodeCase(spec, 64, 8192, lengths) for lengths in ("fixed", "ragged", "skewed")]
    return (small, large, *usual)


WIDE = _wide_grid()
VARIANTS = _variants()


def _fp8(kv_dtype: str, dtype: str) -> DecodeCase:
    return DecodeCase(AttnSpec(32, 8, 128, 16, dtype, kv_dtype), 16, 8192)


RESOLUTION_CASES = (
    DecodeCase(AttnSpec(32, 8, 128, 16), 16, 8192),
    DecodeCase(AttnSpec(32, 8, 128, 16, "float16"), 16, 8192),
    _fp8("float8_e4m3fn", "bfloat16"),
    _fp8("float8_e4m3fn", "float8_e4m3fn"),
)

TRUST = (
    _case((8, 1), 16, 1, 1024),
    _case((32, 8), 16, 1, 4096),
    _case((16, 2), 16, 16, 8192),
    _case((32, 8), 16, 16, 8192),
    _case((32, 8), 16, 128, 4096),
)
"""From 0.5 MiB, which any cache holds, to 2 GiB, which none does."""
TIMERS = ("graph", "graph-cold", "eager", "profiler")

STUDIES = {
    study.name: study
    for study in (
        Study(
            name="fa3_decode_regression",
            question="How much slower is FlashInfer's fa3 decode than fa2, and since when?",
            grids=(
                Grid(HEADLINE, ALL_MODES, (REGRESSED,), rounds=3, headline=True),
                Grid(HEADLINE, FIX_PROOF, (FIXED,), rounds=3, headline=True),
                Grid(HEADLINE, ALL_MODES, (BEFORE, FIXED, NEWEST), rounds=3),
                Grid(
                    HEADLINE,
                    (*PINNED, *AUTO),
                    (BEFORE, REGRESSED, FIXED, NEWEST),
                    timers=("eager",),
                    rounds=3,
                ),
                Grid(WIDE, PINNED, (REGRESSED,), rounds=3),
                Grid(WIDE, ("flashinfer-fa2", "flashinfer-fa3"), (REGRESSED,), timers=("eager",)),
                Grid(WIDE, FIX_PROOF[:2], (FIXED,)),
                Grid(VARIANTS, (*PINNED, *AUTO), (REGRESSED, FIXED), rounds=3),
            ),
            reference_machine=REFERENCE_MACHINE,
            bisect_machine=TRUST_MACHINE,
        ),
        Study(
            name="auto_resolution",
            question="Which kernel does FlashInfer's `auto` run for decode, release by release?",
            grids=(
                Grid(RESOLUTION_CASES, AUTO, (BEFORE, REGRESSED, FIXED, NEWEST)),
                Grid(RESOLUTION_CASES[:1], AUTO, AFFECTED),
                Grid(RESOLUTION_CASES[:1], AUTO, (BEFORE, REGRESSED, FIXED), headline=True),
            ),
            reference_machine=REFERENCE_MACHINE,
            ceilings=(),
        ),
        Study(
            name="measurement_trust",
            question="How far can a number of this workbench be trusted?",
            grids=(
                Grid(TRUST, PINNED, (FIXED,), rounds=10),
                Grid(TRUST, PINNED, (FIXED,), timers=TIMERS, rounds=3),
                Grid(TRUST, PINNED[:1], (FIXED,), timers=TIMERS, rounds=4, headline=True),
            ),
            reference_machine=TRUST_MACHINE,
            ceilings=("copy", "read", "matmul", "launch"),
        ),
        *catalog.discover(),
    )
}
