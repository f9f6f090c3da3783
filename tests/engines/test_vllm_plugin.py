"""The plugin in vLLM's place, over stand-ins of what it hooks, and its table against the wheel."""

import json
import re
import sys

import pytest
import torch
from support import vllm_fakes as fakes
from support.sglang_code import installed, stand_in_guard
from support.vllm_fakes import FLASHINFER, LENS, PAGE, batch
from support.vllm_points import FILE

from attnlib.core import AttnSpec, plan_words
from attnlib.engines import arms, capture, plans, points, vllm

if torch.cuda.is_available():
    pytest.skip("the stand-ins are for machines without a GPU", allow_module_level=True)


@pytest.fixture
def load(monkeypatch):
    """Load the plugin with these variables, as that release of vLLM does; its parts, hooked."""
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: name)
    engine = installed(monkeypatch, fakes.parts())
    engine.guarded = stand_in_guard(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")

    def loaded(release="0.33.0+cu129", **variables):
        monkeypatch.setattr(points, "installed_version", lambda name: release)
        monkeypatch.setattr(vllm, "installed_version", lambda name: release)
        for name, value in variables.items():
            monkeypatch.setenv(f"ATTNLIB_VLLM_{name}", str(value))
        vllm.register()
        return engine

    return loaded


def test_one_step_in_ten_of_each_mode_is_captured_without_padding(load, tmp_path):
    path = tmp_path / "steps.jsonl"
    engine = load(CAPTURE=path)
    window = engine.AttentionGroup(spec=fakes.FullAttentionSpec(sliding_window=8))
    layers = [window, engine.AttentionGroup("FLASH_ATTN"), engine.AttentionGroup("TRITON_ATTN")]
    layers[1].build_metadata(batch())  # of a warm-up
    engine.WorkerWrapperBase(*layers, rank=1).execute_model(batch())
    runner = engine.WorkerWrapperBase(*layers)
    steps = [
        batch((30, 1, 8, 0)),
        batch((33, 0, 60, 0)),
        *(batch() for _ in range(11)),
    ]
    assert [runner.execute_model(step) for step in steps] == ["logits"] * 13
    engine.WorkerWrapperBase(engine.AttentionGroup(speculative_config=1)).execute_model(batch())
    written = capture.read(path)
    assert [(s.mode, s.batch_size, s.lengths, s.q_lengths) for s in written] == [
        ("mixed", 3, "33+1+60", "30+1+8"),
        ("extend", 2, "33+60", "33+60"),
        *[("decode", 3, "33+1+60", "")] * 2,
    ]
    assert written[0].spec == AttnSpec(32, 8, 128, PAGE, "bfloat16", "float8_e4m3fn")
    assert written[0].backend == "FLASH_ATTN"
    assert written[0].release == "0.33.0+cu129"
    left_out = {"layers that are not causal over all tokens": 13}
    left_out["speculative decoding, or microbatches"] = 1
    assert arms.STATE.calls == {f"capture: {why}": n for why, n in left_out.items()}


def test_an_error_ends_the_capture_with_one_message_and_not_the_engine(load, tmp_path, caplog):
    engine = load(CAPTURE=tmp_path / "steps.jsonl")
    (tmp_path / "steps.jsonl").rename(tmp_path / "gone")
    (tmp_path / "steps.jsonl").mkdir()
    caplog.clear()
    runner = engine.WorkerWrapperBase(engine.AttentionGroup())
    assert [runner.execute_model(batch()) for _ in range(3)] == ["logits"] * 3
    assert len(caplog.messages) == 1 and "is captured, vLLM goes on" in caplog.text


def test_planned_takes_a_graphs_wrapper_over_with_lengths_and_pages_of_the_gpu(load):
    layers = load(DECODE="planned", GUARD="raise").AttentionGroup()
    (builder,) = layers.metadata_builders
    for lens in (LENS, LENS.flip(0)):
        layers.build_metadata(batch(lens=lens))
        own = builder.graph.attnlib
        wrapper = builder.graph
        words = wrapper._int_workspace_buffer[: own.layout.int_bytes].view(torch.int32)
        assert words.tolist() == plan_words(own.shape, lens.tolist()).image(len(words)).tolist()
        pages = zip(batch().block_table_tensor, -(-lens // PAGE), strict=True)
        used = torch.cat([row[:count] for row, count in pages])
        assert wrapper._paged_kv_indices_buf[: len(used)].tolist() == used.tolist()
    assert (builder.graph.plans, builder.plain.plans) == (1, 2), "vLLM plans once, or always"
    assert own.shape.max_seq_len == 64
    assert not hasattr(builder.plain, "attnlib")
    assert arms.STATE.calls["decode=planned"] == 2


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"name": "FLASH_ATTN"}, "the attention backend FLASHINFER, got FLASH_ATTN"),
        ({"use_trtllm_decode_attention": True}, "FlashInfer's own decode"),
        ({"window_left": 8, "use_dcp": True}, "sliding window. and no decode context parallelism"),
        (
            {"speculative_config": 1, "enable_cuda_graph": False},
            "no speculative .* full CUDA graph",
        ),
        ({"disable_split_kv": True}, "splits"),
    ],
)
def test_what_planned_cannot_have_stops_the_engine_by_name(load, changes, words):
    with pytest.raises(ValueError, match=f"_VLLM_DECODE=planned must have .*{words}"):
        load(DECODE="planned").AttentionGroup(**changes)


