"""vLLM 0.33.0: its priority lists, and what its FlashInfer backend does with a call.

Read in platforms/cuda.py (_get_backend_priorities), v1/attention/backends/flashinfer.py and
utils/flashinfer.py. The first backend of the list that passes its own checks (`vllm_limits`) is
taken; batch size, context and measured times are never looked at. Left out: image prefixes,
non-causal models, context parallelism, and 4-bit caches.
"""

from __future__ import annotations

from .rules import Condition, Group, Rule, at_most, one_of, yes

SM100 = one_of("gpu", "sm100", "sm103")
PRIORITIES = "vLLM _get_backend_priorities"
LAST = ("TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT")
DENSE_BLACKWELL = (
    "FLASHINFER_MLA",
    "TOKENSPEED_MLA",
    "CUTLASS_MLA",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "TRITON_MLA",
)
DENSE = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA")
SPARSE_HOPPER = ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE")
FLASHINFER_HOPPER = "FLASHINFER_MLA_SPARSE_SM90"
FEW_HEADS = 16


def _row(
    when: tuple[Condition | Group, ...], then: tuple[str, ...], why: str, source: str = PRIORITIES
) -> Rule:
    return Rule(when, then, why, source)


MHA = (
    _row((SM100,), ("FLASHINFER", "FLASH_ATTN", *LAST), "datacenter Blackwell: TRT-LLM kernels"),
    _row((), ("FLASH_ATTN", "FLASHINFER", *LAST), "FlashAttention first"),
)
LATENT = (
    _row(
        (SM100, yes("fp8_kv")),
        (*DENSE_BLACKWELL, "FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE"),
        "sparse: FlashInfer first for an FP8 cache, at every head count (for simplicity: "
        "at 64 heads its author saw FlashMLA ahead under high concurrency)",
        "vLLM #37252",
    ),
    _row(
        (SM100, at_most("heads", FEW_HEADS)),
        (
            *DENSE_BLACKWELL,
            "FLASH_ATTN_MLA_SPARSE_FA4",
            "FLASHINFER_MLA_SPARSE",
            "FLASHMLA_SPARSE",
        ),
        "sparse: FA4, then FlashInfer, up to 16 heads (FlashMLA pads)",
        "vLLM #33451",
    ),
    _row(
        (SM100,),
        (*DENSE_BLACKWELL, "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE"),
        "sparse: FlashMLA first for a 16-bit cache above 16 heads",
        "vLLM #33451",
    ),
    _row((one_of("gpu", "sm120"),), ("TRITON_MLA", "FLASHINFER_MLA_SPARSE_SM120"), "SM120"),
    _row(
        (one_of("head_dim", 512),),
        (*DENSE, FLASHINFER_HOPPER, *SPARSE_HOPPER),
        "sparse: FlashInfer first without RoPE (head_dim 512)",
    ),
    _row(
        (),
        (*DENSE, *SPARSE_HOPPER, FLASHINFER_HOPPER),
        "FlashAttention first, of dense and of sparse ones",
    ),
)
AUTO = dict.fromkeys(("decode", "prefill_paged", "target_verify"), MHA)
AUTO |= dict.fromkeys(("mla", "sparse_mla"), LATENT)
ALL_MHA = ("FLASHINFER", "FLASH_ATTN", *LAST)
ALL_LATENT = (
    *DENSE_BLACKWELL,
    "FLASHINFER_MLA_SPARSE",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA_SPARSE_FA4",
    "FLASH_ATTN_MLA_SPARSE",
    FLASHINFER_HOPPER,
    "FLASHINFER_MLA_SPARSE_SM120",
)
BACKENDS = {mode: ALL_LATENT if mode in ("mla", "sparse_mla") else ALL_MHA for mode in AUTO}

FLASHINFER_RELEASE = "0.7.2.post1"
BACKEND_FILE = "vLLM flashinfer.py"
_XQA = one_of("gpu", "sm90", "sm120")
_BY_SIXTEEN = Condition("head_dim", "a multiple of", 16)
POLICY = {
    "decode": (
        _row(
            (SM100, yes("cubins")), ("trtllm-gen",), "TRT-LLM decode wherever it runs", BACKEND_FILE
        ),
        _row(
            (
                _XQA,
                yes("cubins"),
                at_most("head_dim", 256),
                Condition("head_dim", "a multiple of", 16),
            ),
            ("xqa",),
            "XQA decode wherever it runs, 16-bit caches too",
            BACKEND_FILE,
        ),
        _row(
            (one_of("gpu", "sm80", "sm89"),),
            ("fa2",),
            "below Hopper fa2, which takes several query tokens",
            BACKEND_FILE,
        ),
        _row((), ("auto",), "tensor cores, and auto", BACKEND_FILE),
    ),
    **dict.fromkeys(
        ("prefill_paged", "target_verify"),
        (
            _row(
                (SM100, yes("cubins")),
                ("trtllm-gen",),
                "TRT-LLM prefill: a 16-bit cache, or a query quantized like its cache",
                "vLLM use_trtllm_attention",
            ),
            Rule(
                (one_of("gpu", "sm90"), yes("fp8_kv")),
                ("auto",),
                "the paged wrapper with auto, the query quantized like its cache",
                BACKEND_FILE,
                (("fp8_query", True), ("one_dtype", True)),
            ),
            _row((), ("auto",), "the paged wrapper with auto", BACKEND_FILE),
        ),
    ),
}
"""What vLLM gives FlashInfer."""
