"""The plugin in SGLang's place, over SGLang's own code: same words, other launches."""

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support import sglang_code
from support.schedule_words import words_of
from support.sglang_code import DECODE, FLASH, LENS, RANKS, ROWS

from attnlib.core.fa2.words import plan_words
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import plan_splits
from attnlib.core.spec import AttnSpec
from attnlib.engines import arms, capture, plans, sglang, sglang_hooks
from attnlib.kinds.engine import serve

if torch.cuda.is_available():
    pytest.skip("the stand-ins are for machines without a GPU", allow_module_level=True)

RELEASE = "attnlib.engines.points.installed_version"


@pytest.fixture
def engine(monkeypatch):
    """SGLang's parts, not hooked."""
    monkeypatch.setattr(RELEASE, lambda name: "0.5.11")
    monkeypatch.setattr(sglang_hooks, "sm_count", lambda _: 132)
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


@pytest.mark.parametrize("page_size", [1, 16])
def test_arms_alternate_step_by_step_and_write_the_metadata_that_sglang_does(loaded, page_size):
    backend = loaded(METADATA="sglang").FlashAttentionBackend(page_size)
    lens, step = captured(backend)
    sizes = (3, 32, 8, 128, 1, sglang_code.CONTEXT, 132)
    facts = SchedulerFacts(*sizes, page_size=page_size, causal=True).settled
    assert step.cache_seqlens_int32.data_ptr() == lens.data_ptr(), "as in SGLang"
    for number, arm in enumerate(arms.ARMS["metadata"] * 2):
        sglang.use(metadata=arm)
        lens.copy_(LENS - number % 2 * torch.tensor([5, 0, 9]))
        step.page_table.zero_()
        replay(backend, lens)
        rows = backend.req_to_token[ROWS][:, : sglang_code.CONTEXT : page_size] // page_size
        wanted = [row[: -(-int(n) // page_size)].tolist() for row, n in zip(rows, lens, strict=1)]
        assert live(backend, lens) == (lens.tolist(), [0, *lens.cumsum(0).tolist()], wanted), arm
        ours = words_of(plan_splits(facts, lens.numpy())).tolist()
        words = ours if arm == "one-launch" else [7] * 17
        assert backend._sched_meta_buf[:17].tolist() == words, arm
    assert backend.schedules == 1 + 6, "at capture, and in the steps that are not one launch"
    assert arms.STATE.calls == {f"metadata={arm}": 2 for arm in arms.ARMS["metadata"]}


@pytest.mark.parametrize("arm", arms.ARMS["metadata"])
def test_a_draft_step_keeps_sglangs_own_metadata(loaded, arm):
    backend = loaded(METADATA=arm).FlashAttentionBackend()
    captured(backend, object())
    replay(backend, LENS, object())
    assert live(backend, LENS)[:2] == ([35, 3, 62], [0, 35, 38, 100])
    assert not arms.STATE.calls


def test_a_schedule_is_left_to_the_layers_by_one_hook_alone(loaded):
    engine = loaded(SCHEDULE="layer")
    _, step = captured(engine.FlashAttentionBackend())
    assert step.scheduler_metadata is None and len(engine.HookRegistry._hooks) == 1


def test_decode_is_capped_as_upstream_does_and_prefill_is_not(loaded, engine, monkeypatch):
    loaded(SPLITS="upstream", METADATA="sglang")
    with pytest.raises(ValueError, match="SPLITS=upstream must have SGLang 0.5.18 or later$"):
        engine.FlashAttentionBackend()
    monkeypatch.setattr(engine.FlashAttentionBackend, "decode_num_splits", 0, raising=False)
    monkeypatch.setattr(engine.FlashAttentionBackend, "max_num_pages", 131_072, raising=False)
    backend = engine.FlashAttentionBackend()
    assert (backend.decode_num_splits, backend.num_splits) == (15, 0), "4 for 64 requests of SGLang"
    asked = backend._get_scheduler_metadata = Mock(wraps=backend._get_scheduler_metadata)
    lens, _ = captured(backend)
    replay(backend, lens)
    splits = [call.kwargs["num_splits"] for call in asked.call_args_list]
    assert (splits, backend.num_splits) == ([15, 15], 0)
    sglang.use(metadata="one-launch")
    replay(backend, lens.copy_(LENS))
    sizes = (3, 32, 8, 128, 1, sglang_code.CONTEXT, 132)
    facts = SchedulerFacts(*sizes, page_size=1, causal=True, num_splits=15, build="sglang").settled
    words = words_of(plan_splits(facts, lens.numpy())).tolist()
    assert backend._sched_meta_buf[:17].tolist() == words, "the kernel's splits, too"
    assert arms.STATE.calls["splits=upstream"] == 1, "what was refused did not run"
    backend.fa_impl_ver, backend.use_mla = 4, True
    with pytest.raises(
        ValueError, match="FlashAttention-3 and no MLA and no splits of SGLang's own"
    ):
        sglang_hooks.cap_splits(None, backend)


def test_one_launch_without_a_schedule_or_its_heads_or_layout_says_so(loaded, monkeypatch):
    backend = loaded(METADATA="one-launch").FlashAttentionBackend()
    lens, step = captured(backend)
    own, step.scheduler_metadata = step.scheduler_metadata, None
    with pytest.raises(ValueError, match="must have a schedule to write, .*: use fused"):
        replay(backend, lens)
    step.scheduler_metadata = own
    with monkeypatch.context() as ranks:
        ranks.setattr(sys.modules[RANKS], "is_dp_attention_enabled", lambda: True)
        with pytest.raises(ValueError, match="must know the heads of a layer, got DP.*: use fused"):
            replay(backend, lens)
    step.scheduler_metadata = torch.cat([own, own])
    with pytest.raises(ValueError, match="of 3 requests must have 17 words, .*, got 34"):
        replay(backend, lens)


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


class Graphs:
    """SGLang's graphs of one batch size: made ready, and the backend's part of a capture."""

    def __init__(self, model):
        backend = model.attn_backend
        if hasattr(backend, "_sched_meta_buf"):
            backend.init_cuda_graph_state(4, sglang_code.MAX_BS)
        self.lens, self.step = captured(backend)


def test_schedules_have_graphs_side_by_side_which_alternate_with_all_metadata(loaded):
    backend = loaded(METADATA="sglang", SCHEDULE="once").FlashAttentionBackend()
    model = SimpleNamespace(attn_backend=backend)
    model.graph_runner = own = Graphs(model)
    sets = serve.GraphSets(model)
    for _ in range(2):
        for words in ({"schedule": "layer"}, {"metadata": "fused"}, {"metadata": "one-launch"}):
            sets.use(**{"metadata": "sglang", "schedule": "once"} | words)
            layer = "schedule" in words
            graphs = model.graph_runner
            assert (graphs is own) is not layer
            assert (graphs.step.scheduler_metadata is None) is layer
            graphs.lens.copy_(LENS)
            before = backend.schedules
            replay(backend, graphs.lens)
            assert live(backend, LENS)[0] == LENS.tolist()
            assert backend.decode_cuda_graph_metadata[3] is graphs.step
            assert backend.schedules - before == (words == {"metadata": "fused"})
    assert len(sets._sets) == 2, "captured once each"


def test_decode_kernels_have_graphs_side_by_side_each_with_wrappers_of_its_own(loaded):
    engine = loaded(DECODE="fa2")
    runner = engine.ModelRunner()
    runner.attn_backend = backend = engine.FlashInferAttnBackend(runner)
    runner.graph_runner = Graphs(runner)
    sets, seen = serve.GraphSets(runner), {}
    for arm in (*arms.ARMS["decode"] * 2, "fa3", "fa2"):
        sets.use(decode=arm)
        (wrapper,) = backend.decode_cuda_graph_metadata[3]
        assert seen.setdefault(arm, wrapper) is wrapper, "as it was captured"
        plans = wrapper.plans
        replay(backend, LENS)
        assert wrapper.plans - plans == (arm != "planned"), "ours plans itself"
        assert hasattr(wrapper, "attnlib") == (arm == "planned")
        assert [wrapper._backend, backend.decode_wrappers[0]._backend] == [
            "fa3" if arm == "fa3" else "fa2"
        ] * 2
    assert len(set(map(id, seen.values()))) == 3 and len(sets._sets) == 3
    assert arms.STATE.calls["decode=planned"] == 3, "at capture and in two steps"
    assert arms.STATE.calls["decode=fa3"] == 1


def test_graphs_of_other_kernels_are_refused_where_the_wrappers_were_made_for_fa3(loaded):
    engine = loaded(DECODE="fa3")
    runner = engine.ModelRunner()
    runner.attn_backend = engine.FlashInferAttnBackend(runner)
    runner.graph_runner = Graphs(runner)
    sets = serve.GraphSets(runner)
    sets.use(decode="fa3")
    with pytest.raises(ValueError, match="decode must be fa3, .* SGLang started, got 'fa2'"):
        sets.use(decode="fa2")


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
    broken = {b'{"mode": "decode"}': "TypeError", b"7": "TypeError", b"\xff": "UnicodeDecodeError"}
    broken[whole.splitlines()[0].replace(b'"40+8"', b"48", 1)] = r"ValueError\(.lengths must"
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
    assert loaded(METADATA="").HookRegistry._hooks == {} and caplog.messages == []
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
    assert len(engine.HookRegistry._hooks) == 1 and guarded == [("sglang", "log")]
    backend = engine.FlashInferAttnBackend(engine.ModelRunner())
    captured(backend)
    for _ in range(100):
        replay(backend, LENS)
    captured(backend)  # another wrapper, such as that of a sliding window, has its own turn
    assert checked == [[1, 1, 1], LENS.tolist(), [1, 1, 1]]
    assert "attnlib: wrapper must have a plan of fa2" in caplog.messages


def test_what_cannot_be_switched_says_why(loaded):
    with pytest.raises(RuntimeError, match="must be set when SGLang loads its plugins"):
        sglang.use(metadata="fused")
    loaded(METADATA="sglang", SCHEDULE="layer")
    with pytest.raises(ValueError, match="metadata must be one of eager, sglang, fused"):
        sglang.use(metadata="quick")
    with pytest.raises(ValueError, match="an arm must be one of metadata, schedule"):
        sglang.use(mode="fused")
    with pytest.raises(ValueError, match="SCHEDULE must be once"):
        sglang.use(metadata="one-launch")
