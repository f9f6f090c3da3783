"""The backends, a row per mode of a library, and the families that traces prove. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import metadata

from ..spec import require_type

PLANNABLE = ("decode", "mla", "extend")
"""What a backend can plan: `DecodeBatch`, `MlaBatch` or `ExtendBatch`."""


@dataclass(frozen=True)
class Library:
    """The `distributions` that supply a library: one is enough, the first is the one to install.

    `since` is the oldest release that our calls fit. Studies may compare releases of a `compared`
    library; they install them as overlays.
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
    "vllm": Library(("vllm",), since="0.33.0"),
    "sglang-flash-attn-3": Library(("sglang-kernel",), compared=True),
}
"""Prefix of a backend's name -> its library. Of SGLang also the metadata kernels of studies."""


def library_of(backend: str) -> str:
    """The longest prefix in `LIBRARIES` of a backend's name, or the empty string."""
    prefixes = [prefix for prefix in LIBRARIES if backend.startswith(prefix)]
    return max(prefixes, key=len, default="")


COMPARED = {
    prefix: library.distributions[0] for prefix, library in LIBRARIES.items() if library.compared
}
"""Prefix of a backend's name -> the distribution whose releases studies compare."""


def compared_package(backend: str) -> str:
    """The distribution whose releases studies compare for a backend, or the empty string."""
    return COMPARED.get(library_of(backend), "")


_TOOLS = ("torch", "triton", "apache-tvm-ffi", "numpy", "sglang-kernel", "transformers")
_CUDNN = ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13")
_SUPPLIERS = [name for library in LIBRARIES.values() for name in library.distributions]
RECORDED = tuple(dict.fromkeys([*_TOOLS, *_CUDNN, *_SUPPLIERS]))
"""Distributions whose versions are in every record."""


@dataclass(frozen=True)
class Family:
    """A kernel family: how function names that prove it begin (`*` is any text), its library, its
    look in figures.

    `decodes`: it takes one query per request, or a few. `hopper`: it needs Hopper.
    `splits_by`: what a caller sets so that more blocks share the KV of a request, where known.
    """

    kernels: tuple[str, ...]
    hopper: bool = False
    color: str = ""
    marker: str = ""
    library: str = "FlashInfer"
    decodes: bool = False
    splits_by: str = ""


