"""A trace made by hand for every known pattern, and for none; files that are no trace."""

import gzip
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version
from support import traces
from support.traces import GEMM, Writer, runs
from support.words import flat

import attnlib
from attnlib import cli
from attnlib.core.spec import AttnSpec
from attnlib.lab import diagnosis
from attnlib.lab.diagnose import ENOUGH, LEAST_STEPS, TraceChange
from attnlib.lab.diagnosis import DECODES
from attnlib.lab.fix_gains import gained, gains
from attnlib.lab.patterns import PATTERNS
from attnlib.lab.trace_known import PLANNER, fixes_of
from attnlib.measure.spans import short_name
from attnlib.select.explain import explain
from attnlib.select.known import PROBLEMS, how_much, problem_lines, to_data
from attnlib.select.libraries import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "data" / "traces"
STEPS = 6
DECODE = {"mark": "step[DECODE bs=16]"}
FA2_SPLIT = [
    runs(traces.FA2_16, grid=(264, 1, 8)),
    runs(traces.MERGE, 2.0),
]
WIDE = [
    runs(traces.FA2_128, grid=(64, 1, 8)),
    runs(traces.MERGE, 2.0),
]
COUNTS_LENGTHS = (traces.INDEX, traces.ADD, traces.SCAN, traces.ADD)
OPS = [runs(name, 2.0) for name in COUNTS_LENGTHS]
PLANNED = [lambda writer: writer.copy("DtoH", 68), lambda writer: writer.wait()]
PREPARE = runs(traces.PREPARE, 2.0)
HOST_PLAN = [lambda writer: writer.copy("HtoD"), lambda writer: writer.idle(90.0)]
CUTE_MLA = "flashinfercute_dslattentionmonolithicmla_decode_fp8"
HPC = "hpc::attention::decode::kernels::smallm_attention_decode_bf16_dynamic_splitk"
PAGED = "void vllm::paged_attention_v2_kernel<uint16_t, 128>(float*)"
SPLIT_KV = "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4> >(P)"
LENGTHS = {"mark": "step[DECODE bs=64 g_sq=64 g_sqsq=64 g_sqsk=640000 g_sk=640000]"}
WIDE_TABLE = runs(traces.METADATA, 40.0, grid=(16, 512, 1))


def served(*attention, count=STEPS, **how):
    """A trace of decode steps in CUDA graphs, all alike."""
    writer = Writer()
    for _ in range(count):
        writer.step(attention, **how)
    return writer


def eager(*attention):
    """Steps whose kernels are launched one by one."""
    writer = Writer()
    for _ in range(STEPS):
        for each in (runs(GEMM), *attention) * 4:
            each(writer)
            writer.idle(2.0)
        writer.copy("DtoH", 4)
    return writer


def half_planned():
    """Steps of fa2 of which two of six follow a plan on the GPU."""
    writer = Writer()
    for number in range(STEPS):
        ahead = [runs("plan_kernel", 2.0)] if number % 3 == 0 else ()
        writer.step(FA2_SPLIT, ahead=ahead)
    return writer


BAD = (
    served(runs(traces.FA3, 40.0), **DECODE),
    served(PREPARE, runs(traces.FLASH_ATTN_3)),
    served(*FA2_SPLIT, ahead=OPS),
    served(runs(traces.FA2_16, 300.0, grid=(4, 1, 8))),
    served(*WIDE, mark="step[TARGET_VERIFY bs=32]"),
    served(
        runs(
            traces.CUDA_CORES,
            grid=(16, 8, 1),
            block=(16, 4, 2),
        )
    ),
    served(*FA2_SPLIT, ahead=PLANNED, mark="execute_context_0(0)_generation_16(16)"),
    eager(*FA2_SPLIT),
    served(
        runs(
            traces.TRITON_2D,
            480.0,
            grid=(10, 8, 1),
        ),
        **DECODE,
    ),
    served(*FA2_SPLIT, ahead=HOST_PLAN),
    served(runs(traces.FLASH_ATTN_3), ahead=[WIDE_TABLE, PREPARE]),
    served(runs(traces.FLASH_ATTN_3), runs(traces.COMBINE, 2.0)),
    half_planned(),
    served(runs(SPLIT_KV, 300.0, grid=(1, 1, 16)), **DECODE),
    served(
        runs(traces.INDEX, 2.0),
        runs(traces.FLASH_ATTN_3),
        ahead=[PREPARE],
        **DECODE,
    ),
    served(runs(traces.FLASH_ATTN_3), ahead=[PREPARE], **LENGTHS),
)
SHAPES = {15: {"heads": "128/8"}}
"""Number of a trace of `BAD` -> what it does not tell of its layer."""
GOOD = Writer()
for _ in range(STEPS):
    GOOD.step([runs(traces.FLASH_ATTN_3)], ahead=[PREPARE], **DECODE)
    GOOD.copy("DtoH", 68)  # of sampled tokens, which the host waits for
    GOOD.wait()


