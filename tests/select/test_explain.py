"""The choices: as the releases have them, with reasons, and as the H200 records saw them run."""

from dataclasses import replace
from pathlib import Path

import pytest

from attnlib.core.releases import FLASHINFER, read_releases
from attnlib.core.spec import EXTEND_MODES, AttnSpec
from attnlib.run import store
from attnlib.run.rows import items_of, rows_of
from attnlib.select import Call, explain
from attnlib.select.text import headline
from attnlib.studies.fa3_decode_regression import STUDY

DATA = Path(__file__).resolve().parents[2] / "data" / "records"
FP8 = "float8_e4m3fn"
BF16 = AttnSpec(32, 8, 128, 16)
FP8_CACHE = AttnSpec(32, 8, 128, 16, "bfloat16", FP8)
LATENT = AttnSpec(128, 1, 576, 64)
STEP = Call(kv_lens=(8192,) * 16)
NEWEST = [*read_releases(FLASHINFER)][-1]
VLLM = ("vllm==0.33.0", "auto")
SPARSE = {"topk": 2048}
VLLM_MLA = {"mode": "mla", "library": "vllm==0.33.0"}


def auto(spec, release, gpu="sm90", mode="decode", **more):
    return explain(spec, mode=mode, gpu=gpu, library=f"flashinfer=={release}", **more)


def test_a_pick_that_cannot_run_says_so_and_is_not_replaced():
    choice = auto(FP8_CACHE, "0.6.3")
    assert choice.backend == "fa3" and "the module does not compile" in choice.problem
    assert not auto(FP8_CACHE, "0.6.4").problem


def test_the_verify_kernel_that_hides_behind_fa2_is_named():
    spec = AttnSpec(4, 1, 256, 1, "bfloat16", FP8)
    choice = auto(spec, "0.7.2.post1", mode="target_verify", call=Call(custom_mask=True))
    assert choice.backend == "fa2" and "eagle_verify_fp8kv_sm90" in choice.decided_by.why


def test_an_order_falls_through_to_the_next_that_can_and_says_who_could_not():
    spec = AttnSpec(128, 1, 576, 1)
    choice = auto(spec, "0.7.2", gpu="sm100", mode="mla", call=STEP)
    refused = [reason.subject for reason in choice.reasons if reason.kind == "limit"]
    assert choice.backend == choice.order[0] == "fa2"
    assert set(refused) == {"trtllm-gen", "cute-dsl-monolithic"}


def test_a_rule_that_asks_for_lengths_says_how_to_give_them():
    with pytest.raises(ValueError, match=r"tests work: give call=Call\(kv_lens="):
        auto(LATENT, "0.7.2", "sm100", "mla")


def test_lengths_in_lists_are_those_in_tuples():
    call = Call(kv_lens=[300, 300], q_lens=(300, 300), fp16_qk=True)
    spec = AttnSpec(8, 8, 128, 16)
    choice = auto(spec, "0.7.2", gpu="sm120", mode="prefill_ragged", call=call)
    assert choice.kernel == "fmha_v2" and not choice.problem


OLD_SGLANG = ("flashinfer==0.6.1", "sglang<0.5.9")
NEW_SGLANG = ("flashinfer==0.6.3", "sglang")
MINI = ("flashinfer==0.6.3", "mini-sglang")
GROUPS = {
    (8, 8): "cuda-cores",
    (24, 8): "cuda-cores",
    (32, 8): "fa2",
    (56, 8): "fa2",
}
NO_GROUPS_FP8 = AttnSpec(8, 8, 128, 16, "bfloat16", FP8)
NO_FLAGS: dict[str, object] = {}

