"""Kernel names as CUDA tools spell them, down to the family they prove."""

import pytest
import torch

from attnlib.core.backends.table import family_of
from attnlib.measure import trace
from attnlib.measure.trace import kernel_family, short_name

TRAITS = "flashinfer::KernelTraits<(flashinfer::MaskMode)0, 16u, 1u, __nv_bfloat16, int>"
FA2 = f"void flashinfer::BatchPrefillWithPagedKVCacheKernel<{TRAITS}, PagedParams>(PagedParams)"
FA3 = (
    "void flashinfer::PrefillWithKVCacheKernel<flashinfer::SparseCollectiveMainloop<"
    "AdditionalParams, flashinfer::AttentionKernelTraits<true, 128, 128, 2>, false>, "
    "flashinfer::BatchPrefillPersistentTileScheduler<int>>(Params::Mainloop, Params::Epilogue)"
)
FA2_RAGGED = FA2.replace("WithPagedKV", "WithRaggedKV").replace("PagedParams", "RaggedParams")
FA3_RAGGED = FA3.replace("SparseCollectiveMainloop", "CollectiveMainloop")
FA3_FP8 = FA3.replace("PrefillWithKVCacheKernel", "FP8PrefillWithKVCacheKernel")
CUDA_CORES = (
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 4u, "
    "flashinfer::DefaultAttention<false, false>, BatchDecodeParams>(BatchDecodeParams)"
)
FLASH_ATTN_3 = (
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<"
    "flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, "
    "cutlass::bfloat16_t, float, cutlass::arch::Sm90, true, false, false, true>, "
    "flash::CollectiveEpilogueFwd<cute::C<128> >, flash::VarlenDynamicPersistentTileScheduler<128, "
    "128, 256, 128, true, true, true, true> > > >(flash::FlashAttnFwdSm90<Mainloop>::Params)"
)
FLASH_ATTN_3_MANGLED = (
    "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_25"
    "CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJNS5_1CILi2EEENS7_ILi1EEES9_EEE"
)
FA3_MANGLED = "_ZN10flashinfer24PrefillWithKVCacheKernelINS_24SparseCollectiveMainloopI16Additional"
FLASH_ATTN_3_COMBINE = (
    "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<16>, cute::C<64> "
    ">, 4, 256, 1, false, true, cutlass::bfloat16_t, float, cutlass::arch::Sm90> >(Params)"
)
FLASH_ATTN_3_PREPARE = (
    "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int, int, int const*, bool, int)"
)

MLA_FA2 = (
    "void flashinfer::mla::BatchMLAPagedAttentionKernel<flashinfer::mla::KernelTraits<false, 2u, "
    "false, 512u, 64u, 64u, 64u, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, int>, flashinfer::"
    "MLAParams<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, int> >(flashinfer::MLAParams<int>)"
)
MLA_FA3 = MLA_FA2.replace("MLAPagedAttention", "MLAPageAttentionHopper")
FLASHMLA_SPARSE = (
    "void legacy::sm90::decode::sparse::flash_fwd_splitkv_mla_fp8_sparse_kernel<legacy::sm90::"
    "decode::sparse::KernelTemplate<(ModelType)0, 64>, legacy::sm90::decode::sparse::TmaParams<"
    "cute::tuple<int, int, int, int>, cute::TiledCopy<int> > >(SparseAttnDecodeParams, TmaParams)"
)
FLASHMLA_DENSE = (
    "void legacy::sm90::decode::dense::flash_fwd_splitkv_mla_kernel<legacy::sm90::decode::dense::"
    "Traits<cutlass::bfloat16_t, 576>, TmaParams<cute::tuple<int, int> > >(DenseAttnDecodeParams)"
)

CUTLASS_GEMM = (
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel"
    "::GemmUniversal<cute::tuple<int> > > >(Params)"
)
INDEX_SELECT = (
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, 2>(T)"
)
GEMV = "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(Params)"
MERGE = "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u>(float*, float*, int)"
NVJET = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"

