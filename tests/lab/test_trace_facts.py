"""What a trace tells beside its kernels' times: lengths, waits, blocks, cards; and pasted sums."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import traces
from support.traces import Writer, runs
from support.words import flat

import attnlib
from attnlib import cli
from attnlib.core.backends.table import FAMILIES, ROLE_OF, family_of, role_of
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import plan_splits
from attnlib.engines import sglang, vllm
from attnlib.lab.fix_gains import gains
from attnlib.lab.pasted import KernelTotals
from attnlib.lab.patterns import PATTERNS
from attnlib.lab.trace_known import PLUGIN_SINCE, with_switch
from attnlib.measure.kernel_sums import TORCH, KernelSum, KernelSums
from attnlib.select.libraries import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "data" / "traces"
THREADS = Path(__file__).parent / "traces"
PASTED = ROOT / "tests" / "measure" / "pasted"
STEPS = 6
DECODE = "step[DECODE bs=16]"
SPLIT_KV = "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4> >(P)"
FEW, AGAIN, CAP = (pattern.name for pattern in PATTERNS[-3:])
PREPARE = runs(traces.PREPARE, 2.0)


def served(path, *attention, mark=DECODE, **how):
    """The diagnosis of a trace of decode steps, all alike."""
    writer = Writer()
    for _ in range(STEPS):
        writer.step(attention, mark=mark, **how)
    return writer.save(path)


def patterns_of(path, **shape):
    found = attnlib.diagnose(path, **shape).patterns
    return [] if found.empty else found.pattern.tolist()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.json"


# Lengths


def test_lengths_of_the_marks_are_shown_per_step_and_taken_for_gains(path):
    found = attnlib.diagnose(THREADS / "sgl_detailed_decode.json.gz")
    rows = found.lengths()
    assert rows["KV tokens"].tolist() == [50923 + 32 * step for step in range(12)]
    assert rows["KV tokens a request"][0] == pytest.approx(1591.3, abs=0.1)
    assert found.shape["kv_len"] == round(50923 / 32 + 5.5)
    told = found.details
    assert "kv_len is the mean" in told and "50,923" in told
    assert "has no request lengths" not in told
    assert found.to_dict()["lengths"][0]["requests"] == 32
    assert attnlib.diagnose(THREADS / "sgl_detailed_decode.json.gz", kv_len=9).shape["kv_len"] == 9


def test_two_queries_per_request_are_no_plain_decode():
    found = attnlib.diagnose(THREADS / "sgl_detailed_two_queries.json.gz")
    assert found.lengths()["queries per request"].eq(2.0).all()
    assert [*found.usual] == ["verify"]


def test_a_mark_without_lengths_has_none_and_one_request_is_the_longest(path):
    found = attnlib.diagnose(TRACES / "fa3_once.json.gz")
    assert found.lengths().empty
    assert "The trace has no request lengths. Pass yours: --shape" in repr(found)
    mark = "step[DECODE bs=1 g_sq=1 g_sqsq=1 g_sqsk=777 g_sk=777]"
    alone = attnlib.diagnose(served(path, runs(traces.FLASH_ATTN_3), mark=mark))
    assert alone.lengths().longest.eq(777).all()
    mark = "step[DECODE bs=2 g_sq=2 g_sqsq=2 g_sqsk=777 g_sk=777]"
    two = attnlib.diagnose(served(path, runs(traces.FLASH_ATTN_3), mark=mark))
    assert "longest" not in two.lengths()


# The cap of splits

SUMS = "step[DECODE bs=64 g_sq=64 g_sqsq=64 g_sqsk=640000 g_sk=640000]"
MERGE = runs(traces.COMBINE, 2.0)


@pytest.mark.parametrize(
    "mark, attention, shape, shown",
    [
        (SUMS, (), {"heads": "128/8"}, True),
        (SUMS, (), {}, False),
        (SUMS, (MERGE,), {"heads": "128/8"}, False),  # merges run: a build before the rule
        (SUMS, (), {"heads": "8/1"}, False),  # few rows: splits are left, so merges would run
        (SUMS, (MERGE,), {"heads": "8/1"}, True),
        (SUMS, (), {"heads": "128/1", "head_dim": 576}, True),  # MLA
        (SUMS, (), {"heads": "128/8", "head_dim": 512}, False),  # no such kernel
        (SUMS.replace("=640000", "=999999999"), (), {"heads": "128/8"}, False),  # too long
        ("step[DECODE bs=64]", (), {"heads": "128/8"}, False),
        ("step[DECODE bs=64]", (), {"heads": "128/8", "kv_len": 9000}, True),
        (
            "execute_64_context_0(sq0sk0sqsq0sqsk0)_generation_64(sq64sk640000sqsq64sqsk640000)",
            (),
            {"heads": "128/8"},
            False,
        ),
    ],
)
def test_sglangs_cap_of_splits_shows_where_the_model_of_its_rule_says_so(
    mark, attention, shape, shown, path
):
    kernels = (runs(traces.FLASH_ATTN_3), *attention)
    served(path, *kernels, mark=mark, ahead=[PREPARE])
    assert (CAP in patterns_of(path, **shape)) == shown


def test_the_cap_is_told_beside_the_one_before_and_heads_are_asked_for(path):
    served(path, runs(traces.FLASH_ATTN_3), mark=SUMS, ahead=[PREPARE])
    row = attnlib.diagnose(path, heads="128/8").patterns.iloc[0]
    call = SchedulerFacts(64, 128, 8, 128, 1, 10_000, 132, 1, causal=True, varlen_q=True)
    assert f"at most 1 splits of a request, {call.split_cap} by the rule before" in row.evidence
    assert "10,000 tokens in the mean" in row.evidence
    asked = "Pass --shape 'heads=32/8 lens=...' to check SGLang's cap of splits."
    assert asked in repr(attnlib.diagnose(path))
    assert asked not in repr(attnlib.diagnose(path, heads="128/8"))


REAL = TRACES / "sglang_fa3.json.gz"
SHAPE = {"heads": "8/1", "page_size": 1}


def test_the_cap_is_judged_by_the_length_of_every_request():
    found = attnlib.diagnose(REAL, **SHAPE, lens="65536+2048x15")
    tokens = np.array([65536] + [2048] * 15)
    call = SchedulerFacts(16, 8, 1, 128, 1, 65536, 132, 1, causal=True, varlen_q=True)
    splits = {}
    for build in ("sglang", "sglang-0.4.4"):
        cap = replace(call, build=build).split_cap
        capped = replace(call, build="sglang", num_splits=cap)
        splits[build] = plan_splits(
            capped,
            tokens,
            np.ones(16, int),
        ).num_splits.max()
    now, then = splits.values()
    assert now < then
    (row,) = found.patterns.to_dict("records")
    assert row["pattern"] == CAP
    words = f"the longest of 16 requests has 65,536 tokens and gets {now} splits, {then} by that"
    assert words in row["evidence"] and "in the mean" not in row["evidence"]
    assert found.shape["kv_len"] == 6016
    assert found.shape["longest"] == 65536


def test_a_cap_that_no_request_meets_is_no_pattern(path):
    served(path, runs(traces.FLASH_ATTN_3), MERGE, mark=DECODE, ahead=[PREPARE])
    assert patterns_of(path, heads="8/1", kv_len=65536) == [CAP]
    assert patterns_of(path, heads="8/1", lens="65536x16") == []


def test_lengths_that_are_stated_twice_or_drawn_are_refused(fails):
    for shape, why in {
        "lens=ragged:8192x16": "lens must not be drawn here, got ragged:8192x16",
        "lens=8192x15": "requests of lens must be 16, as the trace marks its steps, got 15",
    }.items():
        assert why in fails("diagnose", str(REAL), "--shape", shape)
    with pytest.raises(ValueError, match="kv_len must be left out where lens says it, got 8192"):
        attnlib.diagnose(REAL, lens="8192x16", kv_len=8192)


def test_gains_are_of_batches_whose_mean_and_longest_are_alike(published_records):
    trace = TRACES / "fa2_unsplit.json.gz"
    told = []
    for stated in ({"lens": "65536+2048x32"}, {"kv_len": 3972}):
        found = attnlib.diagnose(trace, heads="32/8", page_size=16, **stated)
        told.append(found.patterns.iloc[0]["by the records"])
    each, mean = told
    assert "kv_len 3972, longest 65536, " in each
    assert each.startswith("Possible saving per step: 5,")
    assert each != mean
    rows = gains()["plan"]["rows"]
    assert any(row["kv_len"] < row["longest"] / 10 for row in rows)


# Waits


@pytest.mark.parametrize(
    "name, least, most",
    [
        ("lengths_copied", 900, 1000),
        ("fa2_host", 900, 1000),
        ("prefill_decode", 900, 1100),
    ],
)
def test_the_host_waits_in_a_copy_to_pageable_memory(name, least, most):
    found = attnlib.diagnose(TRACES / f"{name}.json.gz")
    around = found.around().set_index("step").loc["decode"]
    assert least < around["us the host waits"] < most
    call = "cudaMemcpyAsync: Memcpy DtoH (Device -> Pageable)"
    idle = found.host_calls().set_index(["step", "call"])["us the GPU idles, a step"]
    assert idle["decode", call] < 50
    assert "The CPU waits" not in found.details, "the GPU works meanwhile"
    assert call in found.host_calls().call.tolist()
    for step in found.usual["decode"]:
        longest = max(step.waits, key=lambda wait: wait.length_us)
        assert longest.name == call and longest.length_us > least - 30


def test_a_copy_of_lengths_with_which_a_step_begins_is_a_wait():
    found = attnlib.diagnose(THREADS / "lengths_copied_pageable.json.gz")
    assert found.patterns["us per step"].tolist() == [701.5]
    assert found.around()["us the host waits"].tolist() == [701.5]


def waiting(path, call, copy_us, call_us):
    """Steps before which the host makes a copy of `copy_us` in a call of `call_us`, and idles."""
    writer = Writer()
    for _ in range(STEPS):
        writer.step([runs(traces.FLASH_ATTN_3)], ahead=[PREPARE], mark=DECODE)
        number = writer.launch(call)
        writer.events[-1]["dur"] = call_us
        where = {"device": 0, "correlation": number, "bytes": 64}
        writer._add(
            "gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", writer.clock, copy_us, **where
        )
        writer.idle(call_us + 20.0)
    return attnlib.diagnose(writer.save(path))


def test_a_wait_that_the_gpu_idles_under_is_told(path):
    call = "cudaMemcpyAsync: Memcpy DtoH (Device -> Pageable)"
    found = waiting(path, "cudaMemcpyAsync", 2.0, 300.0)
    idle = found.host_calls().set_index("call")["us the GPU idles, a step"][call]
    words = f"The CPU waits 300 us per decode step in {call}. "
    assert f"{words}The GPU is idle for {idle:,.0f} us of that." in flat(repr(found))


def test_a_call_that_returns_before_its_copy_is_done_is_no_wait(path):
    done = waiting(path, "cudaMemcpyAsync", 2.0, 300.0)
    begun = waiting(path, "cudaMemcpyAsync", 400.0, 300.0)
    for found, us in ((done, 300.0), (begun, 0.0)):
        assert found.around()["us the host waits"].tolist() == pytest.approx([us])
    rows = done.host_calls().set_index("call")["us the GPU idles, a step"]
    assert rows["cudaMemcpyAsync: Memcpy DtoH (Device -> Pageable)"] == pytest.approx(297.5, abs=2)
    assert rows["none of 5 us or more: other code of the host"] >= 20.0


def test_a_call_of_any_name_that_the_gpu_idles_under_is_named(path):
    writer = Writer()
    for _ in range(STEPS):
        writer.step([runs(traces.FLASH_ATTN_3)], ahead=[PREPARE], mark=DECODE)
        writer._add("cuda_runtime", "cudaMalloc_v3020", writer.clock, 80.0, correlation=0)
        writer._add("cuda_driver", "cuMemAlloc_v2", writer.clock + 100.0, 4.0, correlation=0)
        writer.idle(120.0)
    found = attnlib.diagnose(writer.save(path))
    rows = found.host_calls().set_index("call")["us the GPU idles, a step"]
    assert rows["cudaMalloc"] == pytest.approx(80.0) and "cuMemAlloc" not in rows
    assert found.around()["us the host waits"].tolist() == [0.0]
    idle = found.around()[["us idle before", "us idle later"]].to_numpy().sum()
    assert rows.sum() == pytest.approx(idle, abs=0.1)


# Blocks, and work that is repeated


@pytest.mark.parametrize(
    "kernel, grid, us, fix",
    [
        (SPLIT_KV, (1, 1, 16), 300.0, "num_splits=0"),
        (SPLIT_KV, (1, 1, 66), 300.0, "num_splits=0"),
        (SPLIT_KV, (1, 1, 67), 300.0, None),
        (SPLIT_KV, (1, 1, 16), 19.0, None),
        ("_fwd_grouped_kernel_stage1", (1, 4, 8), 90.0, "--triton-attention-num-kv-splits"),
        ("_tq_decode_stage1", (1, 8, 1), 90.0, "tq_max_kv_splits_for_cuda_graph"),
        (traces.CUDA_CORES, (4, 8, 1), 90.0, "disable_split_kv"),
        (traces.FLASH_ATTN_3, (4, 1, 1), 90.0, "flash_attn_max_num_splits_for_cuda_graph"),
        ("void flash_fwd_splitkv_mla_kernel<T>(P)", (2, 1, 1), 90.0, "get_mla_metadata"),
        ("kernel_mha", (1, 8, 1), 90.0, "no parameter of this kernel is known"),
        ("_my_own_attn_decode", (1, 8, 1), 90.0, "no parameter of this kernel is known"),
    ],
)
def test_few_blocks_of_any_kernel_name_the_parameter_that_raises_them(kernel, grid, us, fix, path):
    ahead = [PREPARE] if kernel == traces.FLASH_ATTN_3 else []
    served(path, runs(kernel, us, grid=grid), ahead=ahead)
    found = attnlib.diagnose(path).patterns
    if fix is None:
        assert found.empty
        return
    (row,) = found.to_dict("records")
    assert row["pattern"] == FEW
    assert fix in row["fix"]
    assert "fewer than the 132 SMs" in row["evidence"]


PUT = "void at::native::index_elementwise_kernel<128, 4, at::native::index_put_kernel_impl<T> >(T)"


@pytest.mark.parametrize(
    "kernel, shown",
    [
        (traces.INDEX, True),
        ("create_flashinfer_kv_indices_triton", True),
        (PUT, False),
        (traces.ADD, False),
        (traces.GEMM, False),
    ],
)
def test_indices_that_are_made_in_every_layer_show_and_writes_by_index_do_not(kernel, shown, path):
    served(
        path,
        runs(kernel, 2.0),
        runs(traces.FLASH_ATTN_3),
        ahead=[PREPARE],
        layers=8,
    )
    assert (AGAIN in patterns_of(path)) == shown


def test_indices_that_are_made_in_few_layers_or_with_other_grids_do_not_show(path):
    kernels = [runs(traces.INDEX, 2.0, grid=(layer + 1, 1, 1)) for layer in range(8)]
    writer = Writer()
    for _ in range(STEPS):
        left = iter(kernels)
        each = lambda writer, graph, left=left: next(left)(writer, graph)  # noqa: E731
        writer.step(
            [each, runs(traces.FLASH_ATTN_3)],
            ahead=[PREPARE],
            layers=8,
            mark=DECODE,
        )
    assert patterns_of(writer.save(path)) == []


# Names

OWN = "_my_own_attn_decode"


def test_an_unknown_kernel_that_is_named_like_attention_makes_steps(path):
    served(
        path,
        runs("_my_attn_metadata_pack", 90.0),
        runs(OWN, 30.0),
        runs("_rope_norm", 50.0),
    )
    found = attnlib.diagnose(path)
    assert len(found.steps) == STEPS
    assert {step.kind for step in found.steps} == {"decode"}
    (row,) = found.table().to_dict("records")
    assert row["kernel"] == OWN
    assert row["is"] == "attention (unknown)"
    assert row["a step"] == 4
    both = attnlib.diagnose(path, path)
    assert "attention" in both.rows.part.tolist()
    assert OWN not in both.rows.part.tolist()


def test_steps_of_an_unknown_kernel_are_found_beside_those_of_a_known_one(path):
    writer = Writer()
    for _ in range(STEPS):
        writer.step([runs(traces.FLASH_ATTN_3)], ahead=[PREPARE], mark="step[EXTEND bs=1]")
        writer.step([runs(OWN)], mark=DECODE)
    found = attnlib.diagnose(writer.save(path))
    names = {step.kind: step.attention[0].name for step in found.steps}
    assert names == {"prefill": "FlashAttnFwdSm90", "decode": OWN}
    assert len(found.steps) == 2 * STEPS


def test_work_that_is_not_named_like_attention_makes_no_steps(path):
    served(path, runs("_sparse_topk_indices"), runs("concat_and_cache_mla_kernel"))
    assert attnlib.diagnose(path).steps == []


def test_lightllms_second_stage_is_the_merge_of_its_first():
    table = attnlib.diagnose(THREADS / "lightllm_two_stages.json.gz").table()
    assert table["is"].tolist() == ["attention (triton-decode)", "merge"]


DENSE = ("fa2", "fa3", "cuda-cores")
FLASH = ("flash-attn-2", "flash-attn-3", "flash-attn-4")
FLASHINFER_CALLS = (*DENSE, "trtllm-gen", "xqa", "cudnn")
FLASHMLA = ("flashmla-dense", "flashmla-sparse", "flashmla-sparse-prefill")
FAMILIES_OF = {
    "fa2": ("fa2", "mla-fa2"),
    "fa3": ("fa3", "mla-fa3", "flash-attn-3"),
    "cuda-cores": ("cuda-cores",),
    "trtllm-gen": ("trtllm-gen",),
    "cute-dsl": ("cute-dsl",),
    "cute-dsl-monolithic": ("cute-dsl",),
    "cute-dsl-modular": ("cute-dsl",),
    "cudnn": ("cudnn",),
    "cutlass": ("cutlass",),
    "xqa": ("xqa",),
    "cutile": ("cutile",),
    "fmha_v2": ("fmha-v2",),
    "flashinfer": (*FLASHINFER_CALLS, "mla-fa2", "mla-fa3"),
    "triton": ("triton-decode", "triton-extend"),
    "trtllm_mha": ("trtllm-gen", "xqa"),
    "hpc_ops": ("hpc-ops",),
    "flashmla": FLASHMLA,
    "trtllm_mla": ("trtllm-gen",),
    "fa4": ("flash-attn-4",),
    "flashmla_kv": FLASHMLA,
    "flashmla_sparse": FLASHMLA,
    "trtllm": ("trtllm-gen",),
    "flashinfer_sparse_mla": ("sparse-mla",),
    "dsv4": ("flashmla-sparse",),
    "fa": FLASH,
    "fi": DENSE,
    "FLASHINFER": FLASHINFER_CALLS,
    "FLASH_ATTN": FLASH,
    "TRITON_ATTN": ("triton-unified", "triton-paged"),
    "FLEX_ATTENTION": ("flex-attention",),
    "TURBOQUANT": ("turboquant",),
    "TRITON_FLASHINFER": ("triton-unified", *FLASHINFER_CALLS),
    "TRITON_FLASH_ATTN": ("triton-unified", *FLASH),
    "HPC_ATTN": ("hpc-ops",),
    "FLASHINFER_MLA": ("trtllm-gen", "cute-dsl", "cutile"),
    "TOKENSPEED_MLA": ("tokenspeed-mla",),
    "CUTLASS_MLA": ("cutlass",),
    "FLASH_ATTN_MLA": FLASH,
    "FLASHMLA": FLASHMLA,
    "TRITON_MLA": ("triton-decode",),
    "FLASHINFER_MLA_SPARSE": ("trtllm-gen",),
    "FLASHMLA_SPARSE": FLASHMLA,
    "FLASH_ATTN_MLA_SPARSE_FA4": ("flash-attn-4",),
    "FLASH_ATTN_MLA_SPARSE": ("flash-attn-3",),
    "FLASHINFER_MLA_SPARSE_SM90": ("mla-fa2", "mla-fa3"),
    "FLASHINFER_MLA_SPARSE_SM120": ("sparse-mla",),
    "FLASHMLA_SPARSE_DSV4": FLASHMLA,
    "FLASHINFER_MLA_SPARSE_DSV4": ("trtllm-gen",),
    "V4_FLASHMLA_SPARSE": FLASHMLA,
    "FLASH_ATTN_DIFFKV": FLASH,
    "TRITON_ATTN_DIFFKV": ("triton-unified",),
}
"""What `explain` answers, of any library -> the families that it may run."""


def test_every_backend_that_explain_can_answer_has_a_family_in_a_trace():
    answers = set()
    for library in LIBRARIES.values():
        answers |= {*library.by_rule_only}
        for names in library.backends.values():
            answers |= {*names}
    assert answers == set(FAMILIES_OF)
    assert {family for families in FAMILIES_OF.values() for family in families} <= set(FAMILIES)


def test_every_name_of_a_family_or_role_is_found_as_what_it_is():
    for name, family in FAMILIES.items():
        for kernel in family.kernels:
            whole = kernel.replace("*", "x").replace("?", "9") + "_sm90"
            assert family_of(whole) == name, kernel
    for kernel, role in ROLE_OF.items():
        whole = kernel.replace("*", "x").replace("?", "8")
        assert role_of(whole) == role, kernel
        assert family_of(whole) == ""


# Cards


def test_gains_of_another_card_are_said_to_be_so(path, published_records):
    served(path, runs(traces.FA3, 40.0))
    same = attnlib.diagnose(path).patterns.iloc[0]["by the records"]
    assert "; NVIDIA H200). Pass heads" in same
    other = path.with_name("other.json")
    other.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA A100 80GB PCIe"))
    told = attnlib.diagnose(other).patterns.iloc[0]["by the records"]
    assert "; NVIDIA H200, not of this trace's NVIDIA A100 80GB PCIe)" in told


# Pasted sums


@pytest.mark.parametrize(
    "name, attention",
    [
        ("key_averages.txt", "attention (flash-attn-3)"),
        ("cuda_gpu_kern_sum.csv", "attention (flash-attn-2)"),
    ],
)
def test_pasted_sums_give_families_and_times_and_no_steps(name, attention):
    found = attnlib.diagnose(PASTED / name)
    table = found.table()
    assert table["is"][0] == attention and table.us.is_monotonic_decreasing
    assert table.share.sum() == pytest.approx(1.0)
    told = repr(found)
    assert "no steps" in told.splitlines()[0]
    assert attention in told
    assert "<table" in found._repr_html_()
    assert ("cut 1 names" in told) == (name == "key_averages.txt")
    form = json.loads(json.dumps(found.to_dict()))
    assert form["kernels"][0]["is"] == attention


def test_pasted_sums_are_not_compared(tmp_path, fails):
    trace = TRACES / "fa3_once.json.gz"
    sums = shutil.copy(PASTED / "key_averages.txt", tmp_path / "sums.txt")
    for pair in ((trace, sums), (sums, trace), (sums, sums)):
        words = fails("diagnose", *map(str, pair))
        assert f"{sums} must be a trace to be compared, it has sums without steps" in words


# Fixes by the engine, and what else a caller states


UNSPLIT = TRACES / "fa2_unsplit.json.gz"
BY_CLASS = "a plan that splits long requests (Fa2Planner), or FlashAttention-3"


@pytest.mark.parametrize(
    "marked, stated, planner",
    [
        ("", {}, "Fa2Planner"),
        ("", {"flashinfer": "0.7.2", "heads": "32/8"}, "Fa2Planner"),
        ("", {"vllm": "0.33.0"}, "ATTNLIB_VLLM_DECODE=planned, attnlib's plugin"),
        ("", {"sglang": "0.5.23"}, "ATTNLIB_SGLANG_DECODE=planned, attnlib's plugin"),
        ("SGLang", {}, "ATTNLIB_SGLANG_DECODE=planned, attnlib's plugin"),
        ("vLLM", {"vllm": "0.33.0"}, "ATTNLIB_VLLM_DECODE=planned, attnlib's plugin"),
        ("SGLang", {"sglang": "0.5.10"}, "Fa2Planner"),
        ("", {"vllm": "0.19.0"}, "Fa2Planner"),
        ("TensorRT-LLM", {}, "Fa2Planner"),
    ],
)
def test_a_planned_fix_is_the_switch_of_the_engine_that_is_stated_or_marks(marked, stated, planner):
    step = SimpleNamespace(mark=SimpleNamespace(engine=marked))
    assert with_switch(BY_CLASS, step, stated) == BY_CLASS.replace("Fa2Planner", planner)
    named = "on the GPU (attnlib.core.Fa2Planner)"
    told = named if planner == "Fa2Planner" else f"on the GPU ({planner})"
    assert with_switch(named, step, stated) == told


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_planned_fix_is_the_switch_of_the_engine_that_marked_the_steps(engine):
    fixes = attnlib.diagnose(TRACES / f"{engine}_flashinfer.json.gz").patterns.fix
    switch = f"ATTNLIB_{engine.upper()}_DECODE=planned"
    assert any(switch in fix for fix in fixes)
    assert not any("Fa2Planner" in fix for fix in fixes)


def test_the_switch_is_of_the_releases_that_the_plugin_takes():
    oldest = {"sglang": sglang.OLDEST, "vllm": vllm.OLDEST}
    assert {name: str(release) for name, release in PLUGIN_SINCE.items()} == oldest


def test_two_engines_served_no_trace(fails):
    words = "shape must name one engine, which served, got sglang=0.5.23 and vllm=0.33.0"
    with pytest.raises(ValueError, match=f"^{words}$"):
        attnlib.diagnose(UNSPLIT, vllm="0.33.0", sglang="0.5.23")
    shape = "heads=32/8 vllm=0.33.0 sglang=0.5.23"
    assert words in fails("diagnose", str(UNSPLIT), "--shape", shape)


def test_the_context_of_a_server_decides_a_known_problem(capsys):
    told = {"sglang": "0.5.16", "page_size": 16}
    trace = TRACES / "metadata_ops.json.gz"
    for context, known in ((131072, ["sglang-page-table-width"]), (8192, [])):
        found = attnlib.diagnose(trace, **told, context=context)
        assert [answer.problem.id for answer in found.known] == known
    with pytest.raises(ValueError, match="context must be an integer >= 1, got 'wide'"):
        attnlib.diagnose(trace, context="wide")
    shape = "page=16 lens=1024x16 context=131072 sglang=0.5.16"
    assert cli.main(["diagnose", str(trace), "--shape", shape]) == 0
    assert "[sglang-page-table-width]" in capsys.readouterr().out


def test_pasted_sums_with_flashinfers_fa3_say_what_to_ask():
    slow = "that is known to be slow (flashinfer since 0.6.0, ended in 0.6.4)"
    ask = "explain --library flashinfer==RELEASE, or advise"
    asks = f"If fa3 decodes here, {slow}: ask {ask}. [flashinfer-fa3-decode-auto]"
    kernels = (KernelSum("PrefillWithKVCacheKernel", 10.0, 4),)
    assert family_of(kernels[0].name) == "fa3"
    totals = KernelTotals(KernelSums("pasted.txt", TORCH, kernels))
    assert totals.unseen()[0] == asks
    others = (KernelSum("FlashAttnFwdSm90", 10.0, 4),)
    assert asks not in KernelTotals(KernelSums("pasted.txt", TORCH, others)).unseen()