FAMILIES = {
    "fa2": Family(
        ("BatchPrefillWithPagedKVCacheKernel", "BatchPrefillWithRaggedKVCacheKernel"),
        color="#0072B2",
        marker="o",
        splits_by="plan() with the step's lengths, no disable_split_kv, no wide fixed_split_size",
    ),
    "fa3": Family(
        ("PrefillWithKVCacheKernel", "FP8PrefillWithKVCacheKernel"),
        hopper=True,
        color="#D55E00",
        marker="^",
        splits_by="backend fa2: FlashInfer's fa3 splits no request",
    ),
    "cuda-cores": Family(
        ("BatchDecodeWithPagedKVCacheKernel",),
        color="#009E73",
        marker="s",
        decodes=True,
        splits_by="plan() with the lengths of the step, without disable_split_kv",
    ),
    "flash-attn-3": Family(
        ("FlashAttnFwdSm?0",),
        hopper=True,
        library="FlashAttention-3",
        splits_by="num_splits=0; in vLLM's graphs flash_attn_max_num_splits_for_cuda_graph",
    ),
    "batch-attention": Family(
        ("PersistentKernelTemplate",),
        splits_by="plan() with the lengths of the step",
    ),
    "batch-pod": Family(("BatchPODWithKVCacheTensorKernel",)),
    "mla-fa2": Family(
        ("BatchMLAPagedAttentionKernel",),
        splits_by="plan() with the lengths of the step",
    ),
    "mla-fa3": Family(
        ("BatchMLAPageAttentionHopperKernel",),
        hopper=True,
        splits_by="plan() with the lengths of the step",
    ),
    "flashmla-dense": Family(
        ("flash_fwd_splitkv_mla_kernel",),
        hopper=True,
        library="FlashMLA",
        decodes=True,
        splits_by="tile_scheduler_metadata and num_splits of get_mla_metadata",
    ),
    "flashmla-sparse": Family(
        ("flash_fwd_splitkv_mla_fp8_sparse_kernel",),
        hopper=True,
        library="FlashMLA",
        decodes=True,
        splits_by="tile_scheduler_metadata and num_splits of get_mla_metadata",
    ),
    "flashmla-sparse-prefill": Family(("sparse_attn_fwd_",), hopper=True, library="FlashMLA"),
    "flash-attn-2": Family(
        ("flash_fwd_kernel", "flash_fwd_splitkv_kernel"),
        library="FlashAttention-2",
        splits_by="num_splits=0",
    ),
    "flash-attn-4": Family(
        ("kernel_cutlass_kernel_*flash_attncute",),
        library="FlashAttention-4",
        splits_by="num_splits",
    ),
    "xqa": Family(("kernel_mha",), library="TensorRT-LLM", decodes=True),
    "trtllm-gen": Family(("fmhaSm1*Kernel",), library="TensorRT-LLM"),
    "cute-dsl": Family(
        (
            "kernel_cutlass_split_kv_kernel_flashinfer",
            "kernel_cutlass_decode_flashinfer",
            "kernel_cutlass_kernel_flashinfer*attention",
        ),
    ),
    "hpc-ops": Family(
        (
            "smallm_attention_decode_",
            "attention_decode_",
            "attention_prefill_",
            "attention_with_kvcache_",
        ),
        library="HPC-Ops",
    ),
    "paged-attention": Family(
        ("paged_attention_v?_kernel",),
        library="vLLM",
        decodes=True,
        splits_by="paged_attention_v2, which has partitions",
    ),
    "fmha-v2": Family(("fmha_v2_flash_attention_",), library="TensorRT-LLM"),
    "mmha": Family(("masked_multihead_attention_kernel",), library="TensorRT-LLM", decodes=True),
    "cudnn": Family(("cudnn_generated_fort_native_sdpa_",), library="cuDNN"),
    "cutlass": Family(
        ("Sm100FmhaFwdKernelTma", "Sm100FmhaMlaKernelTma"),
        library="CUTLASS",
        splits_by="num_kv_splits (vLLM: the variable FORCE_NUM_KV_SPLITS)",
    ),
    "triton-decode": Family(
        (
            "_fwd_kernel_stage1",
            "_fwd_grouped_kernel_stage1",
            "_fwd_kernel_flash_decode_stage1",
            "_lean_attention_decode_kernel",
        ),
        library="Triton",
        decodes=True,
        splits_by="num_kv_splits (SGLang: --triton-attention-num-kv-splits)",
    ),
    "turboquant": Family(
        ("_tq_decode_stage1",),
        library="vLLM's Triton",
        decodes=True,
        splits_by="tq_max_kv_splits_for_cuda_graph of vLLM's attention config",
    ),
    "tokenspeed-mla": Family(("kernel_cutlass_*tokenspeed_mla",), library="TokenSpeed"),
    "cutile": Family(
        (
            "_decode_attention_kv_paged_kernel",
            "_decode_mla_kv_paged_kernel",
            "_prefill_attention_paged_",
            "_prefill_attention_ragged_",
        ),
    ),
    "block-sparse": Family(
        (
            "_gqa_share_sparse_decode_kernel",
            "_gqa_share_sparse_fwd_kernel",
            "_gqa_sparse_decode_kernel",
            "_gqa_sparse_fwd_kernel",
        ),
        library="Triton",
    ),
    "sparse-mla": Family(("sparse_mla_decode_", "sparse_mla_prefill_")),
    "triton-sparse-mla": Family(("_sparse_mla_",), library="SGLang's Triton"),
    "triton-extend": Family(("_fwd_kernel",), library="Triton"),
    "triton-unified": Family(
        ("kernel_unified_attention",),
        library="vLLM's Triton",
        splits_by="the 3D kernel, whose segments share a request",
    ),
    "flex-attention": Family(
        ("triton_tem_fused_*flex_attention",),
        library="PyTorch",
        splits_by="kernel_options SPLIT_KV",
    ),
    "triton-paged": Family(
        ("kernel_paged_attention_2d",),
        library="vLLM's Triton",
        decodes=True,
        splits_by="the unified kernel, whose segments share a request",
    ),
}
"""Function names are those of the libraries' sources or of published traces.

The first pattern that fits a name decides: put a longer one before a shorter one.
"""

FAMILY_OF = {kernel: name for name, family in FAMILIES.items() for kernel in family.kernels}
"""How the function name of a kernel begins -> its family."""

