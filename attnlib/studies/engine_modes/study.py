"""Every mode in which SGLang calls FlashInfer, by fa2 and fa3, as pull request 18364 pinned it.

Engines capture decode, verification, draft extension and block diffusion in CUDA graphs and run
prefill eagerly; the main grids do the same, and a smaller one has each mode the other way. Eager
items are timed by the profiler: without the gaps between launches, which profiling lengthens.
"""

from functools import partial
from itertools import product
from typing import TypeAlias

from ...core.spec import AttnSpec
from ...kinds.cost import extend_cost
from ...kinds.decode.case import DecodeCase
from ...kinds.extend.case import ExtendCase
from ...run.study import Grid, Study

Heads: TypeAlias = tuple[int, int]
Ints: TypeAlias = tuple[int, ...]
Sizes: TypeAlias = tuple[Ints, Ints]
LLAMA, TP8, QWEN = (32, 8), (8, 1), (16, 2)
"""Heads of Llama-3.1-8B, of Llama-3.1-70B on one GPU of eight, of Qwen3-32B on one of four."""
MOST_FLOPS = 4e12
"""A longer call would take 10 ms or more, whatever the kernel."""
MOST_KV_VECTORS = 2**23
"""Tokens x KV heads x requests: 4 GiB of K and V, of which fa3 reads each once a query head."""


def _cached(heads: Heads, batch: int, kv_len: int, page_size: int = 1) -> DecodeCase:
    return DecodeCase(AttnSpec(*heads, 128, page_size), batch, kv_len)


def _prefills(
    heads: Heads, q_lens: Ints, batches: Ints, page_size: int = 1, mode: str = "prefill_paged"
) -> tuple[ExtendCase, ...]:
    """Prefill without and, where it is paged, also with 8,192 tokens before the queries."""
    prefixes = (0, 8192) if mode == "prefill_paged" else (0,)
    cases = (
        ExtendCase(_cached(heads, batch, q_len + prefix, page_size), mode, q_len)
        for q_len, prefix, batch in product(q_lens, prefixes, batches)
    )
    return tuple(case for case in cases if extend_cost(case).flops <= MOST_FLOPS)


_ragged = partial(_prefills, mode="prefill_ragged")


def _few(
    mode: str, heads: Heads, q_len: int, sizes: Sizes, *, page_size: int = 1, mask: str = ""
) -> tuple[ExtendCase, ...]:
    """A few queries per request over `sizes`: batches x kv_lens."""
    return tuple(
        ExtendCase(_cached(heads, batch, kv_len, page_size), mode, q_len, mask)
        for batch, kv_len in product(*sizes)
        if batch * kv_len * heads[1] <= MOST_KV_VECTORS
    )


BATCHES, CONTEXTS = (1, 32, 128), (1024, 8192, 32768)
USUAL = (BATCHES, (8192,))

PREFILLS = _prefills(LLAMA, (128, 512, 2048, 8192), (1, 8))
OTHER_PREFILLS = (
    *_prefills(TP8, (128, 2048, 8192), (1, 8)),
    *_prefills(QWEN, (512, 2048), (1,)),
    *_prefills(LLAMA, (128, 2048), (1,), 16),
)
RAGGED = _ragged(LLAMA, (512, 2048, 8192), (1, 8))
OTHER_RAGGED = (*_ragged(TP8, (512, 8192), (1, 8)), *_ragged(QWEN, (2048,), (1,)))
VERIFIES = (
    *_few("target_verify", LLAMA, 4, (BATCHES, CONTEXTS), mask="causal"),
    *_few("target_verify", LLAMA, 8, USUAL, mask="causal"),
)
OTHER_VERIFIES = (
    *_few("target_verify", TP8, 4, (BATCHES, CONTEXTS), mask="causal"),
    *_few("target_verify", QWEN, 4, ((1, 32), (8192,)), mask="causal"),
    *_few("target_verify", LLAMA, 4, ((1, 32), (8192,)), mask="causal", page_size=16),
)
MASKED = (
    *_few("target_verify", LLAMA, 8, USUAL),
    *_few("target_verify", TP8, 8, USUAL),
    *_few("target_verify", LLAMA, 8, USUAL, mask="chain"),
)
DRAFTS = _few("draft_extend", LLAMA, 5, (BATCHES, (1024, 8192)))
OTHER_DRAFTS = _few("draft_extend", TP8, 5, USUAL)
BLOCKS = _few("dllm_extend", LLAMA, 32, ((1, 8, 32), (1024, 8192)))
OTHER_BLOCKS = _few("dllm_extend", TP8, 32, ((1, 32), (8192,)))
DECODES = tuple(_cached(heads, batch, 8192) for heads, batch in product((LLAMA, TP8), BATCHES))

