"""What goes on inside an engine's process, over stand-ins of the few parts of SGLang it drives."""

import json
import re
import sys
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from support.sglang_code import installed, wheel_of

from attnlib.core.layer import MODELS
from attnlib.engines import arms
from attnlib.kinds.engine import serve
from attnlib.kinds.engine.case import ARMS, SIDE_BY_SIDE, START
from attnlib.kinds.engine.model import CONFIGS, write_model
from attnlib.measure.spans import Kernel

FA3 = (*SIDE_BY_SIDE["fa3"], "sglang-layer")
SETUP = {"model": "m", "driver": "steps", "tp": 1, "dp": 1, "context": 0, "attention": "fa3"}
NATIVE = "sglang.srt.layers.attention.torch_native_backend"


class Req(SimpleNamespace):
    def set_extend_input_len(self, count):
        assert count == len(self.fill_ids) - len(self.prefix_indices) == 1


class Event:
    """CUDA events that are recorded 2 ms apart; whether the GPU has passed those asked for."""

    recorded, is_done = 0, False

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.recorded = Event.recorded + 1

    def query(self):
        return Event.is_done

    def elapsed_time(self, end):
        return 2.0 * (end.at - self.at)


class Graphs:
    """A set of CUDA graphs, which hold the schedule that was set at capture."""

    def __init__(self, model):
        self.schedule = arms.STATE.arm("schedule")
        model.attn_backend.decode_cuda_graph_metadata[1] = self


class Runner:
    """A model whose logits are those of the cached values at a request's slots, with a bias."""

    def __init__(self, room=4000):
        buffers = {name: [torch.zeros(5000, 2) for _ in range(3)] for name in ("k", "v")}
        self.torch_runner = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(k_buffer=buffers["k"], v_buffer=buffers["v"]),
            token_to_kv_pool_allocator=SimpleNamespace(alloc=self.alloc),
            max_total_num_tokens=room,
            attn_backend=SimpleNamespace(decode_cuda_graph_metadata={}),
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
        arm = arms.STATE.arm("metadata")
        if model.graph_runner is None:
            arm = "native"
        else:
            assert model.attn_backend.decode_cuda_graph_metadata[1] is model.graph_runner
            assert model.graph_runner.schedule == arms.STATE.arms["schedule"]
            arm = "layer" if model.graph_runner.schedule == "layer" else arm
        self.steps.append((arm, sum(map(len, batch))))
        model.token_to_kv_pool.k_buffer[1][int(batch[0][0])] += 1  # what a step leaves behind
        for row, slots in enumerate(batch):
            batch[row] = torch.cat([slots, self.alloc(1)])
        values = torch.stack([model.token_to_kv_pool.k_buffer[1][s[:-1]].sum(0) for s in batch])
        logits = values.repeat(1, 4) + tokens[:, None] + self.bias.get(arm, 0)
        return logits.argmax(1), logits


@pytest.fixture
def engine(monkeypatch):
    """`Steps` of a process with METADATA set, and its runner."""
    monkeypatch.setattr(serve.torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "is_done", False)
    runner = Runner()

    def started():
        arms.STATE.arms.update(START["fa3"])
        runner.torch_runner.graph_runner = Graphs(runner.torch_runner)

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
    installed(
        monkeypatch,
        {
            "sglang.srt.plugins": {"load_plugins": started},
            "sglang.bench_one_batch": bench,
            NATIVE: {"TorchNativeAttnBackend": lambda model: object()},
        },
    )
    return serve.Steps(SETUP), runner


def question(lens=(30, 7, 50), arms=FA3, steps=3, **changes):
    words = {arm: {ARMS[arm].variable: ARMS[arm].value} for arm in arms}
    return {"lens": lens, "arms": words, "steps": steps, "timer": "host"} | changes