ROLE_OF = {
    "prepare_varlen_num_blocks_kernel": "prepare",
    "FlashAttnFwdCombine": "merge",
    "PersistentVariableLengthMergeStatesKernel": "merge",
    "flash_fwd_mla_combine_kernel": "merge",
    "flash_fwd_splitkv_combine_kernel": "merge",
    "_fwd_kernel_stage2": "merge",
    "_fwd_kernel_flash_decode_stage2": "merge",
    "_splitk_reduce_kernel": "merge",
    "_merge_topk_attn_out_kernel": "merge",
    "fmhaReductionKernel": "merge",
    "Sm100FmhaMlaReductionKernel": "merge",
    "lean_reduction_kernel": "merge",
    "reduce_segments": "merge",
    "kernel_reduce_segments": "merge",
    "_sparse_mla_reduce_kernel": "merge",
    "sparse_mla_decode_*merge_kernel": "merge",
    "merge_*state*_kernel": "cascade",
    "MergeState": "cascade",
    "paged_attention_v2_reduce_kernel": "merge",
    "assign_attention_decode_task_kernel": "metadata",
    "get_num_kv_splits_triton": "metadata",
    "*indexer_k_quant*cache_kernel": "indexer",
    "smxx_paged_mqa_logits_metadata": "indexer",
    "smxx_clean_logits": "indexer",
    "fp8_index_kernel": "indexer",
    "topKPerRow": "indexer",
    "create_*kv_indices": "metadata",
    "generate_draft_decode_kv_indices": "metadata",
    "*metadata_kernel": "metadata",
    "kv_indices_kernel": "metadata",
    "plan_kernel": "metadata",
    "kernel_cutlass_reduction_kernel_": "merge",
    "kernel_cutlass_kernel_*flash_attncuteflash_fwd_combine": "merge",
    "attention_decode_*combine_kernel": "merge",
    "topk_transform_": "indexer",
    "transform_index_page_table_": "indexer",
    "sm*_fp?_*mqa_logits": "indexer",
}
"""How the name of a kernel beside attention begins (`*` is any text) -> what it does:
FlashAttention-3's schedule, the merge of a request's splits, of a prefix and the rest (cascade),
page tables and lengths, or the choice of tokens for sparse attention (DSA)."""
OF_EXPERTS = (
    "_fwd_kernel_ep_",
    "_fwd_kernel_expand_to_masked_slab",
    "_fwd_kernel_fill_m_indices",
    "_fwd_kernel_masked_slab",
)
"""How the names of SGLang's kernels of experts begin, which begin as that of its extend kernel."""


@lru_cache(maxsize=4096)
def role_of(kernel: str) -> str:
    """What a kernel beside attention does, or the empty string."""
    return _of_prefix(kernel, ROLE_OF)


@lru_cache(maxsize=4096)
def family_of(kernel: str) -> str:
    """The family of a kernel's function name, or the empty string."""
    if role_of(kernel) or kernel.startswith(OF_EXPERTS):
        return ""
    return _of_prefix(kernel, FAMILY_OF)


def _of_prefix(kernel: str, table: Mapping[str, str]) -> str:
    """The value of the first pattern that a kernel's name begins with, or the empty string."""
    for begin, value in table.items():
        if fnmatchcase(kernel, f"{begin}*"):
            return value
    return ""


@dataclass(frozen=True)
class Entry:
    """One mode of one library.

    `plans` is one of `PLANNABLE`, `code` the `module:class` in this folder, `family` the kernel
    family that must run (empty: the library chooses). Releases before `since` lack the mode.
    `words` are the names that engines use ("fa3" is SGLang's word for FlashAttention-3), `label`
    the name in tables. `cap` is the cap of splits (`schedule.caps`), empty where the mode takes
    none: a name may choose another, `sglang-flash-attn-3@bounded`.
    """

    name: str
    plans: str
    code: str
    family: str = ""
    since: str = ""
    words: tuple[str, ...] = ()
    label: str = ""
    cap: str = ""

    @property
    def library(self) -> Library:
        """The library with the longest prefix of the name; KeyError if there is none."""
        prefix = library_of(self.name)
        if not prefix:
            raise KeyError(f"{self.name} must begin with a key of LIBRARIES")
        return LIBRARIES[prefix]

    @property
    def distribution(self) -> str:
        """The distribution to install."""
        return self.library.distributions[0]

    @property
    def asks(self) -> str:
        """The `backend` argument of FlashInfer's wrapper."""
        return self.family.removeprefix("mla-") or "auto"

    @property
    def hopper(self) -> bool:
        """Whether it needs compute capability 9.x."""
        return bool(self.family) and FAMILIES[self.family].hopper


