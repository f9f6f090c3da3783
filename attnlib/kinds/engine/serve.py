"""Inside an engine's process: SGLang with a model; one JSON line per case in, one JSON line out.

    python -m attnlib.kinds.engine.serve SETUP.json     (started by `measure`, not by hand)

The cache is filled with normal values, so a context of any length costs a prefill of one token:
requests get slots, shuffled as by an allocator in use, and are extended by one token. A case has
the same tokens, slots and values in every process, whatever ran before it. Later releases of
SGLang keep their buffers to themselves: there SGLang picks slots for the whole prompts, and their
prefill runs no model.

Before it is timed, each arm decodes `CHECKED` steps from the same state. Its first logits are
compared with a step by PyTorch's attention (SGLang's `torch_native`), and all of them are hashed.
Then the arms alternate step by step, A B C C B A, so that no arm has the longer contexts. Schedule
and decode are captured in CUDA graphs: each of their arms has graphs of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...engines.arms import STATE
from ...engines.sglang import use
from ...engines.sglang_hooks import pin_decode
from ...measure.trace import trace_kernels
from .case import WARM_TURNS

POOL_TOKENS = 300_000
"""Size of the cache in every process: 37 GiB for Llama-3.1-8B."""
# Longest request, by SGLang's attention_backend ("fa3" is the FlashAttention-3 library).
CONTEXT = {"fa3": 16_384, "flashinfer": 102_400}
BATCHES = (1, 2, 4, 8, 16, 32, 40, 64, 128)
"""Batch sizes with a CUDA graph of their own; others are padded."""
AT_CAPTURE = ("schedule=", "splits=", "decode=fa")
"""Arms that run when graphs are captured or a backend is made, not in each case."""
CHECKED = 4
REPEATS = 5
"""Calls of the offline engine; each gives one mean time of a step."""
VOCABULARY = 9000
"""Prompts are made of the first words."""
Arms = dict[str, dict[str, str]]
Answers = dict[str, dict[str, Any]]
State = tuple[torch.Tensor, Any]
RENAMED = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
}
"""Options of SGLang 0.5.11 -> their names later."""
RUNNERS = ("decode_cuda_graph_runner", "graph_runner")
"""Names of a ModelRunner's graphs, the later one first."""


def server_options(setup: dict[str, Any], known: Any) -> dict[str, Any]:
    """Options of a release's `ServerArgs`, `known`, for model, backend and GPUs of `setup`."""
    options = {
        "model_path": setup["model"],
        "attention_backend": setup["attention"],
        "context_length": setup["context"] or CONTEXT[setup["attention"]],
        "max_total_tokens": POOL_TOKENS,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "sampling_backend": "pytorch",
        "disable_piecewise_cuda_graph": True,
        "mem_fraction_static": 0.8,
        "cuda_graph_bs": list(BATCHES),
        "cuda_graph_max_bs": max(BATCHES),
    }
    if setup["tp"] > 1:
        options["tp_size"] = setup["tp"]
        # SGLang's own all-reduce hung on the machine where it was tried.
        options["disable_custom_all_reduce"] = True
        options["enforce_disable_flashinfer_allreduce_fusion"] = True
    if setup["dp"] > 1:
        options["dp_size"] = setup["dp"]
        options["enable_dp_attention"] = True
        options["disable_radix_cache"] = True
    for name, later in RENAMED.items():
        if hasattr(known, later):
            options[later] = options.pop(name)
    return options


def load(bench: Any, args: Any) -> Any:
    """SGLang's runner of one batch, started as its own command starts it."""
    if not hasattr(bench, "publish"):
        bench._set_envs_and_config(args)
        for name in ("moe", "fp8_gemm", "fp4_gemm"):
            getattr(bench, f"initialize_{name}_config")(args)
        return bench.load_model(args, bench.PortArgs.init_new(args), 0, 0)[0]
    args.resolve_once()
    bench._set_envs_and_config(args)
    ports = bench.PortArgs.init_new(args)
    rank = bench.spawn_world_rank(args, tp_rank=0, pp_rank=0)
    bench.publish(args, role="scheduler", ranks=bench.SpawnRanks(world_rank=rank, gpu_id=0))
    bench._init_process_global_configs()
    return bench.load_model(args, ports, 0, 0)[0]


