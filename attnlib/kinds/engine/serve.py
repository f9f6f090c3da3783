"""Inside an engine's process: SGLang with a model.

The cache is filled with normal values, so a context of any length costs a prefill of one token:
requests are given slots, shuffled as an allocator leaves them, and extended by one. A case has the
same tokens, slots and values in every process, whatever ran before it.

Before it is timed each arm decodes `CHECKED` steps from the same state. Its first logits are held
to a step whose attention is PyTorch's (SGLang's `torch_native`), all of them are hashed. Then the
arms alternate step by step, A B C C B A: each one's n-th step has the others' as neighbours, and
none has the longer contexts. Arms that lie in CUDA graphs have graphs of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.engines import capture
from ...core.engines.arms import PREFIX, STATE
from ...measure.trace import trace_kernels

POOL_TOKENS = 300_000
"""Of the cache, in every process alike: 37 GiB of Llama-3.1-8B's."""
CONTEXT = {"fa3": 16_384, "flashinfer": 102_400}
BATCHES = (1, 2, 4, 8, 16, 32, 40, 64, 128)
"""Batches that have a CUDA graph each; others are padded."""
CHECKED = 4
WARM_TURNS = 4
REPEATS = 5
"""Calls of the offline engine, of which each gives one mean time of a step."""
VOCABULARY = 9000
"""Prompts are of the first words."""
Arms = dict[str, dict[str, str]]
State = tuple[torch.Tensor, Any]


def server_options(setup: dict[str, Any]) -> dict[str, Any]:
    """SGLang's `ServerArgs` of a model's folder, an attention backend and so many GPUs."""
    # SGLang's own all-reduce hung where it was tried.
    words = ("disable_custom_all_reduce", "enforce_disable_flashinfer_allreduce_fusion")
    ranks = {} if setup["tp"] == 1 else {"tp_size": setup["tp"], **dict.fromkeys(words, True)}
    if setup["dp"] > 1:
        ranks |= {"dp_size": setup["dp"], "enable_dp_attention": True, "disable_radix_cache": True}
    return {
        "model_path": setup["model"],
        "attention_backend": setup["attention"],
        "context_length": CONTEXT[setup["attention"]],
        "max_total_tokens": POOL_TOKENS,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "sampling_backend": "pytorch",
        "disable_piecewise_cuda_graph": True,
        "mem_fraction_static": 0.8,
        "cuda_graph_bs": list(BATCHES),
        "cuda_graph_max_bs": max(BATCHES),
        **ranks,
    }


