"""The guard in stand-ins with the signatures of the engines' modules, called as the engines do."""

import gc
import inspect
import logging
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

import attnlib
from attnlib.core import PlanLayout, PlanShape, SchedulerFacts, StepSchedules, plan_words
from attnlib.core.schedule import library
from attnlib.core.schedule.calls import defaults, facts_of
from attnlib.core.schedule.guard import _active as active
from attnlib.core.schedule.guard import _made, remember
from attnlib.engines import plans
from attnlib.engines.arms import State

MODEL = SimpleNamespace(heads=16, kv_heads=8, head_dim=128)  # Qwen3-0.6B
WIDTH = 512
PAGE = 16


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, cache_seqlens,
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
    attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    return torch.zeros(1 + 4 * -(-batch_size // 4) * 4, dtype=torch.int32)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=None, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    sinks=None, score_mod=None, aux_tensors=None, ver=3, out=None,
):  # fmt: skip
    return q


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None,
    q_v=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    return_softmax_lse=False, out=None, scheduler_metadata=None, q_descale=None, k_descale=None,
    v_descale=None, num_splits=0, fa_version=2, s_aux=None,
):  # fmt: skip
    return q


class Graph:
    """A CUDA graph whose replay runs no Python."""

    def capture_begin(self):
        pass

    def capture_end(self):
        pass

    def replay(self):
        return "replayed"


Graph.plain_replay = Graph.replay


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """SGLang's and vLLM's modules, and one of an engine that imported what it calls."""
    names = ("sgl_kernel", "sgl_kernel.flash_attn", "vllm", "vllm.vllm_flash_attn", "an_engine")
    for name in names:
        module = ModuleType(name)
        module.get_scheduler_metadata = get_scheduler_metadata
        module.flash_attn_with_kvcache = flash_attn_with_kvcache
        module.flash_attn_varlen_func = flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    yield sys.modules["an_engine"]
    for left in list(active):
        left.remove()


class Backend:
    """What SGLang 0.5.11 does of a decode step: heads by `tp_size`, a buffer for CUDA graphs."""

    def __init__(self, engine, tp_size=1):
        self.calls = engine
        self.tp_size = tp_size
        self.make = engine.get_scheduler_metadata
        self.buffer = torch.zeros(1 + 4 * 64, dtype=torch.int32)

    def metadata(self, batch=4, longest=8192, **told):
        shared = {"cu_seqlens_q": torch.arange(batch + 1), "page_size": PAGE, "causal": True}
        return self.make(
            batch_size=batch,
            max_seqlen_q=1,
            max_seqlen_k=longest,
            num_heads=MODEL.heads // self.tp_size,
            num_heads_k=MODEL.kv_heads // self.tp_size,
            headdim=MODEL.head_dim,
            cache_seqlens=torch.full((batch,), longest, dtype=torch.int32),
            **(shared | told),
        )

    def renew(self, batch=4, **told):
        words = self.metadata(batch, **told)
        self.buffer[: len(words)] = words
        return self.buffer[: len(words)]

    def attend(self, words, batch=4, **told):
        cache = torch.zeros(
            (
                2,
                PAGE,
                MODEL.kv_heads,
                MODEL.head_dim,
            ),
            dtype=torch.bfloat16,
        )
        return self.calls.flash_attn_with_kvcache(
            q=torch.zeros(
                (
                    batch,
                    MODEL.heads,
                    MODEL.head_dim,
                ),
                dtype=torch.bfloat16,
            ),
            k_cache=cache,
            v_cache=cache,
            page_table=torch.zeros((batch, WIDTH), dtype=torch.int32),
            cu_seqlens_q=torch.arange(batch + 1),
            max_seqlen_q=1,
            causal=True,
            scheduler_metadata=words,
            **told,
        )


def test_heads_of_the_wrong_parallel_size_are_caught_and_named(engines):
    attnlib.guard("sglang")
    backend = Backend(engines, tp_size=8)  # with DP attention a GPU has all heads
    words = backend.metadata()
    told = (
        "the schedule was made for num_qo_heads 2, num_kv_heads 1, num_splits 55; "
        "the attention call has num_qo_heads 16, num_kv_heads 8, num_splits 15 .call 1 that reads"
    )
    for made in (words, backend.renew()):
        with pytest.raises(ValueError, match=told):
            backend.attend(made)
    right = Backend(engines)
    assert right.attend(right.metadata(longest=700)).shape == (4, 16, 128)
    assert type(right.attend(right.renew())) is torch.Tensor


