"""What goes on inside an engine's process, over stand-ins of the few parts of SGLang it drives."""

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import sglang_code
from support import sglang_fakes as fakes

from attnlib.core.engines import arms
from attnlib.core.spec import MODELS
from attnlib.kinds.engine import serve
from attnlib.kinds.engine.case import ARMS, SIDE_BY_SIDE, EngineCase
from attnlib.kinds.engine.measure import Setup
from attnlib.kinds.engine.model import CONFIGS, write_model
from attnlib.kinds.lengths import sample_seq_lens
from attnlib.measure.trace import Kernel

VALUES = [ARMS[name][2] for name in SIDE_BY_SIDE]
SETUP = {"model": "m", "driver": "steps", "tp": 1, "attention": "fa3"}
NATIVE = "sglang.srt.layers.attention.torch_native_backend"


class Req(SimpleNamespace):
    def set_extend_input_len(self, count):
        assert count == len(self.fill_ids) - len(self.prefix_indices) == 1


class Runner:
    """A model whose logits are those of the cached values at a request's slots, with a bias."""

    def __init__(self, room=4000):
        buffers = {name: [torch.zeros(5000, 2) for _ in range(3)] for name in ("k", "v")}
        self.torch_runner = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(k_buffer=buffers["k"], v_buffer=buffers["v"]),
            token_to_kv_pool_allocator=SimpleNamespace(alloc=self.alloc),
            max_total_num_tokens=room,
            attn_backend="fast",
            graph_runner="graph",
        )
        self.steps, self.bias = [], {}

    def clear(self):
        self.free = torch.arange(1, 5000)

    def alloc(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def synchronize(self):
        pass

    def extend(self, reqs):
        slots = [torch.cat([req.prefix_indices, self.alloc(1)]) for req in reqs]
        assert len(torch.cat(slots).unique()) == sum(map(len, slots)), "no slot twice"
        return torch.tensor([req.fill_ids[-1] for req in reqs]), None, slots

    def decode(self, tokens, batch):
        model = self.torch_runner
        native = not isinstance(model.attn_backend, str)
        assert native == (model.graph_runner is None)
        arm = "native" if native else arms.STATE.arms["metadata"]
        arms.STATE.calls[f"metadata={arm}"] += 1
        self.steps.append((arm, sum(map(len, batch))))
        for row, slots in enumerate(batch):
            batch[row] = torch.cat([slots, self.alloc(1)])
        values = torch.stack([model.token_to_kv_pool.k_buffer[1][s[:-1]].sum(0) for s in batch])
        logits = values.repeat(1, 4) + tokens[:, None] + self.bias.get(arm, 0)
        return logits.argmax(1), logits


@pytest.fixture
def engine(monkeypatch):
    """`Steps` of a process with METADATA set, and its runner."""
    runner = Runner()

    def started():
        arms.STATE.arms["metadata"] = "sglang"

    def prepared(count, length, prompts):
        return [Req(fill_ids=ids, prefix_indices=[]) for ids in prompts]

    nothing = {f"initialize_{name}_config": vars for name in ("moe", "fp8_gemm", "fp4_gemm")}
    bench = nothing | {
        "ServerArgs": SimpleNamespace,
        "PortArgs": SimpleNamespace(init_new=lambda args: "ports"),
        "_set_envs_and_config": lambda args: None,
        "load_model": lambda args, ports, gpu, rank: (runner, None),
        "prepare_synthetic_inputs_for_latency_test": prepared,
    }
    fakes.installed(
        monkeypatch,
        {
            "sglang.srt.plugins": {"load_plugins": started},
            "sglang.bench_one_batch": bench,
            NATIVE: {"TorchNativeAttnBackend": lambda model: object()},
        },
    )
    for name, value in vars(arms.State()).items():
        monkeypatch.setattr(arms.STATE, name, value)
    return serve.Steps(SETUP), runner


def asked(lens=(30, 7, 50), arms=VALUES, steps=3, **told):
    return {"lens": lens, "arms": arms, "steps": steps, "attention": "fa3", "trace": False} | told


def test_arms_are_checked_alone_and_then_alternate_there_and_back(engine):
    steps, runner = engine
    found = steps.measure(asked())
    ran = [arm for arm, _ in runner.steps]
    checked, timed = 1 + serve.CHECKED * 4, (serve.WARM_TURNS + 3) * 4
    assert ran[:checked] == ["native", *(arm for arm in VALUES for _ in range(serve.CHECKED))]
    there_and_back = [*VALUES, *VALUES[::-1]]
    assert ran[checked:] == [there_and_back[n % 8] for n in range(timed)]
    assert {held for _, held in runner.steps[:checked:4]} >= {87}, "each arm from the same state"
    for arm in VALUES:
        assert len(found["arms"][arm]["run_us"]) == 3 and found["arms"][arm]["error"] == 0
    assert len({each["digest"] for each in found["arms"].values()}) == 1
    assert found["calls"]["metadata=fused"] == serve.CHECKED + serve.WARM_TURNS + 3
    again = steps.measure(asked())
    assert again["arms"]["sglang"]["digest"] == found["arms"]["sglang"]["digest"]
    model = steps.model
    assert (model.attn_backend, model.graph_runner) == ("fast", "graph")


def test_an_arm_that_reads_other_values_has_an_error_and_other_outputs(engine):
    steps, runner = engine
    runner.bias = {"fused": torch.arange(8) * 5e3, "eager": 1e-3, "one-launch": torch.nan}
    found = steps.measure(asked())["arms"]
    assert found["fused"]["error"] > 0.1 > found["eager"]["error"] > 0
    assert found["one-launch"]["error"] == float("inf")
    assert len({each["digest"] for each in found.values()}) == 4


def test_what_does_not_fit_into_cache_or_context_is_refused_before_any_step(engine):
    steps, runner = engine
    said = steps.measure(asked(lens=(3000, 900, 500)))["refused"]
    assert said.startswith("a case must fit into 4000 tokens of cache") and "got 4484" in said
    runner.torch_runner.max_total_num_tokens = 10**6
    assert f"{serve.CONTEXT['fa3']} of a request" in steps.measure(asked(lens=(16380,)))["refused"]
    assert runner.steps == []


def test_a_traced_step_has_kernels_and_their_time_and_no_other(engine, monkeypatch):
    steps, _ = engine

    def trace(step):
        step()
        return (Kernel("a", 2.0, 5.0), Kernel("b", 1.0, 1.5))

    monkeypatch.setattr(serve, "trace_kernels", trace)
    found = steps.measure(asked(trace=True))["arms"]["fused"]
    assert found["run_us"] == [6.5]
    assert found["kernels"][0] == {"name": "a", "launches": 2.0, "gpu_us": 5.0}


def test_an_engine_that_does_not_find_the_plugin_says_so(engine, monkeypatch):
    monkeypatch.setattr(sys.modules["sglang.srt.plugins"], "load_plugins", arms.STATE.arms.clear)
    with pytest.raises(RuntimeError, match="attnlib must be installed for SGLang to find"):
        serve.Steps(SETUP)


def test_offline_steps_are_what_more_tokens_take_longer(monkeypatch):
    asked_for, now = [], [0.0]

    def generate(input_ids, sampling_params):
        count = sampling_params["max_new_tokens"]
        asked_for.append(count)
        now[0] += 1.0 + 0.005 * count
        return [{"output_ids": [7] * count} for _ in input_ids]

    made = SimpleNamespace(Engine=lambda **options: SimpleNamespace(generate=generate))
    fakes.installed(monkeypatch, {"sglang": vars(made)})
    monkeypatch.setattr(serve.time, "perf_counter", lambda: now[0])
    found = serve.Offline(SETUP).measure(asked(arms=["fa2"], steps=10))["arms"]["fa2"]
    assert found["run_us"] == pytest.approx([5000.0] * serve.REPEATS)
    assert (found["error"], asked_for[:3]) == (0.0, [2, 2, 12])


def test_lines_in_are_lines_out_and_what_the_engine_prints_is_not_among_them(
    engine, monkeypatch, tmp_path, capfd
):
    (tmp_path / "setup.json").write_text(json.dumps(SETUP))
    monkeypatch.setattr(serve.sys, "stdin", [json.dumps(asked(steps=1)) + "\n"])
    serve.main(tmp_path / "setup.json")
    ready, answer = map(json.loads, capfd.readouterr().out.splitlines())
    assert ready == {"ready": True} and set(answer["arms"]) == set(VALUES)


def test_several_gpus_have_no_all_reduce_of_sglangs_own():
    options = serve.server_options(SETUP | {"tp": 2})
    assert (options["tp_size"], options["disable_custom_all_reduce"]) == (2, True)
    assert "tp_size" not in serve.server_options(SETUP)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_folder_has_the_heads_that_kernel_cases_have(name, tmp_path):
    write_model(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    of = {"llama-3.1-8b": "Llama-3.1-8B", "qwen3-32b-tp4": "Qwen3-32B at TP 4"}
    assert tuple(config[each] for each in heads) == MODELS[of[name]]
    words = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == config["vocab_size"]


def test_a_case_draws_lengths_as_others_do_and_names_what_is_wrong():
    case = EngineCase("llama-3.1-8b", 32, 65536, lengths="retrieval")
    lens = sample_seq_lens(case)
    assert (lens[0], (lens == 65536).sum()) == (65536, 2) and np.median(lens) < 2100
    assert case.key == "llama-3.1-8b,32,x,65536,retrieval,+,64,seed,0"
    for wrong, said in {
        "model": "one of llama",
        "driver": "one of steps, off",
        "tp": ">= 1",
    }.items():
        with pytest.raises(ValueError, match=f"{wrong} must be .*{said}"):
            EngineCase(**{**vars(case), wrong: 0})
    with pytest.raises(ValueError, match="tp must be 1 for the driver steps, got 2"):
        EngineCase("llama-3.1-8b", 1, 9, tp=2)


def test_a_setup_sets_its_own_variable_and_no_other(monkeypatch):
    monkeypatch.setenv("ATTNLIB_SGLANG_METADATA", "fused")
    env = Setup("m", "steps", 1, "sglang-layer").environment
    assert env["ATTNLIB_SGLANG_SCHEDULE"] == "layer" and "ATTNLIB_SGLANG_METADATA" not in env


@pytest.mark.skipif(not sglang_code.FOUND, reason="needs SGLang's wheel on PYTHONPATH")
def test_sglang_has_the_names_that_are_used_of_it():
    root = Path(sglang_code.FOUND.submodule_search_locations[0])
    bench = ast.parse((root / "bench_one_batch.py").read_text())
    names = {
        alias.name
        for node in bench.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names |= {getattr(node, "name", "") for node in bench.body}
    used = {"ServerArgs", "PortArgs", "_set_envs_and_config", "load_model", "initialize_moe_config"}
    used |= {"initialize_fp8_gemm_config", "initialize_fp4_gemm_config"}
    assert used | {"prepare_synthetic_inputs_for_latency_test"} <= names
    (server_args,) = (
        node
        for node in ast.parse((root / "srt/server_args.py").read_text()).body
        if getattr(node, "name", "") == "ServerArgs"
    )
    fields = {n.target.id for n in server_args.body if isinstance(n, ast.AnnAssign)}
    asked_for = {*serve.server_options(SETUP | {"tp": 2}), "disable_radix_cache"}
    assert asked_for | {"skip_tokenizer_init"} <= fields
    assert (
        "class TorchNativeAttnBackend"
        in (root / (NATIVE.replace(".", "/")[7:] + ".py")).read_text()
    )