_ENTRIES = (
    Entry("sdpa", "decode", "sdpa:Sdpa"),
    Entry("flashinfer-auto", "decode", "flashinfer:Decode", label="auto"),
    Entry("flashinfer-fa2", "decode", "flashinfer:Decode", "fa2", label="fa2"),
    Entry("flashinfer-fa2-planned", "decode", "planned:PlannedDecode", "fa2", label="fa2 planned"),
    Entry("flashinfer-fa3", "decode", "flashinfer:Decode", "fa3", since="0.6.0", label="fa3"),
    Entry("flashinfer-cuda-cores", "decode", "flashinfer:Decode", "cuda-cores", label="CUDA cores"),
    Entry(
        "flashinfer-batch-attention",
        "decode",
        "batch_attention:BatchAttention",
        "batch-attention",
        label="BatchAttention",
    ),
    Entry("flashinfer-xqa", "decode", "xqa:Xqa", "xqa", since="0.5.3", label="XQA"),
    Entry("flashinfer-graph-auto", "decode", "flashinfer:GraphDecode"),
    Entry(
        "flash-attn-3",
        "decode",
        "flash_attn3:FlashAttn3",
        "flash-attn-3",
        words=("fa3", "fa"),
        label="FlashAttention-3",
    ),
    Entry(
        "flash-attn-3-precomputed",
        "decode",
        "flash_attn3:FlashAttn3Precomputed",
        "flash-attn-3",
        label="FlashAttention-3, precomputed",
    ),
    Entry(
        "vllm-triton",
        "decode",
        "vllm:VllmTriton",
        "triton-unified",
        words=("TRITON_ATTN",),
        label="vLLM's Triton",
    ),
    Entry(
        "vllm-flash-attn-3",
        "decode",
        "vllm:VllmFlashAttn3",
        "flash-attn-3",
        words=("FLASH_ATTN",),
        label="vLLM's FlashAttention-3",
    ),
    Entry(
        "sglang-flash-attn-3",
        "decode",
        "sglang:SglangDecode",
        "flash-attn-3",
        label="SGLang's FlashAttention-3",
        cap="default",
    ),
    Entry("flashinfer-mla-fa2", "mla", "mla:FlashInferMla", "mla-fa2"),
    Entry("flashinfer-mla-fa3", "mla", "mla:FlashInferMla", "mla-fa3"),
    Entry("flashmla-dense", "mla", "mla:FlashMlaDense", "flashmla-dense", words=("FLASHMLA",)),
    Entry(
        "flashmla-sparse-fp8",
        "mla",
        "mla:FlashMlaSparse",
        "flashmla-sparse",
        words=("FLASHMLA_SPARSE",),
    ),
    Entry("flashmla-sparse-bf16", "mla", "mla:FlashMlaSparseBf16", "flashmla-sparse-prefill"),
    Entry(
        "flash-attn-3-mla",
        "mla",
        "mla:FlashAttn3Mla",
        "flash-attn-3",
        words=("fa3", "FLASH_ATTN_MLA", "FLASH_ATTN_MLA_SPARSE"),
    ),
    Entry(
        "sglang-flash-attn-3-mla",
        "mla",
        "sglang:SglangMla",
        "flash-attn-3",
        label="SGLang's FlashAttention-3, MLA",
        cap="default",
    ),
    Entry(
        "sglang-triton-mla",
        "mla",
        "sglang:SglangTritonMla",
        "triton-decode",
        label="SGLang's Triton, MLA",
    ),
    Entry("flashinfer-prefill-auto", "extend", "flashinfer:Prefill"),
    Entry("flashinfer-prefill-fa2", "extend", "flashinfer:Prefill", "fa2"),
    Entry("flashinfer-prefill-fa3", "extend", "flashinfer:Prefill", "fa3"),
    Entry(
        "flashinfer-prefill-fa2-uniform",
        "extend",
        "flashinfer:UniformPrefill",
        "fa2",
        since="0.7.2.post1",
    ),
    Entry("flashinfer-prefill-fa2-planned", "extend", "planned:PlannedPrefill", "fa2"),
    Entry(
        "flashinfer-batch-attention-extend",
        "extend",
        "batch_attention:BatchAttention",
        "batch-attention",
    ),
    Entry("flash-attn-3-extend", "extend", "flash_attn3:FlashAttn3Extend", "flash-attn-3"),
    Entry(
        "sglang-flash-attn-3-extend",
        "extend",
        "sglang:SglangExtend",
        "flash-attn-3",
        label="SGLang's FlashAttention-3, several queries",
        cap="default",
    ),
)

TABLE = {entry.name: entry for entry in _ENTRIES}
BACKENDS, MLA_BACKENDS, EXTEND_BACKENDS = (
    tuple(entry.name for entry in _ENTRIES if entry.plans == plans) for plans in PLANNABLE
)


def installed_version(distribution: str) -> str:
    """Version of an installed distribution, or the empty string."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def entry_of(name: str, plans: str = "") -> Entry:
    """The entry of a name; ValueError lists the valid names, those that plan `plans`.

    `NAME@CAP` is the entry of a mode under another cap of splits.
    """
    require_type("backend", name, str)
    mode, _, cap = name.partition("@")
    entry = TABLE.get(mode)
    if entry is None or plans not in ("", entry.plans):
        names = [entry.name for entry in _ENTRIES if plans in ("", entry.plans)]
        kind = f" for {plans}" if plans else ""
        raise ValueError(f"backend must be one of {', '.join(names)}{kind}, got {name!r}")
    if name == mode:
        return entry
    if not entry.cap:
        raise ValueError(f"backend {mode} takes no cap of splits, got {name!r}")
    from ..schedule.caps import require_cap

    require_cap(cap)
    return replace(
        entry,
        name=name,
        cap=cap,
        label=f"{entry.label}, {cap}",
    )