class GraphSets:
    """CUDA graphs of one model under several arms of schedule and decode, in one process.

    `model` is SGLang's ModelRunner; its graphs were captured under the arms that are set now. All
    sets share one memory pool, as SGLang's graphs of several batch sizes do: replay one at a time.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.name = next(name for name in RUNNERS if hasattr(model, name))
        self._at_start = dict(vars(model.attn_backend))
        self._sets = {self._key(): (getattr(model, self.name), self._at_start)}

    def use(self, **arms: str) -> None:
        """As `sglang.use`; captures the graphs of arms that have none yet.

        ValueError for another decode where SGLang started with fa3: its wrappers stay fa3's.
        """
        backend, decode = self.model.attn_backend, arms.get("decode", "fa3")
        if self._at_start.get("decode_backend") == "fa3" and decode != "fa3":
            raise ValueError(f"decode must be fa3, with which SGLang started, got {decode!r}")
        use(**arms)
        key = self._key()
        if key not in self._sets:
            vars(backend).update(self._at_start, decode_cuda_graph_metadata={})
            if "decode" in STATE.arms:
                pin_decode(None, backend, self.model)
            runner = type(getattr(self.model, self.name))(self.model)
            self._sets[key] = (runner, dict(vars(backend)))
        runner, attributes = self._sets[key]
        setattr(self.model, self.name, runner)
        vars(backend).update(attributes)

    def _key(self) -> tuple[str | None, str | None]:
        return STATE.arms.get("schedule"), STATE.arms.get("decode")


class Steps:
    """SGLang's synchronous runner, on one GPU."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        if not STATE.arms:
            raise RuntimeError("attnlib must be installed for SGLang to find its plugin, it is not")
        try:
            import sglang.benchmark.one_batch as bench
        except ModuleNotFoundError:  # before 0.5.15
            import sglang.bench_one_batch as bench
        self.bench = bench
        options = server_options(setup, bench.ServerArgs) | {"disable_radix_cache": True}
        args = bench.ServerArgs(**options)
        self.max_context = args.context_length
        self.runner = load(bench, args)
        self.model = self.runner.torch_runner
        self.graphs = GraphSets(self.model)
        self.start = dict(STATE.arms)

    def measure(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a case: `refused`, or per arm its check and its steps or kernels."""
        lens, arms, steps = question["lens"], question["arms"], question["steps"]
        added = len(arms) * (WARM_TURNS + steps)
        tokens, longest = sum(lens) + len(lens) * added, max(lens) + added
        room = self.model.max_total_num_tokens
        if tokens > room or longest > self.max_context:
            return {
                "refused": f"a case must fit into {room} tokens of cache and {self.max_context} of "
                f"a request, got {tokens} and {longest}"
            }
        before = STATE.calls.copy()
        for arm in arms:  # the first time, this captures the arm's graphs
            self._switch(arms[arm])
        answers = self.checked(lens, arms)
        timers = {"host": self.timed, "ahead": self.timed_ahead, "profiler": self.traced}
        turns = list(islice(cycle([*arms, *reversed(arms)]), added))
        measured = timers[question["timer"]](lens, arms, turns)
        for arm in arms:
            answers[arm] |= measured[arm]
        calls = {
            name: count - (0 if name.startswith(AT_CAPTURE) else before[name])
            for name, count in STATE.calls.items()
        }
        return {"arms": answers, "calls": calls}

    def build(self, lens: Sequence[int]) -> State:
        """Requests that hold `lens` tokens, and the next token of each: the same each time."""
        drawn = np.random.default_rng(0)
        prompts = [drawn.integers(0, VOCABULARY, length).tolist() for length in lens]
        self.runner.clear()
        reqs = self.bench.prepare_synthetic_inputs_for_latency_test(len(lens), 0, prompts)
        if not hasattr(reqs[0], "set_extend_input_len"):
            with self._made_up_logits(len(lens)):
                tokens, _, batch = self.runner.extend(reqs)
            self._fill()
            return tokens, batch
        self._fill()
        cached = [length - 1 for length in lens]
        slots = self.model.token_to_kv_pool_allocator.alloc(sum(cached))
        order = torch.from_numpy(drawn.permutation(len(slots))).to(slots.device)
        for req, prefix in zip(reqs, slots[order].split(cached), strict=True):
            req.prefix_indices = prefix
            req.set_extend_input_len(1)
        tokens, _, batch = self.runner.extend(reqs)
        return tokens, batch

    @contextmanager
    def _made_up_logits(self, requests: int) -> Iterator[None]:
        """Prefills in the block get slots, but run no model: `_fill` writes the cache later."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        drawn = torch.Generator().manual_seed(0)
        logits = torch.rand(requests, VOCABULARY, generator=drawn).to(self.model.device)
        output = SimpleNamespace(logits_output=LogitsProcessorOutput(logits))
        self.model.forward = lambda _: output
        try:
            yield
        finally:
            del self.model.forward

    def _fill(self) -> None:
        """Normal values in the cache: what made-up weights write is too small to matter."""
        pool = self.model.token_to_kv_pool
        values = torch.Generator(pool.k_buffer[0].device).manual_seed(0)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.normal_(generator=values)

    def _switch(self, arm: dict[str, str]) -> None:
        self.graphs.use(**self.start | arm)

    def checked(self, lens: Sequence[int], arms: Arms) -> Answers:
        """Per arm the largest relative error of a request's logits, and a hash of all outputs."""
        tokens, batch = self.build(lens)
        with self._pytorch_attention():
            reference = self.runner.decode(tokens, batch)[1].double()
        answers = {}
        for arm in arms:
            self._switch(arms[arm])
            tokens, batch = self.build(lens)
            digest, error = hashlib.sha256(), 0.0
            for step in range(CHECKED):
                tokens, logits = self.runner.decode(tokens, batch)
                if step == 0:
                    errors = (logits.double() - reference).norm(dim=1) / reference.norm(dim=1)
                    error = float(errors.nan_to_num(torch.inf).max())
                digest.update(tokens.cpu().numpy().tobytes())
                digest.update(logits.float().cpu().numpy().tobytes())
            answers[arm] = {"error": error, "digest": digest.hexdigest()[:12]}
        return answers

    def timed(self, lens: Sequence[int], arms: Arms, turns: Sequence[str]) -> Answers:
        """Per arm the microseconds of its steps, one at a time, the host's time included."""
        us: dict[str, list[float]] = {arm: [] for arm in arms}
        tokens, batch = self.build(lens)
        for arm in turns:
            self._switch(arms[arm])
            self.runner.synchronize()
            start = time.perf_counter()
            tokens, _ = self.runner.decode(tokens, batch)
            self.runner.synchronize()
            us[arm].append((time.perf_counter() - start) * 1e6)
        return {arm: {"run_us": us[arm][WARM_TURNS:]} for arm in arms}

    def timed_ahead(self, lens: Sequence[int], arms: Arms, turns: Sequence[str]) -> Answers:
        """Per arm the microseconds from the end of the step before to the end of its own on the
        GPU, while the host runs ahead; empty where it does not."""
        us: dict[str, list[float]] = {arm: [] for arm in arms}
        tokens, batch = self.build(lens)
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(1 + len(turns))]
        ends[0].record()
        for arm, end in zip(turns, ends[1:], strict=True):
            self._switch(arms[arm])
            tokens, _ = self.runner.decode(tokens, batch)
            end.record()
        is_ahead = not ends[-3].query()
        self.runner.synchronize()
        if is_ahead:
            for arm, (before, end) in zip(turns, pairwise(ends), strict=True):
                us[arm].append(before.elapsed_time(end) * 1e3)
        return {arm: {"run_us": us[arm][WARM_TURNS:]} for arm in arms}

    def traced(self, lens: Sequence[int], arms: Arms, _: Sequence[str]) -> Answers:
        """Per arm the kernels of a step, and their time in all."""
        tokens, batch = self.build(lens)
        answers = {}

        def step() -> None:
            nonlocal tokens
            tokens, _ = self.runner.decode(tokens, batch)

        for arm in arms:
            self._switch(arms[arm])
            kernels = [kernel._asdict() for kernel in trace_kernels(step)]
            total = sum(kernel["gpu_us"] for kernel in kernels)
            answers[arm] = {"kernels": kernels, "run_us": [total]}
        return answers

    @contextmanager
    def _pytorch_attention(self) -> Iterator[None]:
        """Decode steps in the block run PyTorch's attention without a graph."""
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        model, name = self.model, self.graphs.name
        kept = model.attn_backend, getattr(model, name)
        model.attn_backend = TorchNativeAttnBackend(model)
        setattr(model, name, None)
        try:
            yield
        finally:
            model.attn_backend = kept[0]
            setattr(model, name, kept[1])


