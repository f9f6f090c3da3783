"""Calls from public threads on which a selection was told wrongly, and the engines' answers."""

import json

import pytest

from attnlib import cli

MHA = ("--heads", "32/8")
SPARSE = ("--mode", "sparse_mla", "--heads", "8/1")
VLLM, SGLANG = ("--library", "vllm==0.33.0"), ("--library", "sglang==0.5.23")
GEMMA = ("--mode", "decode", "--heads", "8/2", "--head-dim", "256", "--call", "model=gemma4")
BRANCH = ("--mode", "target_verify", *MHA, "--call", "eagle_topk=1")
FP8_DEEPSEEK = ("--kv-dtype", "fp8", "--call", "model=deepseek")
GLM = ("--call", "model=GlmMoeDsaForCausalLM")
DEEPSEEK_V4 = (*SPARSE, "--call", "model=deepseek-v4")
MHA_DECODE = ("--mode", "decode", *MHA)
MIMO = ("--call", "model=MiMoV2FlashForCausalLM")
LATENT_96 = ("--mode", "mla", "--heads", "96/1")
WIDE_BLOCK = ("--policy", "FLASHINFER", "--page-size", "256")
OFFLINE, FP8 = ("--call", "cubins=no"), ("--kv-dtype", "fp8_e4m3")
NAMED_AUTO = ("--kv-dtype", "auto")
NAMED_BF16 = ("--kv-dtype", "bfloat16")
V32 = ("--call", "model=DeepseekV32ForCausalLM")
KIMI_FIXED = ("--mode", "mla", "--heads", "16/1", "--call", "batch_invariant")
KIMI_FIXED += ("--call", "model=KimiK25ForConditionalGeneration")
FIXED = ("--mode", "decode", *MHA, "--call", "fixed_split")


def explained(capsys, *arguments):
    assert cli.main(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "backend", "problem"),
    [
        ((*VLLM, "--gpu", "sm89", *GEMMA), "TRITON_ATTN", ""),
        ((*VLLM, "--gpu", "h100", *GEMMA), "FLASH_ATTN", ""),
        (("--library", "vllm==0.22.0", "--gpu", "h100", *GEMMA), "TRITON_ATTN", ""),
        ((*VLLM, "--gpu", "sm90", *MHA_DECODE, *WIDE_BLOCK), "FLASHINFER", ""),
        ((*VLLM, "--gpu", "B200", *MHA_DECODE, *OFFLINE), "FLASHINFER", ""),
        ((*VLLM, "--gpu", "B200", *MHA_DECODE, *OFFLINE, *FP8), "FLASHINFER", "no FP8 query"),
        ((*SGLANG, "--gpu", "sm100", *BRANCH), "trtllm_mha", ""),
        ((*SGLANG, "--gpu", "sm90", *BRANCH), "fa3", ""),
        ((*SGLANG, "--gpu", "sm90", *BRANCH, "--page-size", "16"), "flashinfer", ""),
        ((*SGLANG, "--gpu", "sm120", *SPARSE, *FP8_DEEPSEEK), "trtllm", "SM100 and SM103"),
        ((*SGLANG, "--gpu", "sm100", *SPARSE, *FP8_DEEPSEEK), "trtllm", ""),
        *(((*SGLANG, "--gpu", gpu, *FIXED), "fa3", "") for gpu in ("sm80", "sm89", "sm90")),
        ((*SGLANG, "--gpu", "sm120", *FIXED), "flashinfer", ""),
        ((*VLLM, "--gpu", "sm100", *SPARSE, *GLM), "FLASHINFER_MLA_SPARSE", ""),
        (
            (*VLLM, "--gpu", "sm100", *SPARSE, *GLM, "--kv-dtype", "bfloat16"),
            "FLASH_ATTN_MLA_SPARSE_FA4",
            "",
        ),
        (
            ("--library", "vllm==0.19.0", "--gpu", "sm90", "--mode", "decode", *MHA),
            "FLASH_ATTN",
            "",
        ),
        ((*VLLM, "--gpu", "sm121", "--mode", "decode", *MHA), "FLASH_ATTN", ""),
        ((*VLLM, "--gpu", "sm90", *DEEPSEEK_V4), "FLASHMLA_SPARSE_DSV4", ""),
        ((*VLLM, "--gpu", "sm120", *DEEPSEEK_V4), "FLASHINFER_MLA_SPARSE_DSV4", ""),
        ((*VLLM, "--gpu", "sm89", *DEEPSEEK_V4), "FLASHMLA_SPARSE_DSV4", "needs Hopper or SM100"),
        (
            ("--library", "vllm==0.22.1", "--gpu", "sm100", *DEEPSEEK_V4),
            "V4_FLASHMLA_SPARSE",
            "",
        ),
        ((*VLLM, "--gpu", "L40S", *MHA_DECODE, "--call", "model=gpt-oss"), "TRITON_ATTN", ""),
        ((*VLLM, "--gpu", "GH200", *MHA_DECODE, *MIMO), "FLASH_ATTN_DIFFKV", ""),
        ((*VLLM, "--gpu", "sm120", *MHA_DECODE, *MIMO), "TRITON_ATTN_DIFFKV", ""),
        (
            ("--library", "vllm==0.22.0", "--gpu", "sm80", *MHA_DECODE, *MIMO),
            "FLASH_ATTN_DIFFKV",
            "FlashAttention 3 or 4",
        ),
        ((*VLLM, "--gpu", "sm120", *SPARSE, *NAMED_BF16, *V32), "FLASHINFER_MLA_SPARSE_SM120", ""),
        ((*VLLM, "--gpu", "sm120", *SPARSE, *NAMED_BF16), "", "bfloat16 by name is refused"),
        (
            (*VLLM, "--gpu", "sm100", *SPARSE, *GLM, "--kv-dtype", "auto"),
            "FLASHINFER_MLA_SPARSE",
            "",
        ),
        (
            (*VLLM, "--gpu", "sm100", "--mode", "mla", "--heads", "96/1"),
            "FLASHINFER_MLA",
            "64 and 128",
        ),
        ((*SGLANG, "--gpu", "sm120", *KIMI_FIXED), "flashinfer", ""),
        (
            ("--library", "sglang==0.5.10.post1", "--gpu", "H200", "--mode", "decode", *MHA),
            "fa3",
            "",
        ),
    ],
)
def test_the_pick_is_the_engines(capsys, arguments, backend, problem):
    choice = explained(capsys, *arguments)
    assert choice["backend"] == backend and problem in choice["problem"]
    assert bool(choice["problem"]) == bool(problem)