class Steps:
    """SGLang's synchronous runner, on one GPU."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        if not STATE.arms:
            raise RuntimeError("attnlib must be installed for SGLang to find its plugin, it is not")
        import sglang.bench_one_batch as bench

        self.bench, self.width = bench, CONTEXT[setup["attention"]]
        args = bench.ServerArgs(**server_options(setup), disable_radix_cache=True)
        bench._set_envs_and_config(args)
        for name in ("moe", "fp8_gemm", "fp4_gemm"):
            getattr(bench, f"initialize_{name}_config")(args)
        self.runner, _ = bench.load_model(args, bench.PortArgs.init_new(args), 0, 0)
        self.model = self.runner.torch_runner
        from ...core.engines.sglang_graphs import GraphSets

        self.graphs, self.start = GraphSets(self.model), dict(STATE.arms)

    def measure(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a case: `refused`, or for each arm its check and its steps or kernels."""
        lens, arms, steps = question["lens"], question["arms"], question["steps"]
        longest = max(lens) + len(arms) * (WARM_TURNS + steps)
        room, width = self.model.max_total_num_tokens, self.width
        wanted = sum(lens) + len(lens) * (longest - max(lens))
        if wanted > room or longest > width:
            return {
                "refused": f"a case must fit into {room} tokens of cache and {width} of a request, "
                f"got {wanted} and {longest}"
            }
        before = dict(STATE.calls)
        for arm in arms:  # captures its graphs, if it is the first time
            self._switch(arms[arm])
        found = self.checked(lens, arms)
        measured = self.traced(lens, arms) if question["trace"] else self.timed(lens, arms, steps)
        for arm in arms:
            found[arm] |= measured[arm]
        return {"arms": found, "calls": _more(STATE.calls, before)}

    def build(self, lens: Sequence[int]) -> State:
        """Requests that hold so many tokens, and the next token of each: the same each time."""
        pool = self.model.token_to_kv_pool
        values = torch.Generator(pool.k_buffer[0].device).manual_seed(0)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.normal_(generator=values)
        drawn = np.random.default_rng(0)
        prompts = [drawn.integers(0, VOCABULARY, length).tolist() for length in lens]
        self.runner.clear()
        reqs = self.bench.prepare_synthetic_inputs_for_latency_test(len(lens), 0, prompts)
        held = [length - 1 for length in lens]
        slots = self.model.token_to_kv_pool_allocator.alloc(sum(held))
        order = torch.from_numpy(drawn.permutation(len(slots))).to(slots.device)
        for req, prefix in zip(reqs, slots[order].split(held), strict=True):
            req.prefix_indices = prefix
            req.set_extend_input_len(1)
        tokens, _, batch = self.runner.extend(reqs)
        return tokens, batch

    def _switch(self, arm: dict[str, str]) -> None:
        self.graphs.use(**self.start | arm)

    def checked(self, lens: Sequence[int], arms: Arms) -> dict[str, dict[str, Any]]:
        """By arm: the largest relative error of a request's logits, and a hash of all outputs."""
        tokens, batch = self.build(lens)
        with self._pytorch_attention():
            wanted = self.runner.decode(tokens, batch)[1].double()
        found = {}
        for arm in arms:
            self._switch(arms[arm])
            tokens, batch = self.build(lens)
            digest, error = hashlib.sha256(), None
            for _ in range(CHECKED):
                tokens, logits = self.runner.decode(tokens, batch)
                if error is None:
                    off = (logits.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
                    error = float(off.nan_to_num(torch.inf).max())
                digest.update(tokens.cpu().numpy().tobytes())
                digest.update(logits.float().cpu().numpy().tobytes())
            found[arm] = {"error": error, "digest": digest.hexdigest()[:12]}
        return found

    def timed(self, lens: Sequence[int], arms: Arms, steps: int) -> dict[str, dict[str, Any]]:
        """By arm, the microseconds of each of its steps, in their order."""
        tokens, batch = self.build(lens)
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        turns = WARM_TURNS + steps
        for arm in islice(cycle([*arms, *reversed(arms)]), len(arms) * turns):
            self._switch(arms[arm])
            self.runner.synchronize()
            start = time.perf_counter()
            tokens, _ = self.runner.decode(tokens, batch)
            self.runner.synchronize()
            found[arm].append((time.perf_counter() - start) * 1e6)
        return {arm: {"run_us": us[WARM_TURNS:]} for arm, us in found.items()}

    def traced(self, lens: Sequence[int], arms: Arms) -> dict[str, dict[str, Any]]:
        """By arm, the kernels of a step, and what they take in all."""
        state = list(self.build(lens))
        found = {}

        def step() -> None:
            state[0], _ = self.runner.decode(*state)

        for arm in arms:
            self._switch(arms[arm])
            kernels = [kernel._asdict() for kernel in trace_kernels(step)]
            total = sum(kernel["gpu_us"] for kernel in kernels)
            found[arm] = {"kernels": kernels, "run_us": [total]}
        return found

    @contextmanager
    def _pytorch_attention(self) -> Iterator[None]:
        """Decode steps in the block have PyTorch's attention, and no graph."""
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        model = self.model
        kept = model.attn_backend, model.graph_runner
        model.attn_backend, model.graph_runner = TorchNativeAttnBackend(model), None
        try:
            yield
        finally:
            model.attn_backend, model.graph_runner = kept


class Offline:
    """SGLang's `Engine`: its scheduler is a process of its own and loads the plugin itself."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import sglang

        self.steps = Path(setup["model"]) / "steps.jsonl" if setup["dp"] > 1 else None
        if self.steps:
            os.environ[f"{PREFIX}CAPTURE"] = str(self.steps)
        self.engine = sglang.Engine(**server_options(setup), skip_tokenizer_init=True)

    def measure(self, question: dict[str, Any]) -> dict[str, Any]:
        """By its one arm: mean times of a step, a value a call; the error is of token counts.

        Prompts are in the engine's prefix cache from the first call on. What a prefill and a first
        step still cost is in the shorter call too, and so not in the difference.
        """
        drawn, steps = np.random.default_rng(0), question["steps"]
        prompts = [drawn.integers(0, VOCABULARY, length).tolist() for length in question["lens"]]
        missing, found = 0, []
        self._seconds(prompts, 2)
        for _ in range(REPEATS):
            short, _ = self._seconds(prompts, 2)
            long, told = self._seconds(prompts, 2 + steps)
            found.append((long - short) / steps * 1e6)
            missing += sum(len(each["output_ids"]) != 2 + steps for each in told)
        digest, (arm,) = token_digest([each["output_ids"] for each in told]), question["arms"]
        found_of = {"error": float(missing), "digest": digest, "run_us": found}
        return {"arms": {arm: found_of}, "calls": {}, "said": self._heads()}

    def _heads(self) -> list[str]:
        """Where groups attend for requests of their own: heads that FA3's schedule is told."""
        steps = capture.read(self.steps) if self.steps else []
        heads = {(s.told, f"{s.num_qo_heads}/{s.num_kv_heads}") for s in steps if s.told}
        return [f"told {told} heads of {own}" for told, own in sorted(heads)]

    def _seconds(self, prompts: list[list[int]], count: int) -> tuple[float, list[dict[str, Any]]]:
        start = time.perf_counter()
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        told = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - start, told


def token_digest(tokens: Sequence[Sequence[int]]) -> str:
    """A hash of all requests' tokens; of few, one each, joined by `-`."""
    hashes = [hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:6] for ids in tokens]
    many = hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:12]
    return many if len(hashes) > 8 else "-".join(hashes)


def _more(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What was counted at start stays: an arm that lies in a graph is counted there alone."""
    changed = {name: count - before.get(name, 0) for name, count in now.items()}
    return {name: changed[name] or now[name] for name in now}