def test_a_larger_cap_of_splits_is_refused_and_the_width_of_the_table_alone_is_not(engines):
    attnlib.guard("sglang")
    backend = Backend(engines)
    with pytest.raises(
        ValueError, match="for num_splits 64; the attention call has num_splits 15 "
    ):
        backend.attend(backend.metadata(num_splits=64))


def test_the_schedule_of_each_kind_of_layer_is_held_to_the_calls_of_that_kind(engines):
    guarding = attnlib.guard("sglang")
    full = SchedulerFacts(
        batch_size=4,
        num_qo_heads=MODEL.heads,
        num_kv_heads=MODEL.kv_heads,
        head_dim=MODEL.head_dim,
        max_seqlen_q=1,
        max_seqlen_k=WIDTH * PAGE,
        num_sms=132,
        page_size=PAGE,
        causal=True,
        varlen_q=True,
        build=guarding.build,
    )
    facts = {"full": full, "window": replace(full, window=(127, 0))}
    made = StepSchedules.reserve(facts, torch.device("cpu"))
    backend = Backend(engines)
    backend.attend(made["full"].words)
    backend.attend(made["window"].words, window_size=(127, 0))
    assert guarding.checks == 2
    told = "window .-1, -1.*; the attention call has .*window .127, 0."
    with pytest.raises(ValueError, match=told):
        backend.attend(made["full"].words, window_size=(127, 0))
    with pytest.raises(
        ValueError, match="batch_size 4; the attention call has batch_size 8 .call 2"
    ):
        backend.attend(made["window"].words, batch=8, window_size=(127, 0))


def test_a_graph_is_judged_before_each_replay_by_what_lies_in_its_buffer(engines):
    attnlib.guard("sglang")
    backend = Backend(engines)
    graph = Graph()
    words = backend.renew()
    graph.capture_begin()
    backend.attend(words)
    graph.capture_end()
    backend.attend(backend.metadata(2), 2)  # an eager call is no part of the graph
    assert graph.replay() == "replayed"
    backend.renew(batch=2)
    with pytest.raises(
        ValueError, match="made for batch_size 2; the attention call has batch_size 4 .call 1 that"
    ):
        graph.replay()
    backend.renew(longest=300)
    assert graph.replay() == "replayed"
    backend.buffer[:17].copy_(backend.metadata(2)[:17])
    with pytest.raises(
        ValueError, match="made for batch_size 2; the attention call has batch_size 4 .call 1 that"
    ):
        graph.replay()


