"""The plugin in SGLang's place, over SGLang's own code: same words, other launches."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import sglang_code
from support.sglang_code import DECODE, FLASH, LENS, RANKS, ROWS, AttentionType
from support.sglang_layers import (
    GQA,
    MLA,
    RELEASE,
    TOKENS,
    WIDE,
    Capped,
    layer_of,
    step_of,
)

from attnlib.core.fa2.words import plan_words
from attnlib.core.schedule.caps import num_splits
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.spec import AttnSpec
from attnlib.engines import arms, capture, plans, sglang, sglang_hooks

if torch.cuda.is_available():
    pytest.skip("the stand-ins are for machines without a GPU", allow_module_level=True)


@pytest.fixture
def engine(monkeypatch):
    """SGLang's parts, not hooked."""
    monkeypatch.setattr(RELEASE, lambda name: "0.5.11")
    return sglang_code.installed(monkeypatch, sglang_code.parts())


@pytest.fixture
def loaded(engine, monkeypatch):
    """Load the plugin with these variables, as SGLang does; its parts, hooked."""

    def load(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"ATTNLIB_SGLANG_{name}", str(value))
        sglang.register()
        engine.HookRegistry.apply_hooks()
        return engine

    return load


def captured(backend, spec_info=None):
    """The engine's lengths of a graph of three requests, and what the backend holds of it."""
    lens = torch.ones(3, dtype=torch.int32)
    how = (3, 3, ROWS, lens, None, DECODE, spec_info)
    backend.init_forward_metadata_capture_cuda_graph(*how)
    return lens, backend.decode_cuda_graph_metadata[3]


def replay(backend, lens, spec_info=None):
    how = (3, ROWS, lens, int(lens.sum()), None, DECODE, spec_info, lens)
    backend.init_forward_metadata_replay_cuda_graph(*how)


