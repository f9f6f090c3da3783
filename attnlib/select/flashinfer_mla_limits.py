"""What FlashInfer's MLA backends cannot run: the preflights, as far as they ask what we know.

Read in mla/_core.py (0.6.14, 0.6.18) and mla/_batch_mla/_backends/ (0.7.1, the same in 0.7.2);
tests/test_select_flashinfer.py runs the library's own preflights and compares.
"""

from __future__ import annotations

from .rules import Condition, Group, Rule, above, before, below, either, no, none_of, one_of, yes

LATENT = one_of("mode", "mla", "sparse_mla")
CUTE = "cute-dsl-monolithic cute-dsl-modular"
BLACKWELL_MLA = ("trtllm-gen", *CUTE.split(), "cutlass", "xqa")
NOT_BLACKWELL = none_of("gpu", "sm100", "sm103")
MIXED_OR_FP16 = either(no("one_dtype"), one_of("dtype", "float16"))
MLA_FIRST_RELEASES = {
    "fa2": "0.2.1",
    "fa3": "0.2.2",
    "cutlass": "0.2.6",
    "cutile": "0.7.0",
    **dict.fromkeys(("trtllm-gen", *CUTE.split(), "xqa"), "0.7.1"),
}


def _no(backends: str, when: tuple[Condition | Group, ...], why: str, source: str) -> Rule:
    return Rule((LATENT, *when), tuple(backends.split()), why, f"FlashInfer {source}")


FA = (
    _no("fa3", (yes("fp8_query"),), "MLA takes no FP8 query", "_fa_common.py"),
    _no(
        "fa2",
        (yes("fp8_kv"), either(before("0.6.18"), none_of("gpu", "sm90"))),
        "MLA over an FP8 cache needs Hopper, and 0.6.18",
        "mla/_core.py, 0.6.18",
    ),
    _no(
        "fa3",
        (yes("fp8_kv"), before("0.6.14")),
        "MLA over an FP8 cache needs 0.6.14",
        "mla/_core.py, 0.6.14",
    ),
    _no(
        "fa2 fa3",
        (yes("fp8_kv"), one_of("dtype", "float16")),
        "MLA over an FP8 cache needs a bfloat16 query",
        "_fa_common.py",
    ),
    _no(
        "fa2 fa3",
        (before("0.6.18"), none_of("head_dim", 576)),
        "MLA needs 512 + 64 before 0.6.18",
        "mla/_core.py, 0.6.18",
    ),
)
TRTLLM_GEN = (
    _no(
        "trtllm-gen",
        (MIXED_OR_FP16,),
        "query and cache must both be bfloat16 or both FP8",
        "trtllm_gen_backend.py",
    ),
    _no(
        "trtllm-gen",
        (none_of("page_size", 32, 64),),
        "MLA needs pages of 32 or 64",
        "trtllm_gen_backend.py",
    ),
    _no(
        "trtllm-gen",
        (above("heads", 64), below("heads", 128)),
        "MLA does not run between 64 and 128 heads",
        "trtllm_gen_backend.py",
    ),
    _no(
        "trtllm-gen cute-dsl-monolithic",
        (above("max_q", 1), no("causal")),
        "several query tokens only with a causal mask",
        "_cute_dsl_common.py",
    ),
)
CUTE_DSL = (
    _no(CUTE, (NOT_BLACKWELL,), "needs SM100 or SM103", "_cute_dsl_common.py"),
    _no(CUTE, (no("one_dtype"),), "the cache must have the query's dtype", "_cute_dsl_common.py"),
    _no(
        CUTE,
        (either(one_of("page_size", 1), Condition("page_size", "does not divide", 128)),),
        "the page size must divide 128, and not be 1",
        "_cute_dsl_common.py",
    ),
    _no(CUTE, (above("heads", 128),), "at most 128 heads", "mla_decode_fp16.py"),
    _no(
        "cute-dsl-modular",
        (above("max_q", 1), either(yes("causal"), no("one_q_len"))),
        "several query tokens only without a causal mask, and equally many a request",
        "_cute_dsl_common.py",
    ),
    _no("cute-dsl-modular", (yes("graph"),), "not in a graph", "cute_dsl_modular_backend.py"),
)
CUTLASS = (
    _no(
        "cutlass",
        (either(none_of("heads", 128), above("max_q", 1), yes("fp8_query"), yes("fp8_kv")),),
        "MLA needs 128 heads, one query token and 16 bits",
        "cutlass_backend.py",
    ),
    _no(
        "cutlass",
        (Condition("page_size", "does not divide", 128),),
        "the page size must divide 128",
        "cutlass_backend.py",
    ),
)
XQA = (
    _no("xqa", (none_of("gpu", "sm120"),), "MLA needs SM120", "xqa_backend.py"),
    _no(
        "xqa",
        (either(none_of("heads", 128), yes("causal"), above("max_q", 1)),),
        "MLA needs 128 heads, one query token and no causal mask",
        "xqa_backend.py",
    ),
    _no("xqa", (MIXED_OR_FP16,), "MLA needs bfloat16 or FP8 throughout", "xqa_backend.py"),
    _no(
        "xqa",
        (none_of("page_size", 16, 32, 64, 128),),
        "MLA needs pages of 16, 32, 64 or 128",
        "xqa_backend.py",
    ),
)
SHARED = (
    _no(
        " ".join(BLACKWELL_MLA),
        (no("packed"),),
        "query and cache must be packed",
        "_capabilities.py",
    ),
    _no(
        " ".join(BLACKWELL_MLA),
        (none_of("head_dim", 576),),
        "MLA needs 512 + 64",
        "mla/_batch_mla",
    ),
    _no(f"cutlass xqa {CUTE}", (yes("base2_lse"),), "no base-2 LSE", "_capabilities.py"),
    _no(f"fa2 fa3 cutlass xqa {CUTE}", (yes("sinks"),), "no sinks", "_capabilities.py"),
    _no(
        "trtllm-gen xqa cute-dsl-monolithic",
        (yes("graph"), no("block_tables")),
        "in a graph the caller must own the block table",
        "_planning.py",
    ),
    _no("cutile", (), "experimental: auto takes it only on request", "_auto_policy.py"),
)
MLA_LIMITS = (*FA, *TRTLLM_GEN, *CUTE_DSL, *CUTLASS, *XQA, *SHARED)
