"""What we know of each backend, in one place: a row per mode of a library. Needs no torch."""

from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

PLANS = ("decode", "mla", "extend")
"""What a backend can plan: `DecodeBatch`, `MlaBatch` or `ExtendBatch`."""


@dataclass(frozen=True)
class Library:
    """The `distributions` that bring a library: any one of them, the first is the one to install.

    `since` is the oldest release that our calls fit; studies may compare releases of a `compared`
    library, which they install as overlays.
    """

    distributions: tuple[str, ...]
    since: str = ""
    compared: bool = False


LIBRARIES = {
    "sdpa": Library(("torch",)),
    "flashinfer": Library(("flashinfer-python",), since="0.5.0", compared=True),
    "sglang": Library(("sglang",), compared=True),
    "flash-attn-3": Library(("tokenspeed-fa3", "flash-attn-3", "sgl-kernel")),
    "flashmla": Library(("sgl-flash-mla", "flash-mla")),
}
"""Beginning of a backend's name -> its library. SGLang's backends are metadata kernels."""

COMPARED = {word: lib.distributions[0] for word, lib in LIBRARIES.items() if lib.compared}
"""First word of a backend's name -> the distribution whose releases studies compare."""

RECORDED = tuple(
    dict.fromkeys(
        ("torch", "triton", "apache-tvm-ffi", "numpy", "sglang-kernel", "transformers")
        + ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13")
        + tuple(name for library in LIBRARIES.values() for name in library.distributions)
    )
)
"""Distributions whose versions stand in every record."""


@dataclass(frozen=True)
class Family:
    """A kernel family: beginnings of function names that prove it, whose it is, look in figures.

    `decodes` if it takes one query per request, or a few; `hopper` if it needs that.
    """

    kernels: tuple[str, ...]
    hopper: bool = False
    color: str = ""
    marker: str = ""
    library: str = "FlashInfer"
    decodes: bool = False


FAMILIES = {
    "fa2": Family(
        ("BatchPrefillWithPagedKVCacheKernel", "BatchPrefillWithRaggedKVCacheKernel"),
        color="#0072B2",
        marker="o",
    ),
    "fa3": Family(
        ("PrefillWithKVCacheKernel", "FP8PrefillWithKVCacheKernel"),
        hopper=True,
        color="#D55E00",
        marker="^",
    ),
    "cuda-cores": Family(
        ("BatchDecodeWithPagedKVCacheKernel",), color="#009E73", marker="s", decodes=True
    ),
    "flash-attn-3": Family(("FlashAttnFwdSm90",), hopper=True, library="FlashAttention-3"),
    "mla-fa2": Family(("BatchMLAPagedAttentionKernel",)),
    "mla-fa3": Family(("BatchMLAPageAttentionHopperKernel",), hopper=True),
    "flashmla-dense": Family(
        ("flash_fwd_splitkv_mla_kernel",), hopper=True, library="FlashMLA", decodes=True
    ),
    "flashmla-sparse": Family(
        ("flash_fwd_splitkv_mla_fp8_sparse_kernel",), True, library="FlashMLA", decodes=True
    ),
    "flashmla-sparse-prefill": Family(("sparse_attn_fwd_kernel",), True, library="FlashMLA"),
    "flash-attn-2": Family(
        ("flash_fwd_kernel", "flash_fwd_splitkv_kernel"), library="FlashAttention-2"
    ),
    "flash-attn-4": Family(("kernel_cutlass_kernel_flash_attncute",), library="FlashAttention-4"),
    "xqa": Family(("kernel_mha",), library="TensorRT-LLM", decodes=True),
    "trtllm-gen": Family(("fmhaSm100aKernel", "fmhaSm100fKernel"), library="TensorRT-LLM"),
    "fmha-v2": Family(("fmha_v2_flash_attention_",), library="TensorRT-LLM"),
    "mmha": Family(("masked_multihead_attention_kernel",), library="TensorRT-LLM", decodes=True),
    "cudnn": Family(("cudnn_generated_fort_native_sdpa_",), library="cuDNN"),
    "cutlass": Family(("Sm100FmhaFwdKernelTma", "Sm100FmhaMlaKernelTma"), library="CUTLASS"),
    "triton-decode": Family(
        ("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1"), library="Triton", decodes=True
    ),
    "triton-unified": Family(("kernel_unified_attention",), library="vLLM's Triton"),
    "triton-paged": Family(("kernel_paged_attention_2d",), library="vLLM's Triton", decodes=True),
}
"""Of FlashInfer unless `library` says otherwise. Names are those of the libraries' sources, or of
traces that were published."""

FAMILY_OF = {kernel: name for name, family in FAMILIES.items() for kernel in family.kernels}
"""Function name of a kernel -> the family that it proves."""

ROLE_OF = {
    kernel: role
    for role, kernels in {
        "prepare": "prepare_varlen_num_blocks_kernel",
        "merge": "FlashAttnFwdCombine PersistentVariableLengthMergeStatesKernel reduce_segments "
        "flash_fwd_splitkv_combine_kernel flash_fwd_mla_combine_kernel _fwd_kernel_stage2 "
        "fmhaReductionKernel lean_reduction_kernel",
        "metadata": "_fused_metadata_kernel_ps1_no_swa _fused_metadata_kernel_general "
        "_fused_decode_metadata_kernel create_flashinfer_kv_indices_triton get_mla_metadata_kernel "
        "create_flashmla_kv_indices_triton decode_metadata_kernel step_metadata_kernel "
        "kv_indices_kernel plan_kernel draft_metadata_kernel verify_metadata_kernel",
    }.items()
    for kernel in kernels.split()
}
"""Kernel beside attention -> what it does: FlashAttention-3's schedule, the merge of a request's
splits, page tables and lengths."""


