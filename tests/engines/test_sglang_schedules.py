"""ATTNLIB_SGLANG_METADATA=one-launch over SGLang's own backend: who makes the schedules of a graph.

A call without a schedule is one whose layer prepares its own, in a kernel before attention.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.sglang_layers import MLA, TOKENS, Capped, layer_of, step_of

from attnlib.core import schedule_words
from attnlib.core.metadata.schedules import build_step_schedules
from attnlib.engines import arms, sglang, sglang_schedules
from attnlib.engines.sglang_schedules import GRAPH

if torch.cuda.is_available():
    pytest.skip("the stand-ins are for machines without a GPU", allow_module_level=True)

ENCODER = SimpleNamespace(value="encoder_only")
"""The type of an encoder's attention."""
REQUESTS = 5
CONTEXT = 4096
LENGTHS = torch.tensor([4000, 129, 1, 2048, 700])
GPT_OSS = {"tp_q_head_num": 64, "tp_k_head_num": 8, "head_dim": 64, "v_head_dim": 64}
LLAMA = {"tp_q_head_num": 32, "tp_k_head_num": 8, "head_dim": 128, "v_head_dim": 128}
MODELS = {
    "gpt-oss-120b": (
        "decode",
        [layer_of(GPT_OSS), layer_of(GPT_OSS, sliding_window_size=127)] * 18,
        {"num_attention_heads": 64, "num_kv_heads": 8, "head_dim": 64},
    ),
    "DeepSeek-V3": (
        "decode",
        [layer_of(MLA)] * 61,
        {"use_mla": True, "_sched_meta_buf": None},
    ),
    "verification of 32 layers": ("target_verify", [layer_of(LLAMA)] * 32, {}),
    "verification of MLA": (
        "target_verify",
        [layer_of(MLA)] * 61,
        {"use_mla": True, "_sched_meta_buf": None},
    ),
}
"""What is decoded -> mode of a step, its layers, and what the backend has of them."""
PREPARED = {
    "gpt-oss-120b": 18,
    "DeepSeek-V3": 61,
    "verification of 32 layers": 32,
    "verification of MLA": 61,
}
"""Schedules that SGLang's layers prepare in a step, beside the one of a step."""
SAID = {
    "gpt-oss-120b": "full attention, kind 1; a window of 127, kind 2",
    "DeepSeek-V3": "MLA, kind 1",
    "verification of 32 layers": "full attention, kind 1",
    "verification of MLA": "MLA, kind 1",
}
"""What the log says of our launch."""


class Graphs(Capped):
    """A backend whose graphs are captured, over tables that our kernel can write."""

    def __init__(self, release, monkeypatch):
        super().__init__(release, monkeypatch)
        self.release = release
        self.launches = []
        self.capturing = False
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(sglang_schedules, "build_step_schedules", self._launch)

    def start(self, metadata="one-launch", splits="", **own):
        table = torch.zeros(REQUESTS, CONTEXT, dtype=torch.int32)
        sums = torch.arange(REQUESTS + 1, dtype=torch.int32)
        buffers = {
            "cache_seqlens": torch.zeros(REQUESTS, dtype=torch.int32),
            "cu_seqlens_q": sums,
            "cu_seqlens_k": torch.zeros(REQUESTS + 1, dtype=torch.int32),
            "page_table": table,
            "page_table_draft_decode": table,
            "strided_indices": torch.arange(CONTEXT),
        }
        sizes = {
            "max_context_len": CONTEXT,
            "max_num_pages": CONTEXT,
            "req_to_token": torch.arange(REQUESTS * CONTEXT, dtype=torch.int32).view(REQUESTS, -1),
            "decode_cuda_graph_metadata": dict(buffers),
            "target_verify_metadata": dict(buffers, cu_seqlens_q=sums * 4),
        }
        return self.load(splits, metadata=metadata, **sizes | own)

    def capture(self, mode, layers, warm_ups=2):
        """The library's calls while a graph is captured, and SGLang's metadata of it."""
        step = step_of(mode, REQUESTS, 1)
        self.backend.init_forward_metadata_out_graph(step, in_capture=True)
        for number in range(warm_ups + 1):
            self.capturing = number == warm_ups
            self.asked.clear()
            for layer in layers:
                self.attend(layer, step)
        self.capturing = False
        calls = list(self.asked)
        self.asked.clear()
        return calls, self.backend.forward_metadata

    def replay(self, mode):
        """What SGLang asks the library for before a replay over `LENGTHS`."""
        step = step_of(mode, REQUESTS, 1)
        step.seq_lens = LENGTHS - TOKENS[mode] * (mode == "target_verify")
        step.seq_lens_cpu = step.seq_lens
        step.req_pool_indices = torch.arange(REQUESTS)
        self.asked.clear()
        self.launches.clear()
        self.backend.init_forward_metadata_out_graph(step, in_capture=False)
        return list(self.asked)

    def _launch(self, **call):
        self.launches.append(call)
        build_step_schedules(**call)


@pytest.fixture(params=[arms.OWN_CAP, sglang.NEWEST])
def graphs(request, monkeypatch):
    return Graphs(request.param, monkeypatch)


def prepared(calls):
    """Calls whose layers prepare their own schedule."""
    return sum(call.get("scheduler_metadata") is None for call in calls)


