"""Every mode in which SGLang calls FlashInfer, by fa2 and fa3, as pull request 18364 pinned it.

Engines capture decode, verification, draft extension and block diffusion in CUDA graphs and run
prefill eagerly; so do the grids. Eager items are timed by the profiler: kernel times, without the
gaps between launches. Times of the two timers are never divided by each other.

In rows of `mode_rows` `backend` is a short name: fa2 and fa3 are FlashInfer's, whichever wrapper a
mode uses, `library` is FlashAttention-3 itself. `group` is the mode, with paged prefill split by
whether the cache held a prefix.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product, starmap

import numpy as np
import pandas as pd

from ..core.fa2.library import tile_rows
from ..core.spec import CUSTOM_MASKS, AttnSpec
from ..draw import charts, style
from ..kinds.decode.case import DecodeCase
from ..kinds.extend.case import ExtendCase
from ..run import frame as frames
from ..run.frame import decode_rows, tally
from ..run.study import Grid, Study

Heads = tuple[int, int]
Ints = tuple[int, ...]
Sizes = tuple[Ints, Ints]
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
    return tuple(case for case in cases if case.cost.flops <= MOST_FLOPS)


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
MASKED = _few("target_verify", LLAMA, 8, USUAL, mask="chain")
DRAFTS = _few("draft_extend", LLAMA, 5, (BATCHES, (1024, 8192)))
OTHER_DRAFTS = _few("draft_extend", TP8, 5, USUAL)
BLOCKS = _few("dllm_extend", LLAMA, 32, ((1, 8, 32), (1024, 8192)))
OTHER_BLOCKS = _few("dllm_extend", TP8, 32, ((1, 32), (8192,)))
DECODES = tuple(_cached(heads, batch, 8192) for heads, batch in product((LLAMA, TP8), BATCHES))

EAGER_PREFILLS = (*PREFILLS, *RAGGED)
IN_GRAPHS = (*VERIFIES, *DRAFTS, *BLOCKS)
PROMISES = (*VERIFIES, *OTHER_VERIFIES, *BLOCKS)
"""Calls with equally many queries per request: `uniform_q_len` of FlashInfer 0.7.2.post1."""


def _mixed(requests: int, tokens: int) -> tuple[ExtendCase, tuple[DecodeCase, ExtendCase]]:
    """A batch of decoding requests and, last, a chunk of a prompt; and both of them apart."""
    decodes, alone = (_cached(LLAMA, batch, 8192, 16) for batch in (requests, 1))
    lengths, queries = ["8192"] * (requests + 1), ["1"] * requests + [str(tokens)]
    batch = replace(decodes, batch_size=requests + 1, lengths="+".join(lengths))
    one = ExtendCase(batch, "prefill_paged", tokens, q_lengths="+".join(queries))
    return one, (decodes, ExtendCase(alone, "prefill_paged", tokens))


MIXED = dict(starmap(_mixed, product((4, 8, 16, 32), (128, 512, 2048))))
"""Mixed batches, whose contexts are all equal -> the decode and the chunk apart."""
DECODING = tuple(dict.fromkeys(decodes for decodes, _ in MIXED.values()))
CHUNKS = tuple(dict.fromkeys(chunk for _, chunk in MIXED.values()))

PIN_FA2, PIN_FA3 = ("flashinfer-prefill-fa2",), ("flashinfer-prefill-fa3",)
BOTH = (*PIN_FA2, *PIN_FA3)
BY_LIBRARY = ("flash-attn-3-extend",)
PROMISED = ("flashinfer-prefill-fa2-uniform",)
DECODE = ("flashinfer-fa2", "flashinfer-fa3")
IN_TWO = {
    **{name: ("flashinfer-fa2", name) for name in BOTH},
    "flash-attn-3-extend": ("flash-attn-3-precomputed", "flash-attn-3-extend"),
    "flashinfer-batch-pod": ("flashinfer-fa2", "flashinfer-prefill-fa2"),
    "flashinfer-batch-attention-extend": ("flashinfer-fa2", "flashinfer-prefill-fa2"),
}
"""What takes a mixed batch in one call -> what decodes and what takes the chunk in two."""
BESIDE = tuple(dict.fromkeys(decode for decode, _ in IN_TWO.values()))
GRAPH, EAGER = "graph", "profiler"
"""Timers of the two ways to call."""
PINNED, NOW = "0.6.4", ""
"""FlashInfer two weeks after SGLang pinned fa2, with `auto` repaired; and what is installed, in the
published records 0.7.2.post1, which vLLM 0.33.0 pins (SGLang 0.5.23: 0.7.2)."""
RELEASES = (PINNED, NOW)

STUDY = Study(
    name="engine_modes",
    question="In which modes and shapes is fa2 the right pin, and what does it cost elsewhere?",
    grids=(
        Grid(EAGER_PREFILLS, BOTH, RELEASES, (EAGER,), rounds=4),
        Grid(EAGER_PREFILLS, BY_LIBRARY, timers=(EAGER,), rounds=4),
        Grid((*OTHER_PREFILLS, *OTHER_RAGGED), BOTH, timers=(EAGER,), rounds=4),
        Grid(IN_GRAPHS, BOTH, RELEASES, rounds=4),
        Grid(IN_GRAPHS, BY_LIBRARY, rounds=4),
        Grid((*OTHER_VERIFIES, *OTHER_DRAFTS, *OTHER_BLOCKS), BOTH, rounds=4),
        Grid(MASKED, PIN_FA2, rounds=4),
        Grid(DECODES, DECODE, RELEASES, rounds=4, again=DECODE[:1]),
        Grid(EAGER_PREFILLS[::4], (), RELEASES, (EAGER,), rounds=4, again=PIN_FA2),
        Grid(IN_GRAPHS[::5], (), RELEASES, rounds=4, again=PIN_FA2),
        Grid(PROMISES, (*PIN_FA2, *PROMISED, *BY_LIBRARY), rounds=4),
        Grid(PROMISES[::3], (), rounds=4, again=PROMISED),
        Grid(tuple(MIXED), tuple(IN_TWO), timers=(EAGER,), rounds=4, again=PIN_FA2),
        Grid(CHUNKS, (*BOTH, *BY_LIBRARY), timers=(EAGER,), rounds=4, again=PIN_FA2),
        Grid(DECODING, BESIDE, timers=(EAGER,), rounds=4, again=BESIDE),
        Grid(VERIFIES[3:6], BOTH, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-e0997f6a",
)
PROMISES_ON, MIXED_ON = "nvidia-h200-f9835d78", "nvidia-h200-8545b675"
"""The machines that published `PROMISES`, and the mixed batches (FlashInfer 0.6.13)."""

FA2, FA3, LIBRARY, BETTER = "fa2", "fa3", "library", "the better of both"
NAMES = {
    "flashinfer-fa2": FA2,
    "flashinfer-fa3": FA3,
    "flashinfer-prefill-fa2": FA2,
    "flashinfer-prefill-fa3": FA3,
    "flash-attn-3-extend": LIBRARY,
}
PREFIX = "prefill_paged, prefix"
FEW = ("decode", "target_verify", "draft_extend", "dllm_extend")
"""Groups with few queries per request, which engines capture in CUDA graphs."""
MANY = ("prefill_paged", PREFIX, "prefill_ragged")
"""Groups of prefill, which engines launch eagerly."""
GROUPS = (*FEW, *MANY)


def mode_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Records of what is installed, with `group`, by each mode's usual timer; no custom mask."""
    frame = frame[(frame.release == NOW) & frame.backend.isin(NAMES)]
    frame = frame[~frame["mask"].isin(CUSTOM_MASKS)]
    rows = pd.concat([decode_rows(frame, timer=name) for name in (GRAPH, EAGER)])
    usual = {"mode": "decode", "mask": "causal", "q_len": 1}  # decode cases have no such fields
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *usual])))
    rows = rows.astype(dict.fromkeys(usual, object)).fillna(usual)
    prefixed = (rows["mode"] == "prefill_paged") & (rows.q_len < rows.kv_len)
    group = pd.Categorical(rows["mode"].mask(prefixed, PREFIX), GROUPS, ordered=True)
    rows = rows.assign(backend=rows.backend.map(NAMES), group=group).astype({"q_len": int})
    return rows[rows.timer == np.where(rows.group.isin(MANY), EAGER, GRAPH)]