def test_the_guard_checks_schedules_and_one_plan_of_a_graph_in_a_hundred(load, monkeypatch, caplog):
    def short(wrapper, seq_lens):
        checked.append(seq_lens.tolist())
        raise RuntimeError("request 1 is cut short")

    checked = []
    monkeypatch.setattr(plans, "require_plan", short)
    engine = load(GUARD="log")
    assert engine.guarded == [("vllm", "log")]
    layers = engine.AttentionGroup()
    for number in range(101):
        layers.build_metadata(batch(lens=LENS + number // 100))
    assert checked == [LENS.tolist(), (LENS + 1).tolist()]
    short = "attnlib: request 1 is cut short (read by layers layers.0 to layers.1)"
    without = "attnlib: guard=log leaves out: plans without a CUDA graph, or of a part of a batch"
    assert caplog.messages[1:] == ["attnlib runs guard=log", short, without, short]
    engine.AttentionGroup("TRITON_ATTN", use_trtllm_decode_attention=True)
    assert "the guard has no schedule or plan of TRITON_ATTN to check, its block" in caplog.text


WRONG_TABLES = [
    ({}, torch.tensor([33, 1, 60, 0]), ""),
    ({(2, 3): 24}, LENS, r"pages in 0..23 for request 2 of 60 tokens, got 24 in column 3"),
    ({(0, 1): -1}, LENS, "pages in 0..23 for request 0 of 33 tokens, got -1 in column 1"),
    ({(1, 3): 24}, LENS, ""),  # past the request's last page
    ({}, torch.tensor([33, 1, 65, 0]), "as wide as its lengths, request 2 of 65 tokens, got 4"),
]


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"])
@pytest.mark.parametrize("changes, lens, words", WRONG_TABLES)
def test_block_tables_of_any_backend_are_held_to_lengths_and_pool_with_their_layers_named(
    load, caplog, monkeypatch, backend, changes, lens, words
):
    monkeypatch.setattr(plans, "require_plan", lambda *_: None)
    engine = load(GUARD="log")
    layers = engine.AttentionGroup(backend, use_trtllm_decode_attention=True)
    layers.layer_names = ("layers.3", "layers.5")
    step = batch(lens=lens)
    step.block_table_tensor = step.block_table_tensor.clone()
    for place, page in changes.items():
        step.block_table_tensor[place] = page
    layers.build_metadata(step)
    found = [m for m in caplog.messages if "block_table of layers layers.3 to layers.5 must" in m]
    assert len(found) == bool(words)
    assert all(re.search(words, message) for message in found)
    arms.STATE.arms["guard"] = "raise"
    arms.STATE.calls.clear()
    if words:
        with pytest.raises(RuntimeError, match=words):
            layers.build_metadata(step)


def test_a_window_sees_the_last_blocks_alone(load, caplog):
    engine = load(GUARD="log")
    window = fakes.FullAttentionSpec(sliding_window=20)
    layers = engine.AttentionGroup("FLASH_ATTN", window, use_trtllm_decode_attention=True)
    step = batch()
    step.block_table_tensor = step.block_table_tensor.clone()
    step.block_table_tensor[2, :2] = 999  # vLLM frees what a window has left behind
    layers.build_metadata(step)
    assert "must have pages" not in caplog.text
    step.block_table_tensor[2, 2] = 999
    arms.STATE.calls.clear()
    layers.build_metadata(step)
    assert "must have pages in 0..23 for request 2 of 60 tokens, got 999 in column 2" in caplog.text


def test_what_the_guard_cannot_read_of_a_later_release_is_one_message(load, caplog):
    layers = load(GUARD="log").AttentionGroup("FLASH_ATTN", use_trtllm_decode_attention=True)
    for _ in range(3):
        layers.layer_names = None
        layers.build_metadata(batch())
    assert len([m for m in caplog.messages if "the guard cannot check this" in m]) == 1


def test_without_flashinfer_the_guard_is_of_schedules_alone_and_planned_is_refused(
    load, monkeypatch
):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, FLASHINFER, None)
    assert load(GUARD="raise").guarded == load().guarded == [("vllm", "raise")], "loaded once"
    arms.STATE.arms = {}
    with pytest.raises(SystemExit, match="FlashInferMetadataBuilder.build must be importable"):
        load(DECODE="planned")


@pytest.mark.parametrize(
    "release, variable, value, words",
    [
        ("0.33.0", "METADATA", "fused", "a variable must be one of .*, got 'ATTNLIB_VLLM_META"),
        ("0.32.1", "GUARD", "log", "0.33.0 or later, got 0.32.1: unset ATTNLIB_VLLM_GUARD"),
    ],
)
def test_what_is_not_known_ends_the_process(load, release, variable, value, words):
    with pytest.raises(SystemExit, match=words):
        load(release, **{variable: value})


def test_a_later_release_is_warned_of_once(load, caplog):
    load("9.34.0", DECODE="planned")
    words = f"vLLM 9.34.0 is newer than {vllm.NEWEST}"
    assert len(caplog.messages) == 2
    assert words in caplog.messages[0]


WHEEL = json.loads(FILE.read_text())


@pytest.mark.parametrize("point", vllm.POINTS, ids=lambda point: point.path)
def test_every_hook_point_has_the_parameters_that_were_read_and_no_others(point):
    _, _, name = point.path.replace(":", ".").rpartition(".")
    owner = point.path.removesuffix(name)[:-1]
    (found,) = (line.split() for line in WHEEL[owner] if line.startswith(f"{name} "))
    assert {*found[1:]} == {*point.reads, *point.knows}


@pytest.mark.parametrize("line", fakes.READ.strip().splitlines())
def test_vllm_has_what_the_hooks_read_of_its_objects(line):
    owner, *names = line.split()
    *functions, others = WHEEL[f"vllm.{owner}"]
    assert {*names} <= {each.split()[0] for each in functions} | {*others.split()}