@pytest.mark.parametrize("name", MODELS)
def test_sglang_alone_prepares_a_schedule_in_these_layers(graphs, name):
    mode, layers, own = MODELS[name]
    calls, _ = graphs.start("sglang", **own).capture(mode, layers)
    assert len(calls) == len(layers)
    assert prepared(calls) == PREPARED[name]


@pytest.mark.parametrize("splits", ["", "bounded", "9"])
@pytest.mark.parametrize("name", MODELS)
def test_one_launch_writes_every_schedule_of_a_step(graphs, name, splits):
    mode, layers, own = MODELS[name]
    calls, metadata = graphs.start(splits=splits, **own).capture(mode, layers)
    if mode == "target_verify" and graphs.release == arms.OWN_CAP:
        assert prepared(calls) == len(layers) and not hasattr(metadata, GRAPH), "SGLang's kernel"
        return
    assert len(calls) == len(layers) and prepared(calls) == 0
    tokens = np.full(REQUESTS, TOKENS[mode])
    if mode == "target_verify":  # a ragged layout tells other counts
        tokens = np.array([4, 0, 4, 1, 4])
        metadata.cu_seqlens_q[1:] = torch.tensor(tokens.cumsum())
    assert graphs.replay(mode) == []
    assert len(graphs.launches) == 1
    lens = LENGTHS.numpy()
    assert metadata.cache_seqlens_int32.tolist() == lens.tolist()
    made = getattr(metadata, GRAPH).made
    assert len(made.kinds) == len({layer.sliding_window_size for layer in layers})
    of_words = {kind.words.data_ptr(): kind for kind in made.kinds.values()}
    for call, layer in zip(calls, layers, strict=True):
        kind = of_words[call["scheduler_metadata"].data_ptr()]
        assert kind.facts.is_local == (layer.sliding_window_size > 0)
        assert kind.facts.num_qo_heads == layer.tp_q_head_num
        assert kind.facts.split_cap == (call["num_splits"] or kind.facts.split_cap)
        assert kind.words.tolist() == schedule_words(kind.facts, lens, tokens).tolist()
    assert arms.STATE.calls["metadata=one-launch"] == 1
    said = [words for words in arms.STATE.said if "one launch writes" in words]
    assert said == [f"attnlib: one launch writes the schedules of: {SAID[name]}"]


def test_each_graph_has_words_of_its_own(graphs):
    mode, layers, own = MODELS["gpt-oss-120b"]
    graphs.start(**own)
    first, _ = graphs.capture(mode, layers)
    second, _ = graphs.capture(mode, layers)
    places = [call["scheduler_metadata"].data_ptr() for call in (*first, *second)]
    assert len(set(places)) == 4


def test_a_graph_with_a_layer_that_is_left_alone_keeps_sglangs_schedule_beside_ours(graphs):
    odd = layer_of(LLAMA, attn_type=ENCODER)
    calls, metadata = graphs.start().capture("decode", [layer_of(LLAMA), odd])
    ours, theirs = (call["scheduler_metadata"] for call in calls)
    assert theirs is metadata.scheduler_metadata and ours is not theirs
    assert [call["batch_size"] for call in graphs.replay("decode")] == [REQUESTS]
    assert len(graphs.launches) == 1
    assert arms.STATE.calls["metadata: the schedule of an encoder's attention"] == 3


@pytest.mark.parametrize("captures", [True, False])
def test_a_graph_without_a_warm_up_or_whose_attention_is_not_captured_keeps_sglangs(
    graphs, captures
):
    mode, layers, own = MODELS["gpt-oss-120b"]
    graphs.start(**own)
    if captures:
        calls, _ = graphs.capture(mode, layers, warm_ups=0)
        assert prepared(calls) == 18
        assert arms.STATE.calls["metadata: the schedule of a graph without a warm-up"] == 36
    else:
        step = step_of(mode, REQUESTS, 1)
        graphs.backend.init_forward_metadata_out_graph(step, in_capture=True)
        for layer in layers:
            graphs.attend(layer, step)
    assert len(graphs.replay(mode)) == 1 and not graphs.launches
    assert graphs.backend.forward_metadata.cache_seqlens_int32.tolist() == LENGTHS.tolist()


@pytest.mark.parametrize(
    "mode, own",
    [("draft_decode", {}), ("target_verify", {"topk": 4, "use_mla": True})],
)
def test_draft_steps_and_trees_of_drafts_are_not_ours(graphs, mode, own):
    graphs.start(**own)
    backend = graphs.backend
    for name in ("draft_decode_metadata", "target_verify_metadata"):
        for part in ("normal", "expand"):
            setattr(backend, f"{name}_topk_{part}", {REQUESTS: None})
    sglang_schedules.STATE.graphs = "of the step before"
    step = step_of(mode, REQUESTS, 1)
    assert sglang_schedules.graphs_of(backend, step) is None


def test_a_pool_that_changes_after_the_capture_ends_the_step(monkeypatch):
    graphs = Graphs(sglang.NEWEST, monkeypatch).start()
    graphs.capture("decode", [layer_of(LLAMA)])
    graphs.backend.kv_index_translator.reads_are_translated = True
    with pytest.raises(RuntimeError, match="must have the pool that a graph was captured with"):
        graphs.replay("decode")


def test_one_launch_is_for_flash_attention_3(graphs):
    with pytest.raises(ValueError, match="METADATA=one-launch must have FlashAttention-3"):
        graphs.start(fa_impl_ver=4)