def test_arms_are_checked_alone_and_then_alternate_there_and_back(engine):
    steps, runner = engine
    answer = steps.measure(question())
    ran = [arm for arm, _ in runner.steps]
    values = [ARMS[arm].value for arm in FA3]
    checked, timed = 1 + serve.CHECKED * 5, (serve.WARM_TURNS + 3) * 5
    assert ran[:checked] == ["native", *(arm for arm in values for _ in range(serve.CHECKED))]
    there_and_back = [*values, *values[::-1]]
    assert ran[checked:] == [there_and_back[n % 10] for n in range(timed)]
    assert {held for _, held in runner.steps[:checked:4]} >= {87}, "each arm from the same state"
    for arm in FA3:
        assert len(answer["arms"][arm]["run_us"]) == 3 and answer["arms"][arm]["error"] == 0
    assert len({result["digest"] for result in answer["arms"].values()}) == 1
    assert answer["calls"]["metadata=fused"] == serve.CHECKED + serve.WARM_TURNS + 3
    assert answer["calls"]["schedule=layer"] == 1, "captured once"
    ahead = steps.measure(question(timer="ahead"))["arms"]
    assert all(ahead[arm]["run_us"] == [2000.0] * 3 for arm in FA3), "events are 2 ms apart"
    assert [arm for arm, _ in runner.steps][2 * checked + timed :] == ran[checked:]
    Event.is_done = True
    behind = steps.measure(question(lens=(90, 4), timer="ahead"))
    assert behind["arms"]["sglang"]["run_us"] == []
    again = steps.measure(question())
    assert again["arms"]["sglang"]["digest"] == answer["arms"]["sglang"]["digest"]
    graphs = {id(runner) for runner, _ in steps.graphs._sets.values()}
    assert len(graphs) == 2 and id(steps.model.graph_runner) in graphs


def test_a_later_release_is_started_by_its_own_steps_and_option_names():
    ran = []

    class ServerArgs(SimpleNamespace):
        cuda_graph_bs_decode = cuda_graph_max_bs_decode = disable_prefill_cuda_graph = None

        def resolve_once(self):
            ran.append("resolved")

    bench = SimpleNamespace(
        ServerArgs=ServerArgs,
        PortArgs=SimpleNamespace(init_new=lambda args: "ports"),
        SpawnRanks=SimpleNamespace,
        spawn_world_rank=lambda args, **_: 0,
        _set_envs_and_config=lambda args: ran.append("environment"),
        publish=lambda args, role, ranks: ran.append(role),
        _init_process_global_configs=lambda: ran.append("configs"),
        load_model=lambda args, ports, gpu, rank: (ran.append(ports) or "runner", None),
    )
    args = ServerArgs(**serve.server_options(SETUP | {"context": 99}, ServerArgs))
    assert args.cuda_graph_bs_decode == list(serve.BATCHES) and args.context_length == 99
    assert not hasattr(args, "cuda_graph_bs")
    assert serve.load(bench, args) == "runner"
    assert ran == ["resolved", "environment", "scheduler", "configs", "ports"]


def test_a_release_that_picks_the_slots_itself_gets_whole_prompts_but_runs_no_model(
    engine, monkeypatch
):
    steps, runner = engine
    module = SimpleNamespace(LogitsProcessorOutput=lambda logits: logits)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.logits_processor", module)
    steps.bench.prepare_synthetic_inputs_for_latency_test = lambda *_: [SimpleNamespace()] * 2

    def extend(reqs):
        return steps.model.forward("batch").logits_output.argmax(1), None, "batch"

    steps.model.device, runner.extend = "cpu", extend
    (tokens, batch), (again, _) = steps.build([5, 7]), steps.build([5, 7])
    assert (len({*tokens.tolist()}), batch, tokens.equal(again)) == (2, "batch", True)
    assert not hasattr(steps.model, "forward"), "steps run the model"
    assert steps.model.token_to_kv_pool.k_buffer[0].abs().sum() > 0, "filled with normal values"


def test_an_arm_that_reads_other_values_has_an_error_and_other_outputs(engine):
    steps, runner = engine
    runner.bias = {"fused": torch.arange(8) * 5e3, "eager": 1e-3, "one-launch": torch.nan}
    answer = steps.measure(question())["arms"]
    assert answer["sglang-fused"]["error"] > 0.1 > answer["sglang-eager"]["error"] > 0
    assert answer["sglang-one-launch"]["error"] == float("inf")
    assert len({result["digest"] for result in answer.values()}) == 4, "layer has those of sglang"