@pytest.mark.parametrize(
    ("release", "options", "why"),
    [
        ("0.6.9", ("decode", "--head-dim", "512"), "head_dim 64, 128 or 256"),
        ("0.6.13", ("decode", "--head-dim", "96"), "head_dim 64, 128, 256 or 512"),
        ("0.6.13", ("decode", "--head-dim", "80"), "in prefill alone"),
        ("0.6.13", ("prefill_paged", "--page-size", "8"), "16 tokens and more"),
    ],
)
def test_trtllm_gen_has_the_kernels_that_its_index_lists(capsys, release, options, why):
    where = ("--library", f"flashinfer=={release}", "--gpu", "sm100", "--policy", "trtllm-gen")
    assert cli.main(["explain", *where, *MHA, "--mode", *options]) == 2
    assert why in capsys.readouterr().err
    assert cli.main(["explain", *where, *MHA, "--mode", options[0]]) == 0


def test_every_option_counts_with_diff(capsys):
    diff = ("--diff", "vllm==0.24.0", "vllm==0.25.0", "--gpu", "sm90")
    pinned = explained(capsys, *diff, "--policy", "FLASHINFER", "--mode", "decode")
    assert {row["after"] for row in pinned} == {"FLASHINFER (xqa)"}
    assert {row["mode"] for row in pinned} == {"decode"}
    fp8 = explained(capsys, *diff, "--policy", "FLASHINFER", "--kv-dtype", "float8_e4m3fn")
    assert {row["dtype"] for row in fp8} == {"bfloat16/float8_e4m3fn"}
    one = explained(capsys, *diff, "--policy", "FLASHINFER", "--heads", "24/8")
    assert {row["model"] for row in one} == {"24/8 heads, head_dim 128"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--heads 32/8 --gpu sm90 --call fixed_split", "tests fixed_split in these calls"),
        ("--heads 32/8 --gpu sm90 --mode decode --dtype float16 --call topk=4", "tests topk"),
        ("--gpu sm90 --mode mla --page-size 64 --call softcap", "tests softcap"),
        ("--heads 32/8 --library vllm==0.33.0", "--library must be left out"),
        ("--mode decode,mla --policy FLASHINFER", "policy of vllm in mla must be one of auto"),
    ],
)
def test_what_does_not_count_is_refused_with_diff(options, word, capsys):
    assert cli.main(["explain", "--diff", "vllm==0.24.0", "vllm==0.33.0", *options.split()]) == 2
    assert word in capsys.readouterr().err