@lru_cache
def family_of(kernel: str) -> str:
    """The family whose name a kernel's function name begins with, or the empty string."""
    return next((name for start, name in FAMILY_OF.items() if kernel.startswith(start)), "")


@dataclass(frozen=True)
class Entry:
    """One mode of one library.

    `plans` is one of `PLANS`, `code` the `module:class` in this folder, `family` the kernel family
    that must run: empty where the library may choose. Releases before `since` lack the mode.
    `words` are what engines call it, `label` what tables do.
    """

    name: str
    plans: str
    code: str
    family: str = ""
    since: str = ""
    words: tuple[str, ...] = ()
    label: str = ""

    @property
    def library(self) -> Library:
        """The library that it is a mode of."""
        return next(lib for name, lib in LIBRARIES.items() if self.name.startswith(name))

    @property
    def distribution(self) -> str:
        """The distribution to install."""
        return self.library.distributions[0]

    @property
    def asks(self) -> str:
        """FlashInfer's word for the kernels that its wrapper is asked for."""
        return self.family.removeprefix("mla-") or "auto"

    @property
    def hopper(self) -> bool:
        """Whether it needs compute capability 9.x."""
        return bool(self.family) and FAMILIES[self.family].hopper


_ENTRIES = (
    Entry("sdpa", "decode", "sdpa:Sdpa"),
    Entry("flashinfer-auto", "decode", "flashinfer:Decode", label="auto"),
    Entry("flashinfer-fa2", "decode", "flashinfer:Decode", "fa2", label="fa2"),
    Entry("flashinfer-fa2-fixed", "decode", "flashinfer:FixedDecode", "fa2", label="fa2 fixed"),
    Entry("flashinfer-fa2-planned", "decode", "planned:PlannedDecode", "fa2", label="fa2 planned"),
    Entry("flashinfer-fa3", "decode", "flashinfer:Decode", "fa3", "0.6.0", label="fa3"),
    Entry(
        *("flashinfer-cuda-cores", "decode", "flashinfer:Decode", "cuda-cores"), label="CUDA cores"
    ),
    Entry("flashinfer-xqa", "decode", "xqa:Xqa", "xqa", "0.5.3", label="XQA"),
    Entry(
        *("flashinfer-cudnn", "decode", "flashinfer:CudnnDecode", "cudnn", "0.7.1"), label="cuDNN"
    ),
    Entry("flashinfer-graph-auto", "decode", "flashinfer:GraphDecode"),
    Entry(
        *("flash-attn-3", "decode", "fa3:Fa3", "flash-attn-3"),
        words=("fa3", "FLASH_ATTN"),
        label="FlashAttention-3",
    ),
    Entry(
        *("flash-attn-3-precomputed", "decode", "fa3:Fa3Precomputed", "flash-attn-3"),
        label="FlashAttention-3, precomputed",
    ),
    Entry(
        *("flash-attn-3-precomputed-32", "decode", "fa3:Fa3Capped", "flash-attn-3"),
        label="FlashAttention-3, at most 32 splits",
    ),
    Entry(
        *("flash-attn-3-precomputed-1", "decode", "fa3:Fa3OneSplit", "flash-attn-3"),
        label="FlashAttention-3, no splits",
    ),
    Entry("flashinfer-mla-fa2", "mla", "mla:FlashInferMla", "mla-fa2"),
    Entry("flashinfer-mla-fa3", "mla", "mla:FlashInferMla", "mla-fa3"),
    Entry("flashmla-dense", "mla", "mla:FlashMlaDense", "flashmla-dense", words=("FLASHMLA",)),
    Entry(
        *("flashmla-sparse-fp8", "mla", "mla:FlashMlaSparse", "flashmla-sparse"),
        words=("FLASHMLA_SPARSE",),
    ),
    Entry(*("flashmla-sparse-bf16", "mla", "mla:FlashMlaSparseBf16", "flashmla-sparse-prefill")),
    Entry(
        *("flash-attn-3-mla", "mla", "mla:Fa3Mla", "flash-attn-3"),
        words=("fa3", "FLASH_ATTN_MLA", "FLASH_ATTN_MLA_SPARSE"),
    ),
    Entry("flashinfer-prefill-auto", "extend", "flashinfer:Prefill"),
    Entry("flashinfer-prefill-fa2", "extend", "flashinfer:Prefill", "fa2"),
    Entry("flashinfer-prefill-fa3", "extend", "flashinfer:Prefill", "fa3"),
    Entry(
        *("flashinfer-prefill-fa2-uniform", "extend", "flashinfer:UniformPrefill", "fa2"),
        since="0.7.2.post1",
    ),
    Entry("flashinfer-prefill-fa2-planned", "extend", "planned:PlannedPrefill", "fa2"),
    Entry("flash-attn-3-extend", "extend", "fa3:Fa3Extend", "flash-attn-3"),
)

TABLE = {entry.name: entry for entry in _ENTRIES}
BACKENDS, MLA_BACKENDS, EXTEND_BACKENDS = (
    tuple(entry.name for entry in _ENTRIES if entry.plans == plans) for plans in PLANS
)


def installed_version(distribution: str) -> str:
    """Version of an installed distribution, or the empty string."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def entry_of(name: str, plans: str = "") -> Entry:
    """The entry of a name; ValueError listing the names there are, of those that plan `plans`."""
    if name not in TABLE or plans not in ("", TABLE[name].plans):
        names = [entry.name for entry in _ENTRIES if plans in ("", entry.plans)]
        kind = f" for {plans}" if plans else ""
        raise ValueError(f"backend must be one of {', '.join(names)}{kind}, got {name!r}")
    return TABLE[name]