def live(backend, lens):
    """What a replay leaves: lengths, sums, and the pages of each row that it reads."""
    step = backend.decode_cuda_graph_metadata[3]
    pages = [-(-int(n) // backend.page_size) for n in lens]
    table = [row[:n].tolist() for row, n in zip(step.page_table, pages, strict=True)]
    return step.cache_seqlens_int32.tolist(), step.cu_seqlens_k.tolist(), table


OF_EVERY_RELEASE = ("eager", "sglang", "fused")
"""Values of the arm of metadata, but for `one-launch`."""


@pytest.mark.parametrize("page_size", [1, 16])
def test_arms_alternate_step_by_step_and_write_the_metadata_that_sglang_does(loaded, page_size):
    backend = loaded(METADATA="sglang").FlashAttentionBackend(page_size)
    lens, step = captured(backend)
    assert step.cache_seqlens_int32.data_ptr() == lens.data_ptr(), "as in SGLang"
    for number, arm in enumerate(OF_EVERY_RELEASE * 2):
        arms.STATE.arms["metadata"] = arm
        lens.copy_(LENS - number % 2 * torch.tensor([5, 0, 9]))
        step.page_table.zero_()
        replay(backend, lens)
        rows = backend.req_to_token[ROWS][:, : sglang_code.CONTEXT : page_size] // page_size
        wanted = [row[: -(-int(n) // page_size)].tolist() for row, n in zip(rows, lens, strict=1)]
        assert live(backend, lens) == (lens.tolist(), [0, *lens.cumsum(0).tolist()], wanted), arm
        assert backend._sched_meta_buf[:17].tolist() == [7] * 17, arm
    assert backend.schedules == 1 + 6, "at capture, and in each step"
    assert arms.STATE.calls == {f"metadata={arm}": 2 for arm in OF_EVERY_RELEASE}


@pytest.mark.parametrize("arm", OF_EVERY_RELEASE)
def test_a_draft_step_keeps_sglangs_own_metadata(loaded, arm):
    backend = loaded(METADATA=arm).FlashAttentionBackend()
    captured(backend, object())
    replay(backend, LENS, object())
    assert live(backend, LENS)[:2] == ([35, 3, 62], [0, 35, 38, 100])
    assert not arms.STATE.calls


def test_a_schedule_is_left_to_the_layers_by_one_hook_beside_that_of_steps(loaded):
    engine = loaded(SCHEDULE="layer")
    _, step = captured(engine.FlashAttentionBackend())
    assert step.scheduler_metadata is None and len(engine.HookRegistry._hooks) == 2


GQA_CALL = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
MLA_CALL = {"num_qo_heads": 128, "num_kv_heads": 1, "head_dim": 64, "head_dim_v": 512}


def cap_of(cap, requests=64, tokens=1, width=WIDE, **facts):
    """What `caps` gives for a call of SGLang's, by facts that are written here."""
    more = {"page_size": 1, "causal": True, "varlen_q": True, "build": "sglang", "num_sms": 132}
    more |= {"batch_size": requests, "max_seqlen_q": tokens, "max_seqlen_k": width}
    return num_splits(SchedulerFacts(**more | facts), cap)


@pytest.fixture(params=[arms.OWN_CAP, sglang.NEWEST])
def capped(request, monkeypatch):
    return Capped(request.param, monkeypatch)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("arm", ["upstream", "bounded", "9"])
def test_words_and_call_of_a_decode_step_have_one_cap(capped, arm, graph):
    capped.load(arm)
    wanted = cap_of(arm, **GQA_CALL)
    assert wanted > cap_of("1", **GQA_CALL), "more than one"
    step = step_of("decode", longest=1 if graph else WIDE)  # a capture has requests of one token
    assert capped.call("decode", layer_of(GQA), graph=graph, step=step) == [wanted, wanted]
    words, attention = capped.asked
    assert attention["scheduler_metadata"] is not None
    assert words["num_heads"] == 32 and arms.STATE.calls[f"splits={arm}"] == 1
    # A replay: SGLang passes the longest request, the words keep the graph's number.
    if graph:
        step = step_of("decode", longest=70)
        capped.asked.clear()
        arms.STATE.arms["splits"] = "3"
        capped.backend.init_forward_metadata_out_graph(step, in_capture=False)
        assert [call["num_splits"] for call in capped.asked] == [wanted]


@pytest.mark.parametrize("graph", [True, False])
def test_a_call_has_the_cap_of_its_words_where_its_heads_are_others(capped, graph):
    capped.load("upstream", num_attention_heads=64, num_kv_heads=32)
    wanted = cap_of("upstream", **GQA_CALL | {"num_qo_heads": 64, "num_kv_heads": 32})
    assert wanted != cap_of("upstream", **GQA_CALL)
    assert capped.call("decode", layer_of(GQA), graph=graph) == [wanted, wanted]


def test_words_of_a_step_without_a_graph_are_capped_by_its_page_table(capped):
    capped.load("upstream")
    step = step_of("decode", longest=3000)
    wanted = cap_of("upstream", width=3000, **GQA_CALL)
    assert wanted != cap_of("upstream", **GQA_CALL)
    assert capped.call("decode", layer_of(GQA), graph=False, step=step) == [wanted, wanted]


@pytest.mark.parametrize(
    ("mode", "shape", "call"),
    [
        ("draft_decode", GQA, GQA_CALL),
        ("target_verify", GQA, GQA_CALL),
        ("decode", MLA, MLA_CALL),
        ("draft_decode", MLA, MLA_CALL),
        ("target_verify", MLA, MLA_CALL),
    ],
)
@pytest.mark.parametrize("graph", [True, False])
def test_a_call_is_capped_by_its_layer_and_tokens(capped, mode, shape, call, graph, caplog):
    capped.load("bounded", use_mla=shape is MLA)
    step = step_of(mode, requests=32)
    # Without a graph, the table has the tokens that are drafted, too.
    more = {"decode": 0, "draft_decode": 1, "target_verify": 4}[mode]
    width = WIDE if graph else min(WIDE, 4000 + more)
    step = step if graph else step_of(mode, requests=32, longest=4000)
    wanted = cap_of("bounded", requests=32, tokens=TOKENS[mode], width=width, **call)
    assert wanted > 1
    assert capped.call(mode, layer_of(shape), graph=graph, step=step) == [wanted]
    (asked,) = capped.asked
    assert asked["max_seqlen_q"] == TOKENS[mode] and (asked.get("qv") is None) is (shape is GQA)
    assert asked.get("scheduler_metadata") is None
    kind = {"target_verify": "verification"}.get(mode, mode.replace("_", " "))
    prefix = "MLA " if shape is MLA else ""
    said = f"attnlib: splits in {prefix}{kind}: {wanted} for 32 requests of {TOKENS[mode]} query"
    assert said in caplog.text and "attnlib runs splits=bounded" in caplog.text


@pytest.mark.parametrize("shape", [GQA, MLA])
@pytest.mark.parametrize("mode", ["extend", "draft_extend_v2"])
def test_a_prefill_keeps_sglangs_cap(capped, mode, shape, caplog):
    capped.load("64", use_mla=shape is MLA)
    assert capped.call(mode, layer_of(shape)) == [0]
    assert not arms.STATE.calls and "attnlib runs" not in caplog.text
    capped.call("decode", layer_of(shape))
    assert capped.call(mode, layer_of(shape)) == [0], "after a decode as before"


@pytest.mark.parametrize("mode", ["decode", "target_verify"])
def test_sglangs_numbers_are_back_where_a_call_raises_and_it_did_not_run(capped, mode):
    capped.load("64").raises = True
    with pytest.raises(RuntimeError, match="out of memory"):
        capped.call(mode, layer_of(GQA))
    assert "splits=64" not in arms.STATE.calls


def test_a_layer_with_a_window_has_a_cap_of_its_own_and_no_words(capped):
    capped.load("upstream")
    windowed = layer_of(GQA, sliding_window_size=1023)
    wanted = cap_of("upstream", window=(1023, 0), **GQA_CALL)
    words, attention = capped.call("decode", windowed)
    assert (words, attention) == (cap_of("upstream", **GQA_CALL), wanted)
    assert words != attention and capped.asked[1]["scheduler_metadata"] is None


def test_heads_are_those_of_the_layer_where_attention_is_data_parallel(capped):
    alone = {"_disable_scheduler_metadata_precompute": True, "num_attention_heads": 0}
    capped.load("upstream", **alone)
    assert capped.call("decode", layer_of(GQA)) == [cap_of("upstream", **GQA_CALL)]


def test_a_cache_of_fp8_is_a_fact_of_calls_that_read_it_as_such(capped):
    capped.load("upstream", kv_cache_dtype=torch.float8_e4m3fn, kv_cache_dtype_str="fp8_e4m3")
    wanted = cap_of("upstream", dtype="float8_e4m3fn", **GQA_CALL)
    assert capped.call("decode", layer_of(GQA)) == [wanted, wanted]
    capped.backend.use_mla = True  # SGLang casts the latent cache
    assert capped.call("decode", layer_of(MLA)) == [cap_of("upstream", **MLA_CALL)]


@pytest.mark.parametrize(
    ("mode", "own", "layer", "reason"),
    [
        ("decode", {}, {"is_cross_attention": True}, "cross attention"),
        ("decode", {"attn_cp_size": 2}, {}, "context parallelism"),
        ("draft_decode", {"topk": 4}, {}, "drafts with topk above 1"),
        ("target_verify", {"topk": 4}, {}, "drafts with topk above 1"),
        ("target_verify", {"speculative_num_draft_tokens": 9}, {}, "more than 8 tokens"),
        ("target_verify", {}, {"attn_type": AttentionType.ENCODER_ONLY}, "an encoder's attention"),
    ],
)
def test_what_keeps_sglangs_cap_is_counted_by_its_name(capped, mode, own, layer, reason):
    capped.load("bounded", **own)
    backend, step = capped.backend, step_of(mode)
    backend.forward_metadata_spec_decode_expand = capped._prefill(step, 1)
    backend.forward_metadata = capped._prefill(step, own.get("speculative_num_draft_tokens", 4))
    splits = capped.attend(layer_of(GQA, **layer), step)
    assert {*splits} == {0} and len(splits) == 1 + (reason == "drafts with topk above 1")
    assert arms.STATE.calls == {f"splits: {reason}": 1}


@pytest.mark.parametrize("own", [{"attn_cp_size": 2}, {"is_prefill_aware_swa": True}])
def test_words_of_calls_that_keep_sglangs_cap_keep_it_too(capped, own):
    capped.load("bounded", **own)
    lens = torch.ones(3, dtype=torch.int32)
    capped.backend._compute_scheduler_metadata(3, 1, lens, lens)
    assert [call["num_splits"] for call in capped.asked] == [0]


def test_chunked_attention_keeps_sglangs_cap_where_its_metadata_is_there(capped):
    capped.load("9", has_local_attention=True, attention_chunk_size=8192)
    capped.backend.local_attn_builder = SimpleNamespace(applies=lambda *_: True)
    step, names = step_of("decode"), ("block_table", "seqused_k", "query_start_loc")
    names = (*names, "max_query_len", "max_seq_len")
    chunks = SimpleNamespace(**{f"local_{name}": None for name in names})
    capped.backend.forward_metadata = capped._prefill(step, 1)
    capped.backend.forward_metadata.local_attn_metadata = chunks
    assert capped.attend(layer_of(GQA, use_irope=True), step) == [0]
    assert arms.STATE.calls == {"splits: chunked attention": 1}
    capped.backend.local_attn_builder = SimpleNamespace(applies=lambda *_: False)
    assert capped.attend(layer_of(GQA), step)[1:] == [9], "its other layers are as ever"


@pytest.mark.parametrize(
    ("own", "major", "words"),
    [
        ({"fa_impl_ver": 4}, 9, "FlashAttention-3"),
        ({}, 10, "a Hopper GPU"),
        ({"num_splits": 1}, 9, "no splits of SGLang's own .no --enable-deterministic-inference"),
    ],
)
def test_splits_that_cannot_be_reached_are_refused_by_name(capped, monkeypatch, own, major, words):
    gpu = SimpleNamespace(multi_processor_count=132, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    with pytest.raises(ValueError, match=f"ATTNLIB_SGLANG_SPLITS=bounded must have {words}"):
        capped.load("bounded", **own)
    assert not arms.STATE.calls


@pytest.mark.parametrize("splits", ["0", "256", "many", "-1", "1..255", "default"])
def test_a_cap_is_a_word_or_a_number_of_splits(loaded, splits):
    words = f"ATTNLIB_SGLANG_SPLITS must be one of upstream, bounded, 1..255, got '{splits}'"
    with pytest.raises(SystemExit, match=words):
        loaded(SPLITS=splits)


def test_splits_of_a_release_whose_own_cap_is_upstreams_are_refused(loaded, monkeypatch):
    monkeypatch.setattr(RELEASE, lambda _: "0.5.15")
    words = "SPLITS must have SGLang 0.5.16 or later: .* cap splits as upstream does, got 0.5.15"
    with pytest.raises(SystemExit, match=words):
        loaded(SPLITS="bounded")


def test_one_launch_in_a_release_before_the_first_that_was_read_for_it_is_refused(loaded):
    words = "METADATA=one-launch must have SGLang 0.5.16 or later, got 0.5.11: use fused"
    with pytest.raises(SystemExit, match=words):
        loaded(METADATA="one-launch")


def test_a_sliding_window_is_mapped_by_the_pools_int64_map(engine):
    backend = engine.FlashAttentionBackend()
    _, step = captured(backend)
    for arm in ("eager", "fused"):
        window = torch.zeros_like(step.page_table)
        call = (
            *(step.cache_seqlens_int32, step.cu_seqlens_k, step.page_table, backend.req_to_token),
            *(ROWS, torch.arange(64), 60, LENS, 0, 1, window),
            SimpleNamespace(full_to_swa_index_mapping=torch.arange(400) + 1000),
        )
        arms.STATE.arms["metadata"], arms.STATE.backend = arm, backend
        sglang_hooks.set_metadata(engine.normal_decode_set_metadata, *call)
        for row, length in enumerate(LENS):
            wanted = (step.page_table[row, :length] + 1000).tolist()
            assert window[row, :length].tolist() == wanted


def test_a_schedule_holds_for_graphs_that_are_captured_later(loaded):
    backend = loaded(METADATA="sglang", SCHEDULE="once").FlashAttentionBackend()
    _, step = captured(backend)
    assert step.scheduler_metadata is not None
    arms.STATE.arms["schedule"] = "layer"
    lens, step = captured(backend)
    assert step.scheduler_metadata is None
    before = backend.schedules
    lens.copy_(LENS)
    replay(backend, lens)
    assert live(backend, LENS)[0] == LENS.tolist() and backend.schedules == before


@pytest.mark.parametrize("arm", arms.ARMS["decode"])
def test_graphs_and_steps_without_one_have_wrappers_of_the_arms_kernel(loaded, arm):
    engine = loaded(DECODE=arm)
    backend = engine.FlashInferAttnBackend(engine.ModelRunner())
    _, (wrapper,) = captured(backend)
    plans = wrapper.plans
    replay(backend, LENS)
    planned_by_us = arm == "planned"
    assert wrapper.plans - plans == (not planned_by_us)
    assert hasattr(wrapper, "attnlib") == planned_by_us
    kernel = "fa3" if arm == "fa3" else "fa2"
    assert wrapper._backend == backend.decode_wrappers[0]._backend == kernel
    assert arms.STATE.calls[f"decode={arm}"] == 2, "at capture and in a step"


def test_planned_takes_each_graphs_wrapper_over_and_nothing_else_plans_or_fills_it(loaded):
    engine = loaded(DECODE="planned")
    backend = engine.FlashInferAttnBackend(engine.ModelRunner())
    _, (wrapper,) = captured(backend)
    own = wrapper.attnlib
    replay(backend, LENS)
    assert wrapper.plans == 1 and wrapper._plan_info is own.info
    words = wrapper._int_workspace_buffer[: own.layout.int_bytes].view(torch.int32)
    assert words.tolist() == plan_words(own.shape, LENS.tolist()).image(len(words)).tolist()
    assert backend.kv_indptr[0][:4].tolist() == [0, 33, 34, 94]
    table = backend.indices_updater_decode.req_to_token[ROWS]
    slots = [slot for row, n in zip(table, LENS, strict=True) for slot in row[:n].tolist()]
    assert backend.cuda_graph_kv_indices[0][:94].tolist() == slots
    assert backend.kv_last_page_len.tolist() == [1] * 4
    assert arms.STATE.calls["decode=planned"] == 2, "at capture and in a step"
    (plain,) = backend.decode_wrappers
    updater = backend.indices_updater_decode
    begin = lambda self, wrapper, *_: wrapper.begin_forward()  # noqa: E731
    sglang_hooks.begin_forward(begin, updater, plain, ROWS, LENS)
    assert not hasattr(plain, "attnlib"), "without a graph as ever"


@pytest.mark.parametrize(
    ("arm", "own", "server", "words"),
    [
        ("fa2", {"decode_use_tensor_cores": False}, {}, "_DECODE=fa2 must have tensor cores"),
        ("fa3", {"decode_use_tensor_cores": False}, {}, "_DECODE=fa3 must have tensor cores"),
        ("planned", {"decode_use_tensor_cores": False}, {}, "planned must have tensor cores"),
        ("planned", {"num_wrappers": 2}, {}, "must have full self-attention alone"),
        ("planned", {"enable_deterministic": True}, {}, "must have splits"),
        ("planned", {}, {"disable_cuda_graph": True}, "must have CUDA graphs"),
        ("planned", {}, {"speculative_algorithm": "EAGLE"}, "must have no draft tokens"),
    ],
)
def test_an_arm_that_cannot_be_what_it_says_stops_the_engine(loaded, arm, own, server, words):
    engine = loaded(DECODE=arm)
    with pytest.raises(ValueError, match=words):
        engine.FlashInferAttnBackend(engine.ModelRunner(own, **server))


def batch(mode="DECODE", lens=(7, 9), queries=None):
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        batch_size=2,
        seq_lens_cpu=None if lens is None else torch.tensor(lens),
        extend_seq_lens_cpu=queries,
    )


def test_a_context_that_ranks_share_is_neither_planned_nor_captured(
    loaded, tmp_path, monkeypatch, caplog
):
    path = tmp_path / "steps.jsonl"
    engine = loaded(DECODE="planned", CAPTURE=path)
    ranks = SimpleNamespace(attn_tp_rank=0, attn_tp_size=2, attn_dcp_size=2)
    context = SimpleNamespace(get_parallel=lambda: ranks)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    with pytest.raises(ValueError, match="must have no decode context parallelism"):
        engine.FlashInferAttnBackend(engine.ModelRunner())
    assert engine.ModelRunner().forward(batch()) == "logits"
    assert path.read_text() == "" and "got decode context parallelism" in caplog.text


def test_one_step_in_ten_of_each_mode_is_captured_and_read_again(loaded, tmp_path):
    path = tmp_path / "steps.jsonl"
    runner = loaded(CAPTURE=path).ModelRunner()
    steps = [batch("EXTEND", (40, 8), [30, 8]), *(batch(lens=(n, 9)) for n in range(41, 61))]
    steps += [batch("IDLE", None)]
    assert [runner.forward(step) for step in steps] == ["logits"] * 22
    written = capture.read(path)
    assert [(s.mode, s.lengths, s.q_lengths) for s in written] == [
        *(("extend", "40+8", "30+8"), ("decode", "41+9", ""), ("decode", "51+9", "")),
        ("idle", "", ""),
    ]
    assert written[0].spec == AttnSpec(32, 8, 128, 16, "bfloat16", "float8_e4m3fn")
    assert (written[0].backend, written[0].batch_size, written[0].kind) == ("fa3", 2, "mha")
    whole = path.read_bytes() + b"\n"
    broken = {
        b'{"mode": "decode"}': "KeyError",
        b"7": "AttributeError",
        b"\xff": "UnicodeDecodeError",
    }
    broken[whole.splitlines()[0].replace(b"lens=40+8", b"lens=40*8")] = r"ValueError\(.lens must"
    broken[b'{"call": 7}'] = "AttributeError"
    for wrong, why in broken.items():
        path.write_bytes(whole + wrong)
        with pytest.raises(ValueError, match=f"steps.jsonl:6 must be a captured step, got {why}"):
            capture.read(path)


def test_a_rank_that_shares_its_batch_writes_nothing(loaded, tmp_path):
    engine = loaded(CAPTURE=tmp_path / "steps.jsonl")
    sys.modules[RANKS].get_attention_tp_rank = lambda: 1
    engine.ModelRunner().forward(batch())
    assert capture.read(tmp_path / "steps.jsonl") == []


def test_without_a_variable_nothing_is_hooked_and_with_one_the_log_says_what_is_on(loaded, caplog):
    assert loaded().HookRegistry._hooks == {} and caplog.messages == []
    loaded(METADATA="fused")
    # SGLang loads plugins before it sets its level: what is less than a warning is lost.
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "attnlib is on: {'metadata': 'fused'}, capture None")
    ]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"METADATA": "quick"}, "ATTNLIB_SGLANG_METADATA must be one of eager, .*, got 'quick'"),
        ({"METDATA": "fused"}, "a variable must be one of ATTNLIB_SGLANG_METADATA, .*METDATA"),
        ({"CAPTURE": "missing/steps"}, "CAPTURE must be a file to append to, got .*'missing/steps"),
        ({"METADATA": "one-launch", "SCHEDULE": "layer"}, "SCHEDULE must be once .* got 'layer'"),
    ],
)
def test_what_is_not_known_ends_the_process_with_what_is(loaded, variables, words):
    with pytest.raises(SystemExit, match=words):
        loaded(**variables)


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ("self, wrapper, lens", "must have the parameters paged_kernel_lens"),
        ("self, wrapper, paged_kernel_lens, shared_prefix", "must have no .*got shared_prefix"),
    ],
)
def test_a_later_release_with_other_parameters_is_refused(
    loaded, engine, signature, words, monkeypatch, caplog
):
    monkeypatch.setattr(RELEASE, lambda name: "0.6.0")
    updater = engine.FlashInferIndicesUpdaterDecode
    updater.call_begin_forward = eval(f"lambda {signature}: None")
    with pytest.raises(SystemExit, match=f"call_begin_forward {words}"):
        loaded(DECODE="planned")
    assert "is newer than" not in caplog.text, "it is refused"