KERNELS = [
    # SGLang pins fa2 since 0.5.9, and left decode and verify to auto before.
    (*OLD_SGLANG, BF16, "sm90", "decode", NO_FLAGS, "fa3"),
    (*NEW_SGLANG, BF16, "sm90", "decode", NO_FLAGS, "fa2"),
    (*OLD_SGLANG, BF16, "sm90", "target_verify", NO_FLAGS, "fa3"),
    (*NEW_SGLANG, BF16, "sm90", "target_verify", NO_FLAGS, "fa2"),
    *(
        (*OLD_SGLANG, BF16, "sm90", mode, NO_FLAGS, "fa2")
        for mode in ("prefill_paged", "draft_extend", "dllm_extend")
    ),
    # Tensor cores begin at four query heads per KV head; SGLang uses them for every FP8 cache.
    *(
        (*policy, AttnSpec(*heads, 128, 16), "sm90", "decode", NO_FLAGS, kernel)
        for policy in (NEW_SGLANG, MINI)
        for heads, kernel in GROUPS.items()
    ),
    (*NEW_SGLANG, NO_GROUPS_FP8, "sm90", "decode", NO_FLAGS, "fa2"),
    # Of SGLang and vLLM calls that `test_selectors` has not drawn.
    ("sglang==0.5.23", "auto", LATENT, "sm100", "mla", {"kv_lens": (9,)}, "flashinfer fa2"),
    *(
        (f"sglang=={r}", "auto", BF16, "sm90", mode, {"model": model}, kernel)
        for r, mode, model, kernel in (
            ("0.5.10", "decode", "gemma4", "fa3"),
            ("0.5.11", "decode", "gemma4", "triton"),
            ("0.5.19", "decode", "Qwen3VLMoeForConditionalGeneration", "fa3"),
            ("0.5.20", "decode", "Qwen3VLMoeForConditionalGeneration", "flashinfer fa2"),
            ("0.5.20", "target_verify", "qwen3-vl", "fa3"),
            ("0.5.23", "decode", "beam", "trtllm_mha xqa"),
            ("0.5.22", "decode", "InklingForConditionalGeneration", "fa4"),
        )
    ),
    # Since 0.25.0 vLLM's FlashInfer backend decodes with XQA on Hopper.
    ("vllm==0.24.0", "FLASHINFER", BF16, "sm90", "decode", NO_FLAGS, "FLASHINFER fa2"),
    ("vllm==0.25.0", "FLASHINFER", BF16, "sm90", "decode", NO_FLAGS, "FLASHINFER xqa"),
    # vLLM takes the first of its list that passes its checks.
    (*VLLM, AttnSpec(128, 1, 512, 64), "sm90", "sparse_mla", SPARSE, "FLASHINFER_MLA_SPARSE_SM90"),
    # It orders sparse MLA over a 16-bit cache on Blackwell by heads.
    (*VLLM, AttnSpec(16, 1, 576, 64), "sm100", "sparse_mla", SPARSE, "FLASH_ATTN_MLA_SPARSE_FA4"),
    (*VLLM, AttnSpec(32, 1, 576, 64), "sm100", "sparse_mla", SPARSE, "FLASHMLA_SPARSE"),
    # On SM120 its one sparse backend reads no bfloat16 cache: a wish for it is refused.
    (*VLLM, LATENT, "sm120", "sparse_mla", SPARSE | {"pinned_kv_dtype": True}, ""),
    # Without NVIDIA's cubins its FlashInfer falls back to auto.
    (*VLLM, FP8_CACHE, "sm120", "decode", NO_FLAGS, "FLASHINFER xqa"),
    (*VLLM, FP8_CACHE, "sm120", "decode", {"cubins": False}, "FLASHINFER fa2"),
]


@pytest.mark.parametrize(
    "library, policy, spec, gpu, mode, call, chosen",
    KERNELS,
)
def test_an_engine_runs_what_its_rules_say(library, policy, spec, gpu, mode, call, chosen):
    choice = explain(
        spec,
        mode=mode,
        gpu=gpu,
        library=library,
        policy=policy,
        call=Call(**call),
    )
    names = (choice.backend, choice.kernel) if choice.inner else (choice.backend,)
    assert " ".join(names) == chosen


def test_a_window_of_the_layer_is_one_of_the_call():
    options = {"library": "vllm==0.25.0", "policy": "FLASHINFER", "mode": "decode", "gpu": "sm90"}
    assert explain(BF16, **options).backend == "FLASHINFER"
    problem = explain(replace(BF16, window=64), **options).problem
    assert problem.startswith("it raises on Hopper for sliding windows")
    later = explain(replace(BF16, window=64), **{**options, "library": "vllm==0.30.0"})
    assert not later.problem


def test_every_row_on_the_way_is_among_the_reasons_with_why_it_failed():
    reasons = auto(BF16, "0.6.4").reasons
    *before, last = reasons
    assert last.matched
    assert not any(reason.matched for reason in before)
    assert reasons[1].why == "only without tensor cores; this call has them"
    assert "needs release < 0.6.0; it is 0.6.4" in [reason.why for reason in before]


def test_a_backend_asked_for_by_name_is_the_first_reason():
    choice = auto(BF16, "0.6.3", policy="fa2")
    assert choice.backend == "fa2"
    assert choice.reasons[0].kind == "policy"
    assert headline(choice) == "flashinfer==0.6.3, decode on sm90, policy fa2: fa2"
    latent = explain(LATENT, gpu="sm100", policy="FLASHINFER_MLA", **VLLM_MLA)
    assert latent.backend == "FLASHINFER_MLA"


@pytest.mark.parametrize(
    "backend, spec, options, why",
    [
        ("fa3", BF16, {"gpu": "sm80"}, "needs compute capability 9.x"),
        ("fa2", AttnSpec(32, 8, 128, 16, FP8), {}, "no FP8 query"),
        ("trtllm-gen", BF16, {}, "needs SM100"),
        ("FLASHINFER_MLA", LATENT, VLLM_MLA, "run mla on sm90"),
    ],
)
def test_a_backend_asked_for_by_name_that_cannot_run_raises_with_the_reason(
    backend, spec, options, why
):
    usual = {"gpu": "sm90", "mode": "decode", "library": "flashinfer==0.6.3"}
    with pytest.raises(RuntimeError, match=rf"policy {backend} cannot.*{why}"):
        explain(spec, policy=backend, **usual | options)


