"""What each backend of vLLM 0.33.0 refuses: validate_configuration of its classes, row by row.

Read in v1/attention/backends/ and backends/fa_utils.py. `block_size` is 0 where the engine may
choose it. An MLA layer is taken for DeepSeek's (512 + 64; without RoPE where head_dim is 512), a
sparse model's index_topk is `topk`. vLLM's own requirements are installed.
"""

from __future__ import annotations

from .rules import Condition, Group, Rule, above, both, either, no, none_of, one_of, yes

SM100 = one_of("gpu", "sm100", "sm103")
NOT_SM100 = none_of("gpu", "sm100", "sm103")
DENSE = "FLASHINFER_MLA TOKENSPEED_MLA CUTLASS_MLA FLASH_ATTN_MLA FLASHMLA TRITON_MLA"
SPARSE = (
    "FLASHINFER_MLA_SPARSE FLASHMLA_SPARSE FLASH_ATTN_MLA_SPARSE FLASH_ATTN_MLA_SPARSE_FA4 "
    "FLASHINFER_MLA_SPARSE_SM90 FLASHINFER_MLA_SPARSE_SM120"
)
MHA = "FLASHINFER FLASH_ATTN TRITON_ATTN FLEX_ATTENTION TURBOQUANT"


def _no(backends: str, when: tuple[Condition | Group, ...], why: str, source: str = "") -> Rule:
    return Rule(when, tuple(backends.split()), why, f"vLLM {source or 'validate_configuration'}")


def _pages(backends: str, unit: int, *where: Condition) -> Rule:
    when = (*where, Condition("block_size", "not a multiple of", unit))
    return _no(backends, when, f"the block size must be a multiple of {unit}")