@pytest.mark.parametrize("argument", [{"skip_page_table": True}, {"full_v2p": torch.ones(2)}])
def test_a_pool_that_only_sglang_knows_keeps_its_own_metadata(engine, argument):
    def later(
        cache_seqlens_int32,
        seq_len_delta=0,
        swa_page_table=None,
        skip_page_table=False,
        full_v2p=None,
    ):
        ran.append(cache_seqlens_int32)

    ran, arms.STATE.backend = [], object()
    arms.STATE.arms["metadata"] = "fused"
    sglang_hooks.set_metadata(later, "lens", **argument)
    assert ran == ["lens"]
    assert arms.STATE.calls == {"metadata: a pool that only SGLang knows": 1}


def test_metadata_of_a_capture_is_sglangs_own(engine):
    ran = []
    for in_capture in (True, False):
        sglang_hooks.prepare_step("backend", "batch", in_capture=in_capture)
        assert arms.STATE.backend == (None if in_capture else "backend")
    sglang_hooks.prepare_step("backend", "batch", True)
    arms.STATE.arms["metadata"] = "fused"
    sglang_hooks.set_metadata(lambda seq_len_delta: ran.append(seq_len_delta), 0)
    assert ran == [0] and not arms.STATE.calls


SET = "normal_decode_set_metadata"


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (lambda _: {FLASH: ModuleType(FLASH)}, "FlashAttentionBackend.* must be importable to be"),
        (
            lambda engine: engine.HookRegistry._patched.add(f"{FLASH}.{SET}"),
            "one that SGLang has hook",
        ),
        (lambda _: setattr(sys.modules[FLASH], SET, 7), f"{SET} must be a function .*, got 7"),
        (lambda _: {"attnlib.engines.sglang_hooks": None}, "sglang_hooks"),
    ],
)
def test_what_sglang_would_fail_to_hook_and_only_log_ends_the_process(
    loaded, engine, monkeypatch, breaks, words
):
    for name, module in (breaks(engine) or {}).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(SystemExit, match=words):
        loaded(METADATA="fused")


def test_the_guard_is_put_in_by_its_variable_and_checks_one_plan_of_a_graph_in_a_hundred(
    loaded, monkeypatch, caplog
):
    guarded, checked = sglang_code.stand_in_guard(monkeypatch), []

    def short(wrapper, seq_lens):
        checked.append(seq_lens.tolist())
        raise ValueError("wrapper must have a plan of fa2")

    monkeypatch.setattr(plans, "require_plan", short)
    engine = loaded(GUARD="log")
    assert len(engine.HookRegistry._hooks) == 3 and guarded == [("sglang", "log")]
    backend = engine.FlashInferAttnBackend(engine.ModelRunner())
    captured(backend)
    for _ in range(100):
        replay(backend, LENS)
    captured(backend)  # another wrapper, such as that of a sliding window, has its own turn
    assert checked == [[1, 1, 1], LENS.tolist(), [1, 1, 1]]
    assert "attnlib: wrapper must have a plan of fa2" in caplog.messages