NAMES = [
    (MLA_FA2, "BatchMLAPagedAttentionKernel", "mla-fa2"),
    (MLA_FA3, "BatchMLAPageAttentionHopperKernel", "mla-fa3"),
    (FLASHMLA_SPARSE, "flash_fwd_splitkv_mla_fp8_sparse_kernel", "flashmla-sparse"),
    (FLASHMLA_DENSE, "flash_fwd_splitkv_mla_kernel", "flashmla-dense"),
    (FLASH_ATTN_3, "FlashAttnFwdSm90", "flash-attn-3"),
    (FLASH_ATTN_3_COMBINE, "FlashAttnFwdCombine", ""),
    (FLASH_ATTN_3_PREPARE, "prepare_varlen_num_blocks_kernel", ""),
    (CUTLASS_GEMM, "GemmUniversal", ""),
    (FA2, "BatchPrefillWithPagedKVCacheKernel", "fa2"),
    (FA3, "PrefillWithKVCacheKernel", "fa3"),
    (FA2_RAGGED, "BatchPrefillWithRaggedKVCacheKernel", "fa2"),
    (FA3_RAGGED, "PrefillWithKVCacheKernel", "fa3"),
    (FA3_FP8, "FP8PrefillWithKVCacheKernel", "fa3"),
    (CUDA_CORES, "BatchDecodeWithPagedKVCacheKernel", "cuda-cores"),
    (MERGE, "PersistentVariableLengthMergeStatesKernel", ""),
    (INDEX_SELECT, "indexSelectLargeIndex", ""),
    (GEMV, "kernel", ""),
    ("Memset (Device)", "Memset", ""),
    ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD", ""),
    *((bare, bare, "") for bare in ("build_kv_indices_kernel", NVJET, "")),
    ("flash_fwd_mla_combine_kernel", "flash_fwd_mla_combine_kernel", ""),
    ("flash_fwd_splitkv_kernel", "flash_fwd_splitkv_kernel", "flash-attn-2"),
    (FLASH_ATTN_3_MANGLED, "FlashAttnFwdSm90", "flash-attn-3"),
    (FA3_MANGLED, "PrefillWithKVCacheKernel", "fa3"),
]


@pytest.mark.parametrize("name, short, family", NAMES)
def test_a_kernel_is_called_by_its_functions_name_and_proves_its_family(name, short, family):
    assert short_name(name) == short
    names = map(short_name, [name, "Memset (Device)", "merge_kernel"])
    assert kernel_family(names, family_of) == family


def test_a_call_that_ran_two_families_says_so():
    names = ["FlashAttnFwdSm90", "PrefillWithKVCacheKernel", "BatchDecodeWithPagedKVCacheKernel"]
    assert kernel_family([*names, *names], family_of) == "cuda-cores+fa3+flash-attn-3"


@pytest.mark.gpu
def test_a_trace_names_the_kernels_of_a_call_and_how_often_they_run():
    x = torch.zeros(2**20, device="cuda")
    kernels = trace.trace_kernels(
        lambda: (
            x.add_(1),
            x.add_(1),
            x.mul_(2),
        )
    )
    assert sum(kernel.launches for kernel in kernels) == 3
    assert all(kernel.gpu_us > 0 for kernel in kernels)


@pytest.mark.gpu
def test_kernel_times_are_of_each_call_and_calls_that_differ_are_refused():
    x = torch.zeros(2**20, device="cuda")
    calls = iter(range(99))
    times = trace.kernel_times(
        lambda: (
            x.add_(1),
            x.mul_(2),
        ),
        5,
    )
    assert len(times) == 5 and min(times) > 0
    with pytest.raises(RuntimeError, match="2 calls must run equally many kernels, saw 3 in all"):
        trace.kernel_times(lambda: [x.add_(1) for _ in range(next(calls))], 2)