class Offline:
    """SGLang's `Engine`: its scheduler is a process of its own and loads the plugin itself."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import sglang
        from sglang.srt.server_args import ServerArgs

        options = server_options(setup, ServerArgs)
        # At its own level, error, the scheduler would not log which arm runs.
        self.engine = sglang.Engine(**options, skip_tokenizer_init=True, log_level="warning")

    def measure(self, question: dict[str, Any]) -> dict[str, Any]:
        """Mean times of a step of the one arm, one value per call; the error counts lost tokens.

        Prompts are in the engine's prefix cache from the first call on. A step's time is the
        difference of a long and a short call, so that prefill and first step cancel.
        """
        drawn, steps = np.random.default_rng(0), question["steps"]
        prompts = [drawn.integers(0, VOCABULARY, length).tolist() for length in question["lens"]]
        self._generate(prompts, 2)
        steps_us, missing, tokens = [], 0, list[list[int]]()
        for _ in range(REPEATS):
            short_s, _ = self._generate(prompts, 2)
            long_s, tokens = self._generate(prompts, 2 + steps)
            steps_us.append((long_s - short_s) / steps * 1e6)
            missing += sum(len(ids) != 2 + steps for ids in tokens)
        (arm,) = question["arms"]
        answer = {"error": float(missing), "digest": token_digest(tokens), "run_us": steps_us}
        return {"arms": {arm: answer}, "calls": {}}

    def _generate(self, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        """Seconds of a call, and the `count` tokens of each request."""
        start = time.perf_counter()
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        outputs = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - start, [output["output_ids"] for output in outputs]


def token_digest(tokens: Sequence[Sequence[int]]) -> str:
    """A hash of all requests' tokens; for up to eight requests one hash each, joined by `-`."""
    hashes = [hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:6] for ids in tokens]
    if len(hashes) <= 8:
        return "-".join(hashes)
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:12]


def main(path: Path) -> None:
    """Serve until stdin ends; an exception ends the process."""
    setup = json.loads(path.read_text())
    # SGLang prints: its output goes to stderr, our answers to where stdout was.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        engine = Steps(setup) if setup["driver"] == "steps" else Offline(setup)
        answers.write('{"ready": true}\n')
        for line in sys.stdin:
            answers.write(json.dumps(engine.measure(json.loads(line))) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