def test_what_does_not_fit_into_cache_or_context_is_refused_before_any_step(engine):
    steps, runner = engine
    reason = steps.measure(question(lens=(3000, 900, 500)))["refused"]
    assert reason.startswith("a case must fit into 4000 tokens of cache") and "got 4505" in reason
    runner.torch_runner.max_total_num_tokens = 10**6
    reason = steps.measure(question(lens=(16380,)))["refused"]
    assert f"{serve.CONTEXT['fa3']} of a request" in reason
    assert runner.steps == []


def test_a_traced_step_has_kernels_and_their_time_and_no_other(engine, monkeypatch):
    steps, _ = engine

    def trace(step):
        step()
        return (Kernel("a", 2.0, 5.0), Kernel("b", 1.0, 1.5))

    monkeypatch.setattr(serve, "trace_kernels", trace)
    answer = steps.measure(question(timer="profiler"))["arms"]["sglang-fused"]
    assert answer["run_us"] == [6.5]
    assert answer["kernels"][0] == {"name": "a", "launches": 2.0, "gpu_us": 5.0}


def test_an_engine_that_does_not_find_the_plugin_says_so(engine, monkeypatch):
    monkeypatch.setattr(sys.modules["sglang.srt.plugins"], "load_plugins", arms.STATE.arms.clear)
    with pytest.raises(RuntimeError, match="attnlib must be installed for SGLang to find"):
        serve.Steps(SETUP)


def test_offline_steps_are_what_more_tokens_take_longer(monkeypatch):
    counts, now = [], [0.0]

    def generate(input_ids, sampling_params):
        count = sampling_params["max_new_tokens"]
        counts.append(count)
        now[0] += 1.0 + 0.005 * count
        return [{"output_ids": [7] * count} for _ in input_ids]

    made = SimpleNamespace(Engine=lambda **options: SimpleNamespace(generate=generate))
    server = {"ServerArgs": SimpleNamespace}
    installed(monkeypatch, {"sglang.srt.server_args": server, "sglang": vars(made)})
    monkeypatch.setattr(serve.time, "perf_counter", lambda: now[0])
    answer = serve.Offline(SETUP).measure(question(arms=["sglang-fa2"], steps=10))
    answer = answer["arms"]["sglang-fa2"]
    assert answer["run_us"] == pytest.approx([5000.0] * serve.REPEATS)
    assert (answer["error"], counts[:3]) == (0.0, [2, 2, 12])
    one, *others = answer["digest"].split("-")
    assert others == [one, one], "a hash of each of few requests"


def test_lines_in_are_lines_out_and_what_the_engine_prints_is_not_among_them(
    engine, monkeypatch, tmp_path, capfd
):
    (tmp_path / "setup.json").write_text(json.dumps(SETUP))
    monkeypatch.setattr(sys, "stdin", [json.dumps(question(steps=1)) + "\n"])
    serve.main(tmp_path / "setup.json")
    ready, answer = map(json.loads, capfd.readouterr().out.splitlines())
    assert ready == {"ready": True} and set(answer["arms"]) == set(FA3)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_folder_has_the_heads_that_kernel_cases_have(name, tmp_path):
    write_model(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    of = {"llama-3.1-8b": "Llama-3.1-8B", "qwen3-32b-tp4": "Qwen3-32B at TP 4"}
    halves = {"qwen3-half": (32, 4, 128), "qwen3-0.6b": (16, 8, 128)}
    assert tuple(config[name] for name in heads) == (MODELS | halves)[of.get(name, name)]
    words = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == config["vocab_size"]


def test_sglang_has_the_names_that_are_used_of_it():
    used = "ServerArgs PortArgs _set_envs_and_config load_model initialize_moe_config "
    used += "initialize_fp8_gemm_config initialize_fp4_gemm_config "
    used += "prepare_synthetic_inputs_for_latency_test"
    files = ("bench_one_batch", "srt/server_args", NATIVE.removeprefix("sglang.").replace(".", "/"))
    with ZipFile(wheel_of()) as archive:
        bench, server, native = (archive.read(f"sglang/{name}.py").decode() for name in files)
    assert {*used.split()} <= {*re.findall(r"\w+", bench)}
    options = {*serve.server_options(SETUP | {"tp": 2, "dp": 2}, SimpleNamespace)}
    fields = re.findall(r"^    (\w+): ", server, re.M)
    assert options | {"disable_radix_cache", "skip_tokenizer_init"} <= {*fields}
    assert "class TorchNativeAttnBackend" in native