def names_in(diagnosis):
    """The names of the patterns that a trace shows."""
    return [row["pattern"] for row in diagnosis.patterns.to_dict("records")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.pt.trace.json.gz"


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_a_pattern_is_found_where_it_shows_and_nowhere_else(number, path):
    shape = SHAPES.get(number, {})
    found = attnlib.diagnose(BAD[number].save(path), **shape)
    assert len(found.steps) == STEPS
    assert {*found.usual} <= {*DECODES}
    (row,) = found.patterns.to_dict("records")
    assert row["pattern"] == PATTERNS[number].name
    assert row["us per step"] > 0
    assert row["since"]
    assert number or attnlib.diagnose(GOOD.save(path)).patterns.empty
    assert number != 11 or "in this trace: another may write it" in row["evidence"]
    see = row["see"].split(", ")
    files = [ROOT / link for link in see if not link.startswith("https://")]
    assert files and all(file.exists() for file in files)
    assert bool(row["known problem"]) == bool(PATTERNS[number].known)
    exported = attnlib.diagnose(BAD[number].export(path.with_suffix(".sqlite")), **shape)
    assert exported.patterns.equals(found.patterns)
    assert exported.table().equals(found.table())


@pytest.mark.parametrize(
    "mark, kernel, kind, family",
    [
        ("step[VERIFY bs=4]", traces.FLASH_ATTN_3, "verify", "flash-attn-3"),
        ("step[DRAFT bs=4]", traces.FLASH_ATTN_3, "decode", "flash-attn-3"),
        ("step[DRAFT bs=2 toks=4096]", traces.FLASH_ATTN_3, "prefill", "flash-attn-3"),
        ("step[DRAFT_LOOP raw_bs=3 bs=4 topk=1]", traces.FLASH_ATTN_3, "decode", "flash-attn-3"),
        ("step[DRAFT_EXTEND_V2 bs=4]", traces.FLASH_ATTN_3, "draft_extend_v2", "flash-attn-3"),
        (
            "execute_40_context_0(sq0sk0sqsq0sqsk0)_generation_8(sq40sk9sqsq9sqsk9)",
            *(traces.FLASH_ATTN_3, "verify", "flash-attn-3"),
        ),
        ("execute_context_0(0)_generation_8(32)", traces.VLLM_FA4, "verify", "flash-attn-4"),
        ("execute_context_0(0)_generation_8(8)", traces.SGLANG_FA4, "decode", "flash-attn-4"),
        ("execute_context_1(512)_generation_0(0)", traces.TRTLLM_103, "prefill", "trtllm-gen"),
        ("step[EXTEND bs=4]", traces.TRITON_EXTEND, "prefill", "triton-extend"),
        ("step[DECODE]", traces.FLASH_ATTN_3, "decode", "flash-attn-3"),
        ("step[DECODE bs=4]", f"kernel_cutlass_split_kv_kernel_{CUTE_MLA}", "decode", "cute-dsl"),
        ("step[DECODE bs=4]", f"void {HPC}_kernel<int>(P)", "decode", "hpc-ops"),
        ("step[DECODE bs=4]", "fmhaSm120fKernel_QkvBfloat16", "decode", "trtllm-gen"),
        ("step[DECODE bs=4]", "kernel_unified_attention_3d", "decode", "triton-unified"),
        ("step[DECODE bs=4]", "attention_decode_bf16_smallm_splitk_kernel", "decode", "hpc-ops"),
        ("step[EXTEND bs=4]", "_fwd_kernel_unified", "prefill", "triton-extend"),
        ("step[DECODE bs=4]", PAGED, "decode", "paged-attention"),
        ("step[DECODE bs=4]", traces.FLASH_ATTN_3.replace("90", "80"), "decode", "flash-attn-3"),
        ("step[DECODE bs=4]", "triton_tem_fused_flex_attention_0", "decode", "flex-attention"),
        ("step[DECODE bs=4]", "_lean_attention_decode_kernel", "decode", "triton-decode"),
        ("step[DECODE bs=4]", "_sparse_mla_split_k_kernel", "decode", "triton-sparse-mla"),
        ("step[DECODE bs=4]", "sparse_mla_decode_dsv3_2_kernel<16>", "decode", "sparse-mla"),
    ],
)
def test_a_mark_tells_the_kind_of_a_step_and_a_name_the_kernels_family(
    mark, kernel, kind, family, path
):
    diagnosis = attnlib.diagnose(served(runs(kernel), mark=mark).save(path))
    assert {step.kind for step in diagnosis.steps} == {kind}
    assert diagnosis.table()["is"].tolist() == [f"attention ({family})"]


@pytest.mark.parametrize(
    "kernel, role",
    [
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_combineFlashAttentionForward_0", "merge"),
        ("attention_decode_smallm_splitk_combine_kernel", "merge"),
        ("void deep_gemm::sm120_fp8_paged_mqa_logits<1u>(int)", "indexer"),
        ("topk_transform_prefill_ragged_kernel", "indexer"),
        ("void deep_gemm::smxx_clean_logits<1u>(int)", "indexer"),
        ("_fwd_kernel_ep_scatter_1", ""),
        ("void vllm::merge_attn_states_kernel<float, 128u>(int)", "cascade"),
        ("_fused_dsa_target_verify_metadata_kernel", "metadata"),
        ("_sparse_mla_reduce_kernel", "merge"),
        ("void cutlass::device_kernel<fmha::kernel::Sm100FmhaMlaReductionKernel<T> >(P)", "merge"),
        ("void vllm::cp_gather_indexer_k_quant_cache_kernel<512>(P)", "indexer"),
        ("create_chunked_prefix_cache_kv_indices", "metadata"),
    ],
)
def test_a_kernel_beside_attention_is_none_and_has_its_role(kernel, role, path):
    found = attnlib.diagnose(
        served(
            runs(traces.FLASH_ATTN_3),
            runs(kernel),
            **DECODE,
        ).save(path)
    )
    assert found.kernels().set_index("kernel")["is"][short_name(kernel)] == role
    assert len(found.steps[0].attention) == 4


UNIFIED = "kernel_unified_attention"


@pytest.mark.parametrize(
    "kernel, grid, after, shown",
    [
        (UNIFIED, (10, 8, 1), (), True),
        (UNIFIED, (10, 8, 16), (runs("reduce_segments"),), False),
        (f"{UNIFIED}_3d", (10, 8, 1), (runs("reduce_segments"),), False),
        (f"{UNIFIED}_2d", (60, 8, 1), (), True),
        (f"{UNIFIED}_2d", (80, 8, 1), (), False),
        ("kernel_paged_attention_2d", (10, 8, 1), (), True),
        (traces.CUDA_CORES, (16, 8, 1), (), True),
        ("void flashinfer::PersistentKernelTemplate<X>(P)", (132, 1, 1), (), True),
        (
            traces.FLASH_ATTN_3,
            (132, 1, 1),
            (runs(traces.MERGE, 2.0),),
            False,
        ),
    ],
)
def test_triton_without_segments_splits_nothing_and_the_host_plans_for_flashinfers_wrappers(
    kernel, grid, after, shown, path
):
    kernels = (runs(kernel, grid=grid), *after)
    found = attnlib.diagnose(served(*kernels, ahead=HOST_PLAN, **DECODE).save(path))
    number = 8 if "kernel_" in kernel else 9
    assert names_in(found) == [PATTERNS[number].name] * shown


def test_a_pattern_of_verification_counts_however_many_draft_steps_there_are(path):
    writer = Writer()
    for mark in ("DRAFT", "DRAFT", "DRAFT", "VERIFY") * 2:
        each_layer = [PREPARE] if mark == "VERIFY" else []
        writer.step([*each_layer, runs(traces.FLASH_ATTN_3)], mark=f"step[{mark} bs=4]")
    (row,) = attnlib.diagnose(writer.save(path)).patterns.to_dict("records")
    assert row["pattern"] == PATTERNS[1].name
    assert "in 2 of 2 usual verify" in row["evidence"]


def test_a_marked_step_without_known_attention_is_no_part_of_the_next_one(path):
    writer = Writer()
    for _ in range(STEPS):
        writer.step([runs("nobody_knows_this", 400.0)], mark="step[EXTEND bs=1]")
        writer.step([runs(traces.FLASH_ATTN_3)], **DECODE)
    diagnosis = attnlib.diagnose(writer.save(path))
    assert {step.kind for step in diagnosis.steps} == {"decode"}
    assert diagnosis.table().share.tolist() == pytest.approx([0.43], abs=0.01)


def rank_of_two(rank):
    """Events of a rank of a merged file: it launches two steps, which two streams run at once."""
    writer = Writer()
    writer.idle(1000.0 * rank)
    for _ in range(STEPS):
        graphs = {}
        for mark, kernel in (("DECODE", traces.FLASH_ATTN_3), ("EXTEND", traces.FA2_128)):
            graphs[kernel] = writer.launch("cudaGraphLaunch")
            writer._add("user_annotation", f"step[{mark} bs=2]", writer.clock - 0.6, 1.0)
            writer.idle(2.0)
        begin = writer.clock
        for late, (kernel, graph) in enumerate(graphs.items()):
            writer.clock = begin + 5.0 * late
            for _ in range(4):
                writer.kernel(kernel, graph=graph)
    for event in writer.events:
        event["args"] |= {"device": rank} if event["cat"] == "kernel" else {}
        yield event | {"pid": f"[TP{rank}] {event['pid']}"}


def test_steps_that_overlap_and_ranks_of_one_file_are_told_apart(path):
    path = path.with_suffix("")
    events = {"traceEvents": [*rank_of_two(0), *rank_of_two(1)]}
    path.write_text(json.dumps(events))
    assert "Its SMs are not counted" in attnlib.diagnose(path).details
    path.write_text(json.dumps(events | traces.HEAD))  # the GPUs behind the events
    found = attnlib.diagnose(path)
    assert found.trace.gpus == 2
    assert found.trace.num_sms == 132
    parts = {(step.kind, *(span.name for span in step.work)) for step in found.steps}
    assert len(found.steps) == 2 * STEPS and parts == {
        ("decode", *["FlashAttnFwdSm90"] * 4),
        ("prefill", *["BatchPrefillWithPagedKVCacheKernel"] * 4),
    }


def test_steps_layers_and_what_comes_before_them_are_counted(path):
    found = attnlib.diagnose(BAD[2].save(path))
    ahead = [span.name for span in found.steps[1].ahead]
    assert ahead[:3] == ["_sample_kernel", "Memcpy DtoH", "index_elementwise_kernel"]
    fa2 = found.table().set_index("kernel").loc["BatchPrefillWithPagedKVCacheKernel"]
    assert fa2["a step"] == 4
    assert fa2["per attention call"] == 1
    assert fa2["us a step"] == 40
    assert fa2["of"] == "FlashInfer"
    assert found.patterns["us per step"][0] == 11.0  # four kernels of 2 us, three gaps of 1


def test_prefill_is_told_from_decode_by_the_mark_and_without_one_by_the_kernel(path):
    writer = served(runs(traces.FLASH_ATTN_3), count=1, mark="step[EXTEND bs=2 toks=300]")
    writer.step([runs(traces.FLASH_ATTN_3)], mark="step[DECODE bs=3]")
    found = attnlib.diagnose(writer.save(path))
    assert [(step.kind, step.batch_size) for step in found.steps] == [
        ("prefill", 2),
        ("decode", 3),
    ]
    found = attnlib.diagnose(eager(runs(traces.FA2_128)).save(path))
    told = found.details
    assert "unknown kind, under no mark: 6 of 6." in told and "No decode step" in told
    verify = served(runs(traces.FA3, 40.0), mark="step[VERIFY bs=4]").save(path)
    assert attnlib.diagnose(verify).patterns.empty, "its kernel is one for several query tokens"


def test_gains_are_of_shapes_within_a_factor_of_two(published_records, path, capsys, fails):
    told = attnlib.diagnose(BAD[0].save(path)).patterns.iloc[0]
    assert "shapes like batch_size 16, " in told["by the records"]
    assert told["by the records"].endswith(
        "Pass heads, head_dim, page, lens, dtype and kv_dtype to narrow it."
    )
    assert cli.main(["diagnose", str(path), "--shape", "heads=32/8,kv_len=9000"]) == 0
    printed = capsys.readouterr().out
    assert "1 known pattern" in printed and "like heads 32/8, batch_size 16, kv_len 9000" in printed
    lengths = {row["kv_len"] for row in gains()["fa3"]["rows"]}
    longer = 2 * max(lengths)
    assert "like heads 32/8" in gained("fa3", {"heads": "32/8", "kv_len": longer}, 100.0)
    too_long = {"heads": "32/8", "kv_len": 3 * max(lengths)}
    for far in ({"heads": "7/7"}, {"heads": "32/8", "kv_len": 9}, too_long):
        assert gained("fa3", far, 100.0).startswith("no records like heads ")
    for shape, why in {
        "head=1": "must be one of heads",
        "kv_len=8k": "kv_len must be an",
        "batch_size=64": "batch_size must be 16, as the trace marks its steps, got 64",
        "heads=7/3": "num_qo_heads must be",
        "heads": "--shape must be N=V, got 'heads'",
        "dtype=foo": "dtype must be one of",
        "heads=32/8,heads=8/1": "must name each fact once",
    }.items():
        assert why in fails("diagnose", str(path), "--shape", shape)


def test_what_is_said_is_of_the_middle_half_of_the_steps_by_length(path):
    """Of ten decode steps nine are left without the first, and of these the middle five."""
    writer = Writer()
    for us in (500.0, 80.0, 10.0, 60.0, 30.0, 50.0, 20.0, 70.0, 40.0, 1.0):
        writer.step([runs(traces.FLASH_ATTN_3, us)], layers=1, **DECODE)
    diagnosis = attnlib.diagnose(writer.save(path))
    lengths = [step.attention[0].length_us for step in diagnosis.usual["decode"]]
    assert lengths == [20.0, 30.0, 40.0, 50.0, 60.0]
    (row,) = diagnosis.table().to_dict("records")
    assert row["us a step"] == 40.0


@pytest.mark.parametrize(
    "short, kept",
    [
        (3, {4}),
        (6, {2, 4}),
    ],
)
def test_unmarked_steps_with_fewer_calls_are_cut_ones_where_they_are_rarer(short, kept, path):
    writer = Writer()
    for layers in [4] * 3 + [2] * short + [4] * 3:
        writer.step([runs(traces.FLASH_ATTN_3)], layers=layers)
    found = attnlib.diagnose(writer.save(path))
    assert {len(step.attention) for step in found.usual["decode or verify"]} == kept


def test_a_batch_size_that_no_mark_tells_is_taken_from_the_shape(path):
    split = (
        runs(traces.FA2_16, grid=(24, 1, 8)),
        runs(traces.MERGE, 2.0),
    )
    found = attnlib.diagnose(served(*split).save(path))
    assert found.patterns.empty and "--shape 'lens=TOKENSxREQUESTS' to check" in repr(found)
    full = attnlib.diagnose(path, batch_size=64)
    assert attnlib.diagnose(path, batch_size=1).patterns.empty, "one request delays no other"
    with pytest.raises(ValueError, match="heads must have 8 KV heads, as fa2's grid has, got"):
        attnlib.diagnose(path, heads="8/1")
    assert full.patterns.pattern.tolist() == [PATTERNS[3].name]
    assert (
        "--shape batch_size" not in repr(full)
        and attnlib.diagnose(path, batch_size=16).patterns.empty
    )


def test_every_fix_that_was_measured_has_its_gain_on_record():
    told = {pattern.name: gained(pattern.gain, {"heads": "32/8"}, 100.0) for pattern in PATTERNS}
    unmeasured = [name for name, words in told.items() if words == "no records of the fix"]
    assert unmeasured == [pattern.name for pattern in PATTERNS if not pattern.gain]
    assert not [words for words in told.values() if "nan" in words]
    short = {"heads": "32/32", "page_size": 1, "batch_size": 4, "kv_len": 1024}
    assert gained("fa3", short, 100.0).startswith("No saving: 0.89 times the time")


def test_releases_of_the_fa3_pattern_are_those_of_the_rules():
    for dtype in ("bfloat16", "float8_e4m3fn"):
        layer = AttnSpec(32, 8, 128, 16, dtype)
        picks = {
            release: explain(layer, library=f"flashinfer=={release}", mode="decode", gpu="sm90")
            for release in LIBRARIES["flashinfer"].releases
        }
        slow = [release for release, picked in picks.items() if picked.kernel == "fa3"]
        by_auto, by_name = (problem.releases["flashinfer"] for problem in PATTERNS[0].known)
        span = by_name if dtype.startswith("float8") else by_auto
        assert slow == [release for release in picks if span.has(Version(release))]


def fix_of(pattern):
    """The pattern's own fix, or that of the known problems that it is; of SGLang's steps."""
    switch = "ATTNLIB_SGLANG_DECODE=planned, attnlib's plugin"
    return PLANNER.sub(switch, pattern.fix or fixes_of(pattern.known))


def test_a_pattern_of_two_problems_says_which_fix_is_for_which():
    trace = TRACES / "fa3_decode.json.gz"
    told = flat(repr(attnlib.diagnose(trace)))
    for problem in PATTERNS[0].known:
        assert f"{problem.id}: {problem.do}" in told
    brief = flat("\n".join(attnlib.diagnose(trace).brief()))
    assert "flashinfer-fa3-decode-auto (flashinfer since 0.6.0, ended in 0.6.4); " in brief
    assert "flashinfer-fa3-decode-by-name (flashinfer since 0.6.0, known to " in brief
    stated = attnlib.diagnose(trace, flashinfer="0.7.0")
    assert stated.patterns.fix[0] == PATTERNS[0].known[1].do


@pytest.mark.parametrize(
    "name, first, of_pattern",
    [
        ("sglang_0523", "3,389 us: 59 % idle before the first layer, ", "(0.3 % of the step)"),
        ("fa2_unsplit", "8,162 us: 92 % attention, ", "(91.7 % of the step)"),
        ("vllm_flash_attn", "5,263 us: 64 % idle before the first layer, ", ""),
    ],
)
def test_a_short_answer_leads_with_the_largest_share_of_a_step(name, first, of_pattern):
    found = attnlib.diagnose(TRACES / f"{name}.json.gz")
    told = flat(str(found))
    assert told.index(f"decode step {first}") < told.index("kernel")
    evidence = told.find("evidence ")
    assert evidence < 0 or told.index(first) < evidence
    assert of_pattern in told
    assert first in flat(found.details)
    said = told.partition("decode step ")[2].partition("call ")[0]
    shares = [int(share) for share in re.findall(r"(\d+) %", said)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=2)


def test_what_is_no_path_is_said_by_its_argument():
    with pytest.raises(TypeError, match="trace must be the path of a file, got None"):
        attnlib.diagnose(None)


def test_lengths_are_asked_for_as_many_requests_as_the_trace_has():
    """No request count is made up, and the release is asked for where the engine is known."""
    for name, words in {
        "fa2_unsplit": "'lens=32768+2048x32 sglang=RELEASE'",
        "fa3_decode": "'lens=TOKENSxREQUESTS'",
        "sglang_0523": "'lens=32768+2048x31 sglang=RELEASE'",
    }.items():
        assert f"--shape {words}" in flat(str(attnlib.diagnose(TRACES / f"{name}.json.gz"))), name
    stated = attnlib.diagnose(TRACES / "sglang_0523.json.gz", sglang="0.5.23")
    assert "sglang=RELEASE" not in repr(stated)


@pytest.mark.parametrize(
    "lens, patterns, saving",
    [
        ("8192x33", [], ""),
        ("8000+8192x32", [], ""),
        ("131072+2048x32", ["fa2 splits no request"], "6,277.7 us"),
    ],
)
def test_equal_lengths_lose_nothing_by_a_request_that_is_not_split(lens, patterns, saving):
    layer = {"heads": "32/8", "head_dim": 128, "page": 16}
    found = attnlib.diagnose(TRACES / "fa2_unsplit.json.gz", lens=lens, **layer)
    names = [] if found.patterns.empty else found.patterns.pattern.tolist()
    assert names == patterns
    told = "Not slower at these lengths, at others: fa2 splits no request." in repr(found)
    assert told == (not patterns) and saving in flat(repr(found))


def test_a_batch_that_one_trace_does_not_tell_decides_nothing(capsys):
    both = [str(TRACES / f"{name}.json.gz") for name in ("fa3_decode", "fa2_unsplit")]
    for order, side in ((both, "before"), (both[::-1], "after")):
        assert cli.main(["diagnose", *order, "--fail-on", "slower"]) == 3
        words = f"Not decided: the batch size of {side} is unknown, the other trace has 33 requests"
        assert words in flat(capsys.readouterr().out)
    same = [both[0], both[0]]
    assert cli.main(["diagnose", *same, "--fail-on", "slower"]) == 3
    assert "batch sizes of both traces are unknown" in flat(capsys.readouterr().out)
    stated = ["--shape", "lens=8192x16"]
    assert cli.main(["diagnose", *same, "--fail-on", "slower", *stated]) == 0


def test_a_pattern_and_the_known_problem_that_it_is_are_one_knowledge():
    for pattern in PATTERNS:
        fixes = {problem.do for problem in pattern.known}
        assert pattern.fix or fixes
        assert pattern.known or pattern.since and pattern.see
        assert not (pattern.known and (pattern.since or pattern.see)), "it is said in data/known"
        assert all(pattern.fix.count(fix) <= 1 for fix in fixes)


def test_a_pattern_names_the_known_problems_that_facts_and_releases_leave():
    trace = TRACES / "fa3_decode.json.gz"
    auto, by_name = (problem.id for problem in PATTERNS[0].known)
    named = {
        "": f"{auto}, {by_name}",
        "0.6.3": f"{auto}, {by_name}",
        "0.6.4": by_name,
        "0.7.0": by_name,
    }
    for release, ids in named.items():
        stated = {"flashinfer": release} if release else {}
        (row,) = attnlib.diagnose(trace, **stated).patterns.to_dict("records")
        assert row["known problem"] == ids, release
    (row,) = attnlib.diagnose(TRACES / "fa2_host.json.gz").patterns.to_dict("records")
    assert row["known problem"] == "flashinfer-host-plan"
    assert row["by the records"].startswith("on record: ")
    of_vllm = attnlib.diagnose(TRACES / "vllm_flashinfer.json.gz").patterns
    row = of_vllm.set_index("pattern").loc["the GPU waits for the host's plan"]
    assert row["known problem"] == "", "what is on record of it is of SGLang"
    assert row["by the records"] == "no records of the fix" and row.since


def test_a_known_problem_that_no_pattern_shows_is_told_where_the_stated_release_has_it(capsys):
    trace = TRACES / "fa2_host.json.gz"
    assert attnlib.diagnose(trace).known == []
    assert attnlib.diagnose(trace, flashinfer="0.7.0").known == []
    seen = attnlib.diagnose(trace, flashinfer="0.6.18")
    (answer,) = seen.known
    assert answer.problem.id == "flashinfer-kv-offsets"
    for line in problem_lines(answer):
        assert line.strip() in flat(seen.details)
    assert "1 known problem without a measured size: --details" in repr(seen)
    assert cli.main(["diagnose", str(trace), "--shape", "flashinfer=0.6.18", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["known"] == to_data([answer])
    with pytest.raises(ValueError, match="flashinfer must be a release such as .*, got 'new'"):
        attnlib.diagnose(trace, flashinfer="new")


def test_a_trace_without_attention_that_is_known_names_what_ran_most(path):
    told = repr(attnlib.diagnose(eager().save(path)))
    assert "0 steps" in told and GEMM in told and "whole trace" in told


def test_all_kernels_are_listed_by_time_with_what_they_do(path):
    indexer = runs("void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u>(int)", 99.0)
    norm = "std::enable_if<(((8)>(0))), void>::type vllm::fused_add_rms_norm_kernel<T, 8>(T*, int)"
    diagnosis = attnlib.diagnose(
        served(
            runs(traces.FLASH_ATTN_3),
            indexer,
            runs(norm, 5.0),
            **DECODE,
        ).save(path)
    )
    table = diagnosis.kernels()
    assert table["us a step"].is_monotonic_decreasing
    assert table.kernel[0] == "sm90_fp8_paged_mqa_logits"
    assert table["is"][0] == "indexer"
    assert "fused_add_rms_norm_kernel" in set(table.kernel) and GEMM[:20] in diagnosis.details


def test_two_traces_differ_by_role_by_name_and_by_step(tmp_path, capsys):
    before = served(PREPARE, runs(traces.FLASH_ATTN_3), **DECODE).save(tmp_path / "a.json.gz")
    slow = [
        runs(traces.FA2_16, 30.0, grid=(264, 1, 8)),
        runs(traces.MERGE, 2.0),
        runs("extra", 1.0),
    ]
    after = served(*slow, **DECODE).save(tmp_path / "b.json.gz")
    change = attnlib.diagnose(before, after)
    table = change.table()
    assert table.change.abs().is_monotonic_decreasing
    rows = table.set_index("part")
    attention = rows.loc["attention"]
    assert attention.before == 40.0
    assert attention.after == 120.0
    assert attention.ratio == 3.0
    assert attention.kernels == "FlashAttnFwdSm90 to BatchPrefillWithPagedKVCacheKernel"
    assert rows.after["prepare"] == 0.0
    assert rows.before["merge"] == 0.0
    assert rows.after["extra"] == 4.0
    assert rows.change["whole step"] > 80
    assert rows.change[GEMM] == 0
    assert "<table" in change._repr_html_()
    (axis,) = change.figure().axes
    sizes = rows.change.abs()
    assert len(axis.patches) == (sizes >= sizes.max() / 100).sum()
    assert axis.get_yticklabels()[0].get_text() in ("whole step", "GPU busy")
    assert any("Steps of decode, before and after: " in note for note in change.card().notes)
    assert cli.main(["diagnose", str(before), str(after), "--json"]) == 0
    form = json.loads(capsys.readouterr().out)
    assert {row["part"] for row in form["changes"]} == set(rows.index)
    (pattern,) = form["before"]["patterns"]
    assert pattern["pattern"] == PATTERNS[1].name
    assert form["after"]["patterns"] == []


@pytest.mark.parametrize(
    "before, after",
    [("fa2_host", "fa3_decode"), ("xqa", "cuda_cores"), ("cuda_cores", "xqa")],
)
def test_what_is_new_in_the_second_trace_has_its_fix_evidence_and_gain(before, after):
    change = attnlib.diagnose(*(TRACES / f"{name}.json.gz" for name in (before, after)))
    told = flat(repr(change))
    new = [PATTERNS[number] for number in REAL[after]]
    gone = [PATTERNS[number] for number in REAL[before]]
    assert [row["pattern"] for row in change.new_patterns] == [pattern.name for pattern in new]
    for pattern in new:
        assert f" new in {after}.json.gz {pattern.name} " in told
        assert f" fix {fix_of(pattern)} " in told
    assert told.count("by the records") == len(new)
    listed = change.patterns().set_index("pattern")
    assert set(listed.index) == {pattern.name for pattern in (*new, *gone)}
    names_gone = [pattern.name for pattern in gone]
    assert (listed.after[names_gone] == "-").all()
    for pattern in (*new, *gone):
        assert listed.fix[pattern.name] == fix_of(pattern)


def longer(path, us, count=STEPS, mark="step[DECODE bs=16]"):
    """A trace whose steps last longer by `us` in each of four layers."""
    return served(
        runs(traces.FLASH_ATTN_3, 10.0 + us),
        count=count,
        mark=mark,
    ).save(path)


@pytest.mark.parametrize(
    "how, outcome, status, said",
    [
        ({"us": 0.0}, "not slower", 0, "After is not slower."),
        ({"us": 0.5}, "not slower", 0, "After is not slower."),
        ({"us": 10.0}, "slower", 1, "After is slower."),
        (
            {"us": 10.0, "count": 3},
            *("not decided", 3),
            "Not decided: 2 steps of decode to compare, 3 are needed; record 7 steps or more.",
        ),
        (
            {"us": 10.0, "mark": "step[DECODE bs=32]"},
            *("not decided", 3),
            "Not decided: batch sizes of decode steps differ, 16 and 32 in the mean.",
        ),
        (
            {"us": 10.0, "mark": "step[DECODE raw_bs=15 bs=16]"},
            *("not decided", 3),
            "Not decided: batch sizes of decode steps differ, 16 and 15 in the mean.",
        ),
        ({"us": -5.0}, "not slower", 0, "After is not slower."),
    ],
)
def test_two_traces_gate_by_their_exit_status(how, outcome, status, said, tmp_path, capsys):
    before = longer(tmp_path / "before.json", 0.0)
    after = longer(tmp_path / "after.json", **how)
    traced = ["diagnose", str(before), str(after)]
    assert cli.main([*traced, "--fail-on", "slower"]) == status
    told = flat(capsys.readouterr().out)
    assert f" {said} A profiler changes times. Confirm without one." in told
    assert cli.main([*traced, "--json"]) == 0
    form = json.loads(capsys.readouterr().out)
    assert form["outcome"] == outcome
    assert bool(form["why not decided"]) == (status == 3)


def test_so_many_steps_are_asked_for_that_enough_of_them_count(tmp_path):
    """Both ends of these traces are cut in a step."""
    for count, enough in (
        (ENOUGH - 1, False),
        (ENOUGH, True),
        (ENOUGH + 1, True),
    ):
        writer = Writer()
        for us in range(count):
            writer.step([runs(traces.FLASH_ATTN_3, 10.0 + us)], **DECODE)
        attention = [event for event in writer.events if event["name"] == traces.FLASH_ATTN_3]
        last = attention[-1]["ts"]
        writer.events = [event for event in writer.events if event["ts"] <= last]
        usual = attnlib.diagnose(writer.save(tmp_path / f"{count}.json")).usual["decode"]
        assert (len(usual) >= LEAST_STEPS) == enough, count


def test_traces_of_two_gpus_decide_nothing(tmp_path):
    before = longer(tmp_path / "before.json", 0.0)
    after = tmp_path / "after.json"
    after.write_text(before.read_text().replace("NVIDIA H200", "NVIDIA B200"))
    change = attnlib.diagnose(before, after)
    assert change.why_not_decided == "GPUs differ, NVIDIA H200 and NVIDIA B200"


def test_a_new_pattern_fails_the_gate_that_asks_for_it(tmp_path, capsys, fails):
    good = str(GOOD.save(tmp_path / "good.json"))
    bad = str(BAD[1].save(tmp_path / "bad.json"))
    gate = ("--fail-on", "pattern")
    assert cli.main(["diagnose", good, bad, *gate]) == 1
    assert cli.main(["diagnose", bad, good, *gate]) == 0
    assert cli.main(["diagnose", bad, bad, *gate]) == 0
    capsys.readouterr()
    assert "--fail-on pattern must have two traces" in fails("diagnose", bad, *gate)


def test_a_pattern_that_is_a_known_problem_has_its_size_as_advise_says_it(path):
    for number, pattern in enumerate(PATTERNS):
        if pattern.gain or not pattern.known:
            continue
        shape = SHAPES.get(number, {})
        found = attnlib.diagnose(BAD[number].save(path), **shape)
        (row,) = found.patterns.to_dict("records")
        problems = [PROBLEMS[name] for name in row["known problem"].split(", ")]
        for problem in problems:
            for line in how_much(problem):
                assert line in row["by the records"], pattern.name
            assert {*problem.links} <= {*row["see"].split(", ")}


def test_an_empty_line_stands_between_two_patterns():
    found = attnlib.diagnose(TRACES / "vllm_flashinfer.json.gz")
    assert len(found.patterns) == 2
    assert [line[:9] for line in repr(found).splitlines()].count("  pattern") == 2
    lines = found.details.splitlines()
    second = [at for at, line in enumerate(lines) if line.startswith("  pattern ")][1]
    assert lines[second - 1] == ""
    assert "notebooks/" in lines[second - 2]


@pytest.mark.parametrize("tokens, outcome", [(102_000, "slower"), (200_000, "not decided")])
def test_steps_over_other_lengths_decide_nothing(tokens, outcome, tmp_path):
    before, after = (
        longer(
            tmp_path / f"{kv_tokens}.json",
            us,
            mark=f"step[DECODE bs=16 g_sq=16 g_sqsq=16 g_sqsk={kv_tokens} g_sk={kv_tokens}]",
        )
        for kv_tokens, us in ((100_000, 0.0), (tokens, 10.0))
    )
    assert attnlib.diagnose(before, after).outcome == outcome


def test_a_gate_of_servers_whose_batches_vary_is_by_their_mean(tmp_path):
    paths = []
    for us in (0.0, 10.0):
        writer = Writer()
        for size in (16, 15, 16, 14, 16, 15, 16, 16):
            size -= us > 0 and size == 14
            writer.step([runs(traces.FLASH_ATTN_3, 10.0 + us)], mark=f"step[DECODE bs={size}]")
        paths.append(writer.save(tmp_path / f"{us}.json"))
    change = attnlib.diagnose(*paths)
    assert change.outcome == "slower" and "Batch sizes of decode differ" in repr(change)


def test_steps_whose_lengths_overlap_decide_nothing_and_one_trace_has_no_gate(tmp_path, fails):
    slow = Writer()
    for us in (10.0, 10.0, 10.0, 40.0, 40.0, 40.0, 40.0, 40.0):
        slow.step([runs(traces.FLASH_ATTN_3, us)], **DECODE)
    fast = longer(tmp_path / "fast.json", 0.0)
    change = attnlib.diagnose(fast, slow.save(tmp_path / "slow.json"))
    whole = change.rows.set_index("part").loc["whole step"]
    assert whole.ratio > 1.05 and change.outcome == "not decided"
    assert "Not decided: lengths of decode steps overlap, " in repr(change)
    assert "must have two traces" in fails("diagnose", str(fast), "--fail-on", "slower")


def periodic(path, us, every):
    """A trace in which each `every`th of 17 steps lasts longer by `us` in each layer."""
    writer = Writer()
    for number in range(17):
        is_late = number % every == 1
        writer.step([runs(traces.FLASH_ATTN_3, 10.0 + is_late * us)], **DECODE)
    return writer.save(path)


@pytest.mark.parametrize(
    ("us", "outcome"),
    [
        (0.0, "not slower"),
        (1.0, "not slower"),
        (60.0, "not decided"),
    ],
)
def test_steps_that_are_long_now_and_then_are_told_and_never_not_slower(us, outcome, tmp_path):
    before = periodic(tmp_path / "before.json", 0.0, every=8)
    after = periodic(tmp_path / "after.json", us, every=8)
    change = attnlib.diagnose(before, after)
    assert change.rows.set_index("part").ratio["whole step"] == 1
    assert change.outcome == outcome
    said = flat(repr(change))
    is_open = outcome == "not decided"
    reason = "Not decided: usual decode steps are alike, and all are longer after, "
    assert (reason in said) == is_open
    assert ("Left out: 2 of 16 decode steps take up to " in said) == is_open
    assert ("left out 2 of 16 decode steps take" in flat(repr(attnlib.diagnose(after)))) == is_open


def served_twice(path):
    """A trace of decode and prefill, both slower, the prefill most."""
    writer = served(runs(traces.FLASH_ATTN_3, 20.0), **DECODE)
    writer.step([runs(traces.FLASH_ATTN_3, 90.0)], mark="step[EXTEND bs=4]")
    return writer.save(path)


def test_two_traces_without_a_common_kind_of_step_are_refused(tmp_path, fails):
    both = served(runs(traces.FLASH_ATTN_3), **DECODE)
    decode = str(both.save(tmp_path / "a.json.gz"))
    prefill = served(runs(traces.FLASH_ATTN_3), mark="step[EXTEND bs=4]")
    other = str(prefill.save(tmp_path / "b.gz"))
    assert "steps of one kind with known attention, got decode and prefill" in fails(
        "diagnose", decode, other
    )
    both.step([runs(traces.FLASH_ATTN_3)], mark="step[EXTEND bs=4]")
    change = attnlib.diagnose(both.save(tmp_path / "both.gz"), other)
    both_kinds = attnlib.diagnose(tmp_path / "both.gz", served_twice(tmp_path / "twice.gz"))
    assert both_kinds.kinds == ["decode", "prefill"]
    assert both_kinds.table().change.abs().is_monotonic_decreasing
    assert both_kinds.rows.step[0] == "prefill"
    assert {*both_kinds.rows.step[:6]} >= {"decode"}
    assert change.kinds == ["prefill"] and "Steps of decode are in one trace alone." in repr(change)


def test_the_first_step_and_cut_ones_count_in_no_mean_and_other_layers_do_not_compare(tmp_path):
    whole = served(*FA2_SPLIT, layers=4, **DECODE).save(tmp_path / "whole.json")
    more = attnlib.diagnose(
        whole,
        served(
            *FA2_SPLIT,
            layers=8,
            **DECODE,
        ).save(tmp_path / "m"),
    )
    assert more.outcome == "not decided"
    assert "us (4 to 8 attention calls)\n" in repr(more) and "do not compare" in repr(more)
    cut = served(
        *FA2_SPLIT,
        count=1,
        ahead=[lambda writer: writer.idle(900.0)],
        **DECODE,
    )
    for layers in (4, 2, 4, 3):
        cut.step(FA2_SPLIT, layers=layers, **DECODE)
    change = attnlib.diagnose(cut.save(tmp_path / "cut"), whole)
    assert "Cut or of a draft, left out: decode steps of [2, 3] attention" in flat(repr(change))
    assert (change.rows.change.abs() < 0.01).all()
    assert len(change.rows)
    old = served(*FA2_SPLIT, count=1, **DECODE)
    old.step(FA2_SPLIT, layers=1, ahead=HOST_PLAN, **DECODE)
    late = served(*FA2_SPLIT, count=1, layers=1, ahead=HOST_PLAN, **DECODE)
    for alone in (old, late):
        told = flat(attnlib.diagnose(alone.save(tmp_path / "alone")).details)
        assert "no known pattern" in told and "The only decode steps are the first or last" in told
        assert diagnosis.NO_WHOLE_STEP in told


THREADS = {
    "fa3_sm80_one_split": ({"decode or verify"}, [13, 1]),
    "fa3_sm80_split": ({"decode or verify"}, [1]),
    "lengths_copied_pageable": ({"decode"}, [6]),
    "lightllm_two_stages": ({"decode or verify"}, []),
    "sgl_detailed_decode": ({"decode"}, []),
    "sgl_detailed_two_queries": ({"verify"}, []),
    "sparse_mla_one_block": ({"decode"}, [13]),
    "swa_loc_once": ({"decode"}, []),
    "swa_loc_per_layer": ({"decode"}, [14]),
    "vllm_turboquant": ({"decode"}, []),
}
FIELD = {
    **THREADS,
    "sgl_verify_0523": ({"verify", "decode"}, [1]),
    "sgl_verify_old": ({"verify"}, [1]),
    "sgl_triton_both": ({"prefill", "decode"}, []),
    "vllm_fa4": ({"decode"}, []),
    "v_triton2d": ({"decode"}, [8]),
    "v_trtllm103": ({"decode"}, []),
    "v_fa3_piece": ({"decode"}, [7, 1]),
    "vllm_verify": ({"verify"}, []),
}
"""Traces made of kernel names that people posted -> kinds of steps, numbers of patterns."""


@pytest.mark.parametrize("name", FIELD)
def test_a_trace_from_the_field_has_its_steps_and_patterns(name):
    diagnosis = attnlib.diagnose(Path(__file__).parent / "traces" / f"{name}.json.gz")
    kinds, numbers = FIELD[name]
    assert {step.kind for step in diagnosis.steps} == kinds
    patterns = diagnosis.patterns.to_dict("records")
    assert [row["pattern"] for row in patterns] == [PATTERNS[n].name for n in numbers]
    for row in patterns:
        saved = re.search(r"saving per step: ([\d.,]+) us", row["by the records"])
        assert saved is None or float(saved[1].replace(",", "")) <= row["us per step"]


WHOLE = json.dumps({"traceEvents": GOOD.events}).encode()
BROKEN = {
    "cut.json": (WHOLE[:-3000], "ends within its events, after"),
    "notes.txt": (b"nothing of the kind", "must be a Chrome trace of torch.profiler"),
    "empty.json": (b"", "must be a trace, it is empty"),
    "cpu.json": (b'{"traceEvents": [{"ph": "M"}, 7]}', "has no kernel of a GPU"),
    "report.nsys-rep": (b"NVIDIA", "nsys export"),
}


def test_what_is_no_whole_trace_of_a_gpu_is_one_line(tmp_path, fails):
    for name, (data, words) in BROKEN.items():
        (tmp_path / name).write_bytes(data)
        assert words in fails("diagnose", str(tmp_path / name))
    assert "trace must be a file, there is none" in fails(
        "diagnose", str(tmp_path / "missing.json")
    )
    GOOD.export(tmp_path / "graphs.sqlite")
    with sqlite3.connect(tmp_path / "graphs.sqlite") as base:
        base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start)")
        base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1)")
    assert "--cuda-graph-trace=node" in fails("diagnose", str(tmp_path / "graphs.sqlite"))


@pytest.mark.slow
def test_a_long_trace_is_read_as_a_stream(tmp_path):
    """Five steps of it over and over; memory grows with the kernels, not with the file."""
    writer = served(*FA2_SPLIT, count=5, layers=32, **DECODE)
    path = tmp_path / "long"
    count = 0
    events = [
        json.dumps(event | {"args": {**event["args"], "x": "x" * 400}}) for event in writer.events
    ]
    with path.open("w") as file:
        file.write(json.dumps({**traces.HEAD, "traceEvents": []})[:-2])
        while file.tell() < 32 * 2**20:
            file.write((", " if count else "") + ", ".join(events))
            count += 1
        file.write("]}")
    # Not ru_maxrss: that begins with what the process that started this one held.
    code = "import re, sys, attnlib; print(len(attnlib.diagnose(sys.argv[1]).trace.work), "
    code += "*re.findall(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read()))"
    run = subprocess.run(
        [sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True
    )
    kernels, kib = map(int, run.stdout.split())
    assert kernels == 5 * (32 * 3 + 2) * count
    assert kib <= 2**20


# A trace of a GPU (data/traces) -> the patterns that it was captured for, by their numbers.
REAL = {
    "fa3_decode": [0],
    "fa3_each": [1],
    "fa3_once": [],
    "metadata_ops": [2],
    "metadata_fused": [],
    "fa2_unsplit": [3],
    "verify_128": [4],
    "verify_16": [],
    "cuda_cores": [5],
    "xqa": [],
    "lengths_copied": [6],
    "fa2_host": [9],
    "eager": [7],
    "prefill_decode": [],
    "sglang_0523": [10],
    "sglang_fa3": [],
    "sglang_flashinfer": [9],
    "vllm_flash_attn": [],
    "vllm_triton_attn": [],
    "vllm_triton_2d": [8],
    "vllm_flashinfer": [9, 3],
    "vllm_flashinfer_planned": [],
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_trace_shows_the_patterns_that_it_was_captured_for(name):
    found = attnlib.diagnose(TRACES / f"{name}.json.gz")
    wanted = [PATTERNS[number].name for number in REAL[name]]
    assert [row["pattern"] for row in found.patterns.to_dict("records")] == wanted
    later = name == "sglang_0523" or name.startswith("vllm")  # three steps on an H100
    assert found.trace.gpu == ("NVIDIA H100 80GB HBM3" if later else "NVIDIA H200")
    assert ("no known pattern" in repr(found)) == (not wanted)
    assert found.to_dict()
    assert len(found.steps) == 4 - later + (name == "prefill_decode")
    ends = [step.begin_us + step.length_us for step in found.steps]
    for step, end in zip(found.steps[1:], ends, strict=False):
        assert step.begin_us < end + 0.01
    change = TraceChange(found, found)
    assert not change.table().change.any()
    for row in found.around().to_dict("records"):
        parts = change.rows[change.rows.step == row["step"]].set_index("part").after
        idle = parts["idle before the first layer"]
        assert parts["whole step"] == pytest.approx(parts["GPU busy"] + idle + parts["idle later"])
        assert row["us"] == parts["whole step"]
        assert row["us idle before"] == idle
        for pattern in found.patterns.to_dict("records"):
            if pattern["pattern"] == PATTERNS[9].name:
                assert pattern["us per step"] == round(idle, 1)
    said = re.findall(r"idles for ([\d,]+) us", repr(found))
    assert {*said} <= {f"{us:,.0f}" for us in found.around()["us idle before"]}
    assert said or not name.startswith("vllm_flash")


def without(facts, lacks):
    return {name: value for name, value in facts.items() if name not in lacks}


def save_part(path, name, keeps, lacks=()):
    """A trace of data/traces: the events that it keeps, by their time from 0 to 1."""
    whole = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    events = [event for event in whole["traceEvents"] if event.get("ph") == "X"]
    kernels = [event["ts"] for event in events if event["cat"] == "kernel"]
    begin = min(kernels)
    end = max(kernels)
    kept = []
    for event in events:
        if keeps(event, (event["ts"] - begin) / (end - begin)):
            event["args"] = without(event.get("args", {}), lacks)
            kept.append(event)
    whole["traceEvents"] = kept
    path.write_text(json.dumps(without(whole, lacks)))
    return path


@pytest.mark.parametrize("name", ["lengths_copied", "verify_16", "eager", "fa2_unsplit"])
def test_a_trace_without_marks_is_compared_with_one_that_has_them(name, tmp_path):
    whole = TRACES / f"{name}.json.gz"
    copy = save_part(tmp_path / "copy", name, lambda event, at: event["cat"] != "user_annotation")
    for pair in ((whole, copy), (copy, whole)):
        change = attnlib.diagnose(*pair)
        assert change.kinds == ["decode or verify"]
        assert change.rows.change.abs().max() < 0.01
        poor = "after" if pair[1] == copy else "before"
        has_no_marks = attnlib.diagnose(whole).trace.marks
        assert not has_no_marks or f"{poor}: No marks of steps: decode or" in repr(change)


def is_blocking(event):
    """Whether an event of the trace is a call in which the host may wait."""
    is_call = event["cat"].startswith("cuda_")
    return is_call and ("Synchronize" in event["name"] or "Memcpy" in event["name"])


COPIES = {
    diagnosis.NO_MARKS: (lambda event, at: event["cat"] != "user_annotation",),
    diagnosis.NO_LAUNCHES: (lambda event, at: not event["cat"].startswith("cuda_"),),
    diagnosis.NO_WAITS: (lambda event, at: not is_blocking(event),),
    diagnosis.NO_COPIES: (lambda event, at: event["cat"] != "gpu_memcpy",),
    diagnosis.NO_GRIDS: (lambda event, at: True, ("grid", "block")),
    diagnosis.NO_SMS: (lambda event, at: True, ("deviceProperties",)),
    diagnosis.NO_GRAPHS: (
        lambda event, at: event["cat"] == "kernel",
        ("graph id", "correlation"),
    ),
}
"""What is said of a copy -> the events that it keeps, and the facts that it lacks."""


@pytest.mark.parametrize("words", COPIES)
def test_what_a_copy_cannot_show_is_said(words, tmp_path):
    copy = save_part(tmp_path / "copy", "lengths_copied", *COPIES[words])
    assert words in attnlib.diagnose(copy).details
    assert words not in attnlib.diagnose(TRACES / "lengths_copied.json.gz").details


def test_steps_that_only_copies_tell_apart_may_be_one_and_have_no_schedule_per_layer(tmp_path):
    keeps = (lambda event, at: event["cat"] == "kernel", ("correlation",))
    merged = attnlib.diagnose(save_part(tmp_path / "x", "vllm_flash_attn", *keeps))
    assert len(merged.steps) == 1 and merged.patterns.empty
    assert "told apart by copies only: several may be counted as one" in merged.details
    assert "told apart" not in attnlib.diagnose(TRACES / "vllm_flash_attn.json.gz").details


@pytest.mark.parametrize(
    "shape, words",
    [
        ({"sglang": "0.5.30"}, "must be a known one, 0.5.8 to"),
        ({"vllm": "0.33.0"}, "must be of sglang, which marked the steps, got vllm"),
        ({"lens": "32768+2048x40"}, "requests of lens must be 16, as the trace marks"),
        ({"batch_size": 17}, "batch_size must be 16, as the trace marks"),
    ],
)
def test_what_a_caller_states_must_fit_the_engine_and_its_steps(shape, words):
    with pytest.raises(ValueError, match=words):
        attnlib.diagnose(ROOT / "data" / "traces" / "sglang_fa3.json.gz", **shape)