def planned_wrapper(lens):
    """A wrapper of FlashInfer with the plan that the library makes for `lens`."""
    shape = PlanShape(32, 8, 128, 2, 8, 8192, 132, page_size=16)
    words = plan_words(
        shape,
        lens.numpy(),
        320,
    ).image(PlanLayout.of(shape).int_bytes // 4)
    wrapper = SimpleNamespace(_plan_info=PlanLayout.of(shape).info, _window_left=-1)
    wrapper._int_workspace_buffer = torch.tensor(words).view(torch.uint8)
    return wrapper


def guard_plans(monkeypatch, every):
    """The guard of plans, which checks one in `every`; returns what an engine's hook calls."""
    monkeypatch.setattr(plans, "GUARD_EVERY", every)
    monkeypatch.setattr(
        plans,
        "STATE",
        State({"guard": "raise"}, guard=attnlib.guard("sglang")),
    )
    return lambda wrapper, lens: plans.guard_plan(
        wrapper,
        lens,
        page_size=16,
        num_pages=lambda: 0,
        layers="layers 0 to 7",
    )


def test_a_plan_is_held_to_the_lengths_that_a_graph_is_replayed_for(engines, monkeypatch):
    """TensorRT-LLM #18769: no new plan was made for the second replay."""
    lens = torch.tensor([8192, *[1] * 7])
    wrapper = planned_wrapper(lens)
    hook = guard_plans(monkeypatch, every=1)
    hook(wrapper, lens)
    graph = Graph()
    later = Graph()
    for each in (graph, later):
        each.capture_begin()
        each.capture_end()
    graph.replay()
    lens.fill_(4096)
    assert later.replay() == "replayed", "it was captured for other wrappers"
    with pytest.raises(
        RuntimeError, match="all 4096 tokens of request 1, it reads 320 .7 of 8.*layers 0 to 7"
    ):
        graph.replay()


def test_a_plan_that_sglangs_graph_of_metadata_froze_is_seen_by_the_decode_graph(
    engines, monkeypatch
):
    """SGLang's metadata_glue_graph.py: two eager steps, a capture of the preparation, replays of it
    from then on, in which no hook and no planner of the host runs."""
    every = 5
    lens = torch.tensor([8192, *[1] * 7])
    wrapper = planned_wrapper(lens)
    hook = guard_plans(monkeypatch, every)
    hook(wrapper, lens)
    decode = Graph()
    decode.capture_begin()
    decode.capture_end()
    for _ in range(2):
        hook(wrapper, lens)
        decode.replay()
    glue = Graph()
    glue.capture_begin()
    hook(wrapper, lens)
    glue.capture_end()
    replays = 2
    with pytest.raises(RuntimeError, match=r"all 4096 tokens of request 1.*layers 0 to 7"):
        while replays < 10 * every:
            lens.fill_(4096)
            glue.replay()
            replays += 1
            decode.replay()
    assert replays == every + 1, "one replay in so many is checked"


def test_a_tensor_in_freed_memory_is_not_taken_for_the_words_that_lay_there(engines):
    attnlib.guard("sglang")
    backend = Backend(engines, tp_size=8)
    words = backend.metadata()
    address = words.data_ptr()
    del words
    gc.collect()
    others = [torch.zeros(17, dtype=torch.int32) for _ in range(64)]
    for other in (each for each in others if each.data_ptr() == address):
        backend.attend(other)
    backend.attend(others[0])
    backend.attend(None)


def test_two_threads_may_forget_the_same_words():
    memory = SimpleNamespace(expired=lambda: _made.pop(7, True) is not None)
    _made[7] = SimpleNamespace(memory=memory)
    remember(torch.zeros(1), None)
    assert 7 not in _made


@pytest.mark.parametrize("release, cap", [("0.4.4", 15), ("0.4.5", 4)])
def test_the_cap_of_splits_is_that_of_the_installed_build(engines, monkeypatch, release, cap):
    monkeypatch.setattr(library.metadata, "version", lambda _: release)
    attnlib.guard("sglang")
    backend = Backend(engines)
    words = backend.metadata(128, num_splits=64)
    with pytest.raises(
        ValueError, match=f"for num_splits 64; the attention call has num_splits {cap} "
    ):
        backend.attend(words, 128)


def test_vllms_call_is_guarded_by_its_own_arguments(engines):
    attnlib.guard("vllm")
    cache = torch.zeros((2, PAGE, 8, 128), dtype=torch.bfloat16)
    told = {
        "cu_seqlens_q": torch.arange(4),
        "causal": True,
        "window_size": [-1, -1],
    }

    def attend(words, longest, **more):
        q = torch.zeros((3, 16, 128), dtype=torch.bfloat16)
        table = torch.zeros((3, 8), dtype=torch.int32)
        more |= told | {"block_table": table, "max_seqlen_k": longest}
        return engines.flash_attn_varlen_func(
            q, cache, cache, 1, scheduler_metadata=words, fa_version=3, **more
        )

    lens = torch.ones(3, dtype=torch.int32)
    sizes = (3, 1, 4096, 16, 8, 128)
    words = engines.get_scheduler_metadata(*sizes, lens, page_size=PAGE, **told)
    attend(words, 4096)
    attend(words, 4096, softcap=30.0)  # vLLM does not tell, and tiles of 16 bits do not ask
    with pytest.raises(
        ValueError, match="made for num_splits 14; the attention call has num_splits 1 "
    ):
        attend(words, 512)


def test_a_second_guard_is_no_second_wrap_and_it_comes_off(engines, caplog):
    first = attnlib.guard("sglang")
    wrapped = engines.flash_attn_with_kvcache
    assert wrapped is sys.modules["sgl_kernel.flash_attn"].flash_attn_with_kvcache
    assert attnlib.guard("sglang", mode="log") is first
    assert engines.flash_attn_with_kvcache is wrapped and first.mode == "log"
    backend = Backend(engines, tp_size=8)
    with caplog.at_level(logging.ERROR, "attnlib"):
        for _ in range(3):
            backend.attend(backend.metadata())
    (record,) = caplog.records
    assert "num_kv_heads 1, num_splits 55; the attention call has num_qo" in record.message
    backend.attend(backend.metadata(causal=torch.ones(4, dtype=torch.bool)))
    assert "is not checked: TypeError('causal must be a bool" in caplog.records[-1].message
    with pytest.raises(ValueError, match="engine must be 'sglang' until its guard is removed"):
        attnlib.guard("vllm")
    first.remove()
    assert engines.flash_attn_with_kvcache is flash_attn_with_kvcache
    assert engines.get_scheduler_metadata is get_scheduler_metadata
    assert Graph.replay is Graph.plain_replay
    assert type(backend.metadata()) is torch.Tensor


def test_what_is_not_installed_or_unknown_is_named(monkeypatch):
    with pytest.raises(RuntimeError, match="flash_attn_interface must have get_scheduler_metadata"):
        attnlib.guard("flash-attn-3")
    with pytest.raises(ValueError, match="engine must be one of sglang, vllm, flash-attn-3"):
        attnlib.guard("trtllm")
    with pytest.raises(ValueError, match="mode must be one of raise, log"):
        attnlib.guard("vllm", mode="warn")


def renamed(function, old, new):
    """The function in the place of a later release's, whose parameter `old` has another name."""

    def later(*args, **options):
        if new in options:
            options[old] = options.pop(new)
        return function(*args, **options)

    parameters = inspect.signature(function).parameters.values()
    later.__signature__ = inspect.Signature(
        [each.replace(name=new) if each.name == old else each for each in parameters]
    )
    later.__name__ = function.__name__
    later.__module__ = "sgl_kernel.flash_attn"
    return later


RENAMED = [
    (flash_attn_with_kvcache, "softcap"),
    (flash_attn_with_kvcache, "num_splits"),
    (flash_attn_with_kvcache, "window_size"),
    (flash_attn_with_kvcache, "page_table"),
    (get_scheduler_metadata, "headdim_v"),
    (get_scheduler_metadata, "qkv_dtype"),
    (get_scheduler_metadata, "window_size"),
]


@pytest.mark.parametrize("function, name", RENAMED)
def test_a_renamed_parameter_is_told_when_the_guard_is_made_and_never_by_a_call(
    engines, caplog, function, name
):
    later = renamed(function, name, f"new_{name}")
    for module in (engines, sys.modules["sgl_kernel.flash_attn"]):
        setattr(module, function.__name__, later)
    words = f"flash_attn.{function.__name__} must have the parameters .*{name}"
    with pytest.raises(RuntimeError, match=words):
        attnlib.guard("sglang")
    assert not active and getattr(engines, function.__name__) is later, "nothing is wrapped"
    attnlib.guard("sglang", mode="log")
    assert re.search(f"the guard does not check a function: .*{words}", caplog.text)
    backend = Backend(engines)
    assert backend.attend(backend.metadata()).shape == (4, 16, 128)
    assert len(caplog.messages) == 1
    with pytest.raises(RuntimeError, match=words):
        attnlib.guard("sglang", mode="raise")


def test_a_metadata_call_with_another_parameter_in_front_is_not_read_by_position(engines, caplog):
    def later(new, *args, **options):
        return get_scheduler_metadata(*args, **options)

    own = [*inspect.signature(get_scheduler_metadata).parameters.values()]
    first = inspect.Parameter("new", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    later.__signature__ = inspect.Signature(
        [
            first,
            *own[:6],
            *own[6:],
        ]
    )
    for module in (engines, sys.modules["sgl_kernel.flash_attn"]):
        module.get_scheduler_metadata = later
    with pytest.raises(RuntimeError, match="parameters batch_size, .*, head_dim before cache_seq"):
        attnlib.guard("sglang")


ODD = [
    {"k_cache": None},
    {"v_cache": None},
    {"page_table": torch.zeros(4, dtype=torch.int32)},
    {"scheduler_metadata": SimpleNamespace()},
    {"cu_seqlens_q": 7},
    {"softcap": None},
    {"q": SimpleNamespace(shape=None)},
]


@pytest.mark.parametrize("argument", ODD, ids=str)
def test_a_call_that_cannot_be_checked_passes_with_one_message(engines, caplog, argument):
    attnlib.guard("sglang", mode="log")
    q = torch.zeros((4, MODEL.heads, MODEL.head_dim), dtype=torch.bfloat16)
    cache = torch.zeros(
        (
            2,
            PAGE,
            MODEL.kv_heads,
            MODEL.head_dim,
        ),
        dtype=torch.bfloat16,
    )
    call = {"q": q, "k_cache": cache, "v_cache": cache, "max_seqlen_q": 1, "causal": True}
    call["page_table"] = torch.zeros((4, WIDTH), dtype=torch.int32)
    call["cu_seqlens_q"] = torch.arange(5)
    call["scheduler_metadata"] = Backend(engines).metadata()
    call |= argument
    for _ in range(2):
        assert engines.flash_attn_with_kvcache(**call) is call["q"]
    (message,) = caplog.messages
    assert message.startswith("a call of FlashAttention-3 is not checked: ")


def test_metadata_that_cannot_be_read_is_returned_as_it_is(engines, caplog):
    attnlib.guard("sglang", mode="log")
    backend = Backend(engines)
    words = backend.metadata(qkv_dtype=None, headdim_v="wide")
    assert backend.attend(words).shape == (4, 16, 128)
    assert "is not checked: " in caplog.text


def test_a_failing_check_of_a_graph_is_logged_in_mode_log(engines, caplog):
    def fails():
        raise KeyError("a buffer of a later release")

    guarding = attnlib.guard("sglang", mode="log")
    guarding.next_graph[0] = fails
    graph = Graph()
    graph.capture_begin()
    graph.capture_end()
    assert graph.replay() == "replayed"
    assert "is not checked: KeyError('a buffer of a later release')" in caplog.text
    attnlib.guard("sglang", mode="raise")
    with pytest.raises(KeyError):
        graph.replay()


def test_the_call_that_does_not_fit_is_numbered(engines, caplog):
    guarding = attnlib.guard("sglang")
    backend = Backend(engines)
    other = Backend(engines)
    words = backend.renew()
    graph = Graph()
    graph.capture_begin()
    backend.attend(words)
    backend.attend(words)
    other.attend = lambda words: Backend.attend(other, words, batch=2)
    with pytest.raises(ValueError, match=r"has batch_size 2 \(call 3 that reads the schedule, one"):
        other.attend(words)
    graph.capture_end()
    with pytest.raises(ValueError, match=r"has batch_size 2 \(call 3 that reads the schedule, one"):
        graph.replay()
    attnlib.guard("sglang", mode="log")
    for _ in range(3):
        other.attend(words)
    assert len(caplog.messages) == 1, "one message for all layers"
    assert guarding.checks == 8


def test_without_prefix_sums_each_request_has_the_query_tokens_of_its_row():
    cache = torch.zeros(8, PAGE, MODEL.kv_heads, MODEL.head_dim, dtype=torch.bfloat16)
    arguments = defaults(flash_attn_with_kvcache)
    arguments["q"] = torch.zeros(
        3,
        2,
        MODEL.heads,
        MODEL.head_dim,
        dtype=torch.bfloat16,
    )
    arguments["k_cache"] = arguments["v_cache"] = cache
    arguments["page_table"] = torch.zeros(3, 4, dtype=torch.int32)
    facts = facts_of(arguments, "sglang")
    assert facts.batch_size == 3
    assert facts.max_seqlen_q == 2
    assert facts.max_seqlen_k == 4 * PAGE