RELEASES = "release of flashinfer must be a known one, 0.2.0.post1.*got"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gpu": "sm70"}, "gpu must be one of sm75, sm80, sm86, .*, got 'sm70'"),
        ({"mode": "chunk"}, "mode of flashinfer must be one of decode, prefill_paged.*got 'chunk'"),
        ({"policy": "best"}, "policy of flashinfer in mode decode must be one of auto, sglang"),
        ({"library": "trtllm==1"}, "library must be such as flashinfer==0.6.3, one of flashinfer,"),
        ({"library": "mini-sglang==1"}, "mini-sglang has no releases"),
        ({"library": "sglang==0.5.23,vllm==0.33.0"}, "must be ENGINE,flashinfer==RELEASE, got"),
        ({"library": "flashinfer==0.7.2,flashinfer==0.7.1"}, "must be ENGINE,flashinfer==RELEASE"),
        ({"library": "sglang==0.5.23,flashinfer==0.7.1,flashinfer==0.7.1"}, "must be ENGINE,flash"),
        ({"library": "sglang==0.5.23,"}, "library must be such as flashinfer==0.6.3"),
        ({"library": "sglang==0.5.23,flashinfer==9.8.1"}, f"got '9.8.1'; nearest to it: {NEWEST}"),
        ({"library": "mini-sglang", "mode": "mla"}, "mode of mini-sglang must be one of decode"),
        ({"library": "flashinfer==0.1.9"}, RELEASES),
        ({"library": "flashinfer==0.8.0"}, RELEASES),
        ({"library": "flashinfer=="}, "release of flashinfer must be given, such as .* got"),
        ({"library": "flashinfer==newest"}, RELEASES),
        ({"mode": "mla"}, "num_kv_heads must be 1 in mode mla, got 8"),
        ({"mode": "sparse_mla", "spec": LATENT}, "topk must be >= 1 in mode sparse_mla, got 0"),
    ],
)
def test_what_nobody_knows_is_refused_with_what_there_is(change, message):
    call = {"spec": BF16, "mode": "decode", "gpu": "sm90", "library": "flashinfer==0.7.2"}
    with pytest.raises(ValueError, match=message):
        explain(**call | change)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"q_lens": (1, 2), "kv_lens": (8,)}, "one entry for each of kv_lens"),
        ({"topk": -1}, "topk must be >= 0, got -1"),
        ({"eagle_topk": -1}, "eagle_topk must be >= 0, got -1"),
        ({"head_dim_vo": -1}, "head_dim_vo must be >= 0, got -1"),
        ({"kv_lens": (8, 0)}, "kv_lens and q_lens must be >= 1"),
    ],
)
def test_a_call_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Call(**fields)


NAMES = ("auto", "graph-auto", "fa2", "fa3", "cuda-cores")
POLICY = {f"flashinfer-{name}": name.removeprefix("graph-") for name in NAMES}
RECORDED = [
    (path.stem, path.parent.name)
    for study in ("auto_resolution", "*fa3_decode_regression", "measurement_trust")
    for path in sorted(DATA.glob(f"*/{study}.parquet"))
]
FAILED = ("error", "refused")


@pytest.mark.usefixtures("published_records")
@pytest.mark.parametrize("study, machine", RECORDED)
def test_what_ran_on_an_h200_is_what_the_tables_say(study, machine):
    frame = store.load(study, machine)
    ran = frame[frame.backend.isin(POLICY) & (frame.status == "ok")]
    ran = ran.drop_duplicates(["backend", "release", "case", "reported_backend"])
    for _, row in ran.iterrows():
        choice = auto(row.case.spec, row.release, policy=POLICY[row.backend])
        assert choice.kernel == row.kernel_family
        assert choice.problem == ""
        assert row.reported_backend in (choice.kernel, "auto")


@pytest.mark.usefixtures("published_records")
def test_what_an_h200_could_not_run_has_a_problem_and_raises_by_name():
    frame = store.load(STUDY.name, STUDY.reference_machine)
    picked = store.load("auto_resolution", "nvidia-h200-bbfefd08")
    failed = picked[picked.status.isin(FAILED)]
    for _, row in failed.iterrows():
        assert auto(row.case.spec, row.release).problem
    named = frame[frame.status.isin(FAILED)].drop_duplicates(["backend", "release", "case"])
    assert (len(failed), named.empty) == (2, False)
    for _, row in named.iterrows():
        with pytest.raises(RuntimeError, match="cannot run decode on sm90"):
            auto(row.case.spec, row.release, policy=POLICY[row.backend])


@pytest.mark.usefixtures("published_records")
def test_what_auto_ran_in_the_modes_of_an_engine_is_what_the_tables_say():
    ran = []
    for machine in store.machines("engine_modes"):
        table = store.read("engine_modes", machine)
        for item, row in zip(items_of(table), rows_of(table), strict=True):
            if row["status"] == "ok" and item.backend == "flashinfer-prefill-auto":
                ran.append((item.case, row))
    assert {case.mode for case, _ in ran} == set(EXTEND_MODES)
    for case, row in ran:
        release = row["versions.flashinfer-python"]
        call = Call(custom_mask=case.mask in ("tree", "chain"))
        choice = auto(case.spec, release, mode=case.mode, call=call)
        assert choice.kernel == row["kernel_family"] == row["reported_backend"], case