def over(rows: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    """`frame.over`, timer by timer, so that no time by events meets one by the profiler."""
    parts = [frames.over(part, a, b) for _, part in rows.groupby("timer")]
    order = ["group", "heads", "q_len", "batch_size", "kv_len"]
    return pd.concat(parts).sort_values(order, ignore_index=True)


def library(frame: pd.DataFrame) -> pd.DataFrame:
    """FlashAttention-3 over the faster of FlashInfer's two, by medians, by group."""
    rows = mode_rows(frame)
    both = rows[rows.backend.isin((FA2, FA3))]
    us = both.pivot_table("run_us", "case", "backend", "median", sort=False).dropna()
    better = both[both.case.map(us.idxmin(axis=1)) == both.backend].assign(backend=BETTER)
    table = over(pd.concat([rows, better]), LIBRARY, BETTER)
    return tally(table.astype({"group": str}), "group")


def promised(frame: pd.DataFrame) -> pd.DataFrame:
    """fa2 in a graph with `uniform_q_len` over fa2 without, and the rows of its tile, by call.

    Query heads of a group are rows of one tile. A plan for a graph (FlashInfer 0.6.4) sizes it for
    the most that one request could have, all rows but one for each other; a promised one does not.
    """
    table = frames.over(decode_rows(frame), PROMISED[0], PIN_FA2[0])
    longest = {"tile": table.batch_size * (table.q_len - 1) + 1, "tile promised": table.q_len}
    for name, q_lens in longest.items():
        calls = [(int(n), case.spec) for n, case in zip(q_lens, table.case, strict=True)]
        table[name] = [tile_rows(n * spec.group_size, spec.head_dim) for n, spec in calls]
    return table


def one_or_two(frame: pd.DataFrame) -> pd.DataFrame:
    """A mixed batch in one call over the same in two (`IN_TWO`): decode by itself, then the chunk.

    A row per `kernel` that was measured and batch; `ratio` above 1: one call is slower.
    """
    rows = decode_rows(frame, timer=EAGER)
    us = rows.set_index(["case", "round", "backend"]).run_us
    tables = []
    for kernel, one in rows[rows.case.isin(list(MIXED))].groupby("backend"):
        summed = []
        for case, number in zip(one.case, one["round"], strict=True):
            parts = zip(MIXED[case], IN_TWO[str(kernel)], strict=True)
            summed.append(sum(us.get((part, number, name), np.nan) for part, name in parts))
        two = one.assign(backend="two calls", run_us=summed).dropna(subset="run_us")
        table = frames.over(pd.concat([one, two]), str(kernel), "two calls")
        tables.append(table.assign(kernel=kernel))
    return pd.concat(tables, ignore_index=True)


def ratio_chart(frame: pd.DataFrame) -> charts.Figure:
    """fa2 / fa3 of every shape, a row per mode; right of 1 fa3 is faster. Bars: 95 % intervals."""
    table = over(mode_rows(frame), FA2, FA3)
    groups = [group for group in GROUPS if group in set(table.group)]
    aside = [charts.spread(part.index, 0.7) for _, part in table.groupby("group", observed=True)]
    table["place"] = table.group.astype(object).map(groups.index) + np.concatenate(aside)
    size = (8.5, 1.3 + 0.6 * len(groups))
    figure, (axis,) = charts.panels(["Which FlashInfer kernel is faster, by mode"], size, frame)
    looks = style.looks(sorted(set(table.heads)))
    charts.dots(axis, table, "ratio", "place", by="heads", looks=looks, interval="x")
    how = ["eager" if group in MANY else "in a graph" for group in groups]
    charts.categories(axis, "y", (f"{g}\n({h})" for g, h in zip(groups, how, strict=True)))
    axis.axvline(1, **style.RULE)
    axis.set_xlabel("run time of fa2 / run time of fa3   (right of 1: fa3 is faster)")
    style.log_axes(axis, "x")
    axis.legend(title="heads", loc="lower left", frameon=True)
    return figure