EAGER_PREFILLS = (*PREFILLS, *RAGGED)
IN_GRAPHS = (*VERIFIES, *DRAFTS, *BLOCKS)
THE_OTHER_WAY = {
    "graph": (*_prefills(LLAMA, (128, 512, 2048), (1,)), *_ragged(LLAMA, (512, 2048), (1,))),
    "profiler": (
        *_few("target_verify", LLAMA, 4, USUAL, mask="causal"),
        *_few("draft_extend", LLAMA, 5, USUAL),
        *_few("dllm_extend", LLAMA, 32, ((1, 8, 32), (8192,))),
    ),
}
ONE_OF_EACH = (PREFILLS[4], RAGGED[2], VERIFIES[4], MASKED[1], DRAFTS[3], BLOCKS[3])

PIN_FA2, PIN_FA3 = ("flashinfer-prefill-fa2",), ("flashinfer-prefill-fa3",)
BOTH = (*PIN_FA2, *PIN_FA3)
LIBRARY = ("flash-attn-3-extend",)
DECODE = ("flashinfer-fa2", "flashinfer-fa3", "flashinfer-auto")
GRAPH, EAGER = "graph", "profiler"
"""Timers of the two ways to call."""
PINNED, NOW = "0.6.4", ""
"""FlashInfer two weeks after SGLang pinned fa2, with `auto` repaired; and what is installed, in the
published records 0.7.2.post1, which vLLM 0.33.0 pins (SGLang 0.5.23: 0.7.2)."""
RELEASES = (PINNED, NOW)

STUDY = Study(
    name="engine_modes",
    question="For which modes and shapes is fa2 everywhere right, and what does it cost elsewhere?",
    grids=(
        Grid(EAGER_PREFILLS, BOTH, RELEASES, (EAGER,), rounds=4),
        Grid(EAGER_PREFILLS, LIBRARY, timers=(EAGER,), rounds=4),
        Grid((*OTHER_PREFILLS, *OTHER_RAGGED), BOTH, timers=(EAGER,), rounds=4),
        Grid(IN_GRAPHS, BOTH, RELEASES, rounds=4),
        Grid(IN_GRAPHS, LIBRARY, rounds=4),
        Grid((*OTHER_VERIFIES, *OTHER_DRAFTS, *OTHER_BLOCKS), BOTH, rounds=4),
        Grid(MASKED, PIN_FA2, rounds=4),
        Grid(DECODES, DECODE, RELEASES, rounds=4),
        Grid(THE_OTHER_WAY["graph"], BOTH, rounds=4),
        Grid((*THE_OTHER_WAY["profiler"], MASKED[1]), PIN_FA2, timers=(EAGER,), rounds=4),
        Grid(THE_OTHER_WAY["profiler"], PIN_FA3, timers=(EAGER,), rounds=4),
        Grid(ONE_OF_EACH, ("flashinfer-prefill-auto",), RELEASES, (GRAPH, EAGER), rounds=4),
        Grid(EAGER_PREFILLS[::4], (), RELEASES, (EAGER,), rounds=4, again=PIN_FA2),
        Grid(IN_GRAPHS[::5], (), RELEASES, rounds=4, again=PIN_FA2),
        Grid(DECODES, (), RELEASES, rounds=4, again=DECODE[:1]),
        Grid(VERIFIES[3:6], BOTH, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-e0997f6a",
)