EVERY = (
    _no(f"{MHA} {DENSE} {SPARSE}", (yes("fp8_query"),), "a model's dtype has 16 bits"),
    _no(DENSE, (one_of("mode", "sparse_mla"),), "not sparse"),
    _no(SPARSE, (one_of("mode", "mla"),), "only sparse"),
    _no(f"{DENSE} {SPARSE}", (yes("sinks"),), "no attention sinks"),
)
LATENT = (
    _no(
        DENSE.replace(" TRITON_MLA", ""),
        (none_of("head_dim", 320, 512, 576),),
        "head_dim must be 320, 512 or 576",
    ),
    _no("FLASHINFER_MLA TOKENSPEED_MLA CUTLASS_MLA", (NOT_SM100,), "needs compute capability 10.x"),
    _no("TOKENSPEED_MLA", (no("fp8_kv"),), "only an FP8 cache"),
    _no("TOKENSPEED_MLA", (none_of("head_dim", 576),), "only DeepSeek R1's dimensions"),
    _no("FLASH_ATTN_MLA", (none_of("gpu", "sm90"),), "needs compute capability 9.x"),
    _no("FLASH_ATTN_MLA", (yes("fp8_kv"),), "no FP8 cache"),
    _no(
        "FLASHMLA", (none_of("gpu", "sm90"),), "FlashMLA's dense kernel needs Hopper", "flashmla.py"
    ),
    _no(
        "FLASHINFER_MLA",
        (one_of("head_dim", 512),),
        "without RoPE its head dimensions are others (qk_nope_head_dim 64, 128 or 192)",
    ),
    _pages("FLASHINFER_MLA TOKENSPEED_MLA", 32),
    _pages("CUTLASS_MLA", 128),
    _pages("FLASH_ATTN_MLA TRITON_MLA", 16),
    _pages("FLASHMLA", 64),
)
SPARSE_LIMITS = (
    _no(
        SPARSE.replace("FLASH_ATTN_MLA_SPARSE ", ""),
        (none_of("head_dim", 512, 576),),
        "head_dim must be 512 or 576",
    ),
    _no("FLASHINFER_MLA_SPARSE", (NOT_SM100,), "needs compute capability 10.x"),
    _no(
        "FLASHMLA_SPARSE",
        (none_of("gpu", "sm90", "sm100", "sm103"),),
        "needs compute capability 9.x or 10.x",
    ),
    _no(
        "FLASHMLA_SPARSE",
        (one_of("head_dim", 512), either(none_of("gpu", "sm90"), yes("fp8_kv"))),
        "head_dim 512 only on Hopper, with a 16-bit cache",
    ),
    _no("FLASH_ATTN_MLA_SPARSE", (none_of("gpu", "sm90"),), "needs compute capability 9.x"),
    _no("FLASH_ATTN_MLA_SPARSE FLASH_ATTN_MLA_SPARSE_FA4", (yes("fp8_kv"),), "no FP8 cache"),
    _no("FLASH_ATTN_MLA_SPARSE_FA4", (NOT_SM100,), "needs compute capability 10.x"),
    _no("FLASH_ATTN_MLA_SPARSE_FA4", (none_of("head_dim", 576),), "head_dim must be 576"),
    _no(
        "FLASH_ATTN_MLA_SPARSE_FA4",
        (none_of("heads", 8, 16, 32, 64, 128),),
        "heads must be 8, 16, 32, 64 or 128",
    ),
    _no(
        "FLASH_ATTN_MLA_SPARSE_FA4",
        (Condition("topk", "not a multiple of", 128),),
        "topk must be a multiple of 128",
    ),
    _no("FLASHINFER_MLA_SPARSE_SM90", (none_of("gpu", "sm90"),), "needs compute capability 9.x"),
    _no("FLASHINFER_MLA_SPARSE_SM120", (none_of("gpu", "sm120"),), "needs compute capability 12.x"),
    _no("FLASHINFER_MLA_SPARSE_SM120", (none_of("topk", 2048),), "topk must be 2048"),
    _no(
        "FLASHMLA_SPARSE FLASH_ATTN_MLA_SPARSE_FA4 FLASHINFER_MLA_SPARSE_SM90 "
        "FLASHINFER_MLA_SPARSE_SM120",
        (either(one_of("dtype", "float16"), one_of("kv_dtype", "float16")),),
        "no float16",
    ),
    _pages("FLASHINFER_MLA_SPARSE", 32),
    _pages(SPARSE.replace("FLASHINFER_MLA_SPARSE ", ""), 64),
)
MHA_LIMITS = (
    _no("TURBOQUANT", (), "only its own caches"),
    _no(
        "FLASHINFER",
        (none_of("head_dim", 64, 128, 256, 512),),
        "head_dim must be 64, 128, 256, 512",
    ),
    _no(
        "FLASHINFER",
        (yes("sinks"), either(one_of("gpu", "sm80", "sm89"), no("cubins"))),
        "sinks need TRT-LLM's kernels",
        "FlashInferBackend.supports_sink",
    ),
    _no(
        "FLASH_ATTN",
        (
            either(
                Condition("head_dim", "not a multiple of", 8),
                above("head_dim", 512),
                both(above("head_dim", 256), one_of("gpu", "sm80", "sm89", "sm120")),
            ),
        ),
        "head_dim must be a multiple of 8 up to 256, or 512 with FA4 (Hopper, SM100)",
    ),
    _no(
        "FLASH_ATTN",
        (yes("fp8_kv"), one_of("gpu", "sm80", "sm89", "sm120")),
        "an FP8 cache needs FA3 (Hopper) or FA4 (SM100)",
        "fa_utils.py",
    ),
    _no(
        "FLASH_ATTN",
        (yes("fp8_kv"), SM100, above("head_dim", 128)),
        "FA4 has an FP8 cache up to head_dim 128 on SM100",
        "fa_utils.py",
    ),
    _no(
        "FLASH_ATTN",
        (yes("fp8_kv"), one_of("gpu", "sm90"), above("head_dim", 256), none_of("head_dim", 512)),
        "above 256 an FP8 cache needs head_dim 512 on Hopper",
        "fa_utils.py",
    ),
    _no(
        "FLASH_ATTN",
        (yes("sinks"), one_of("gpu", "sm80", "sm89", "sm120")),
        "sinks need FA3 or FA4",
        "fa_utils.py",
    ),
    _pages("FLASH_ATTN", 64, one_of("gpu", "sm90"), yes("fp8_kv"), one_of("head_dim", 512)),
    _pages("FLASH_ATTN", 128, SM100, no("fp8_kv"), one_of("head_dim", 256)),
    _no("TRITON_ATTN", (Condition("head_dim", "<", 32),), "head_dim must be 32 or more"),
    _no("FLEX_ATTENTION", (yes("fp8_kv"),), "no FP8 cache"),
    _no("FLEX_ATTENTION", (yes("sinks"),), "no attention sinks"),
    _pages("FLASHINFER FLASH_ATTN TRITON_ATTN FLEX_ATTENTION", 16),
)
LIMITS = (*EVERY, *LATENT, *SPARSE_LIMITS, *MHA_LIMITS)
