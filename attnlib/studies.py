"""The studies: what was measured, on which machine. `attnlib measure NAME` repeats one.

`fa3_decode_regression` holds the story: a wide grid on the regressed release, and the headline
cases on every release around it, three rounds. `auto_resolution` asks each release what `auto`
runs, for 16-bit and FP8 tensors.
"""

from __future__ import annotations

from itertools import product

from .batch import AttnSpec, DecodeCase
from .cases import MetadataCase, MismatchCase, StepCase
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

METADATA_SIZES = (
    (1, 1, 8192),
    (32, 1, 8192),
    (128, 1, 8192),
    (512, 1, 8192),
    (1024, 1, 8192),
    (2048, 16, 32768),
    (4096, 16, 32768),
    (32, 1, 131072),
)
"""(batch, page_size, max_ctx); the second is the case of SGLang's pull request."""
METADATA = tuple(MetadataCase("decode", *sizes) for sizes in METADATA_SIZES)
METADATA_SWEEP = tuple(
    MetadataCase("decode", batch, page, ctx)
    for batch, page, ctx in product((1, 8, 64, 512, 4096), (1, 16, 256), (128, 2048, 16384, 131072))
)
DESIGNS = ("metadata-eager", "metadata-serial", "metadata-fused")
SGLANG = ("sglang-metadata",)
SGLANG_RELEASES = ("0.5.14", "0.5.23")
"""0.5.14 has the kernels as they were merged, in a file that loads alone; 0.5.23 is the newest."""

STEP_METADATA = ("fa3-step-eager", "fa3-step-serial", "fa3-step-fused")
LLAMA_STEPS = tuple(
    StepCase(DecodeCase(AttnSpec(32, 8, 128, page), batch, 8192, "ragged"), 32)
    for batch, page in product((1, 32, 128, 512), (1, 16))
)
"""32 layers of Llama-3.1-8B."""


def _qwen_step(layers: int, batch: int, kv_len: int, page: int) -> StepCase:
    """Layers of Qwen3-32B on one GPU of four, as in SGLang's pull request."""
    return StepCase(DecodeCase(AttnSpec(16, 2, 128, page), batch, kv_len, "ragged"), layers)


STEPS_64 = tuple(
    _qwen_step(64, batch, kv_len, page)
    for batch, kv_len, page in product((1, 4, 16, 64, 128), (512, 2048, 8192, 32768), (1, 64))
)
STEPS_32_80 = tuple(
    _qwen_step(layers, batch, kv_len, page)
    for layers, batch, kv_len, page in product((32, 80), (1, 16, 128), (2048, 8192), (1, 64))
)
STEPS_EAGER = tuple(_qwen_step(64, batch, 2048, 64) for batch in (1, 16, 128))
PREPARES = tuple(_qwen_step(1, batch, 2048, 64) for batch in (1, 4, 16, 64, 128))
EACH_OR_ONCE = ("fa3-step-each", "fa3-step-once")
MISMATCH_NAMES = (
    *("none", "lengths-grown", "lengths-shrunk", "head-counts", "cap-in-call-only"),
    *("cap-in-metadata-only", "narrower-table", "wider-table", "batch-grown", "batch-shrunk"),
    *("batch-resized", "graph-padding", "dtype-fp8-told", "dtype-bf16-told", "head-dim"),
    *("window", "causal", "query-length", "packing", "sm-margin"),
)
"""Of `mismatch.MISMATCHES`, which needs torch; a test holds the two together."""
MISFITS = tuple(MismatchCase(name, guard) for guard, name in product((False, True), MISMATCH_NAMES))

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
        Study(
            name="decode_metadata",
            question="What does the metadata of a decode step cost, and what must it cost?",
            grids=(
                Grid(METADATA, (*DESIGNS, "metadata-fused-alone"), rounds=3),
                Grid(METADATA, SGLANG, SGLANG_RELEASES, rounds=3),
                Grid(METADATA[:4], DESIGNS, timers=("eager",), rounds=3),
                Grid(METADATA[:4], SGLANG, SGLANG_RELEASES, timers=("eager",), rounds=3),
                Grid(METADATA_SWEEP, DESIGNS, rounds=3),
                Grid(METADATA_SWEEP, SGLANG, SGLANG_RELEASES, rounds=3),
                Grid(LLAMA_STEPS, STEP_METADATA, rounds=3),
                Grid(METADATA[:6], DESIGNS, rounds=3, headline=True),
            ),
            ceilings=("copy", "launch", "gather"),
        ),
        Study(
            name="scheduler_metadata",
            question="What does it save to prepare FA3's schedule once a step, not once a layer?",
            grids=(
                Grid(STEPS_64, EACH_OR_ONCE, rounds=3),
                Grid(STEPS_32_80, EACH_OR_ONCE, rounds=3),
                Grid(STEPS_EAGER, EACH_OR_ONCE, timers=("eager",), rounds=3),
                Grid(PREPARES, ("fa3-prepare",), rounds=3),
                Grid(LLAMA_STEPS, ("fa3-step-one-launch", "fa3-step-fused"), rounds=3),
                Grid(STEPS_64[::12], EACH_OR_ONCE, rounds=3, headline=True),
                Grid(PREPARES, ("fa3-prepare",), rounds=3, headline=True),
            ),
            ceilings=("copy", "launch"),
        ),
        Study(
            name="metadata_mismatch",
            question="What happens when FA3's metadata does not fit the call, and who notices?",
            grids=(
                Grid(MISFITS, ("fa3",), timers=("eager",), isolated=True),
                Grid(
                    tuple(case for case in MISFITS if case.name == "head-counts"),
                    ("fa3",),
                    timers=("eager",),
                    headline=True,
                    isolated=True,
                ),
            ),
            ceilings=(),
        ),
    )
}
