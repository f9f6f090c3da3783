"""Every mode in which SGLang calls FlashInfer, by fa2 and fa3, as pull request 18364 pinned it.

Engines capture decode, verification, draft extension and block diffusion in CUDA graphs and run
prefill eagerly; so do the grids. Eager items are timed by the profiler: kernel times, without the
gaps between launches. Times of the two timers are never divided by each other.

In rows of `mode_rows` `backend` is a short name: fa2 and fa3 are FlashInfer's, whichever wrapper a
mode uses, `library` is FlashAttention-3 itself. `group` is the mode, with paged prefill split by
whether the cache held a prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pandas as pd

from ..core.spec import CUSTOM_MASKS, AttnSpec
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.extend.case import ExtendCase
from ..run import frame as frames
from ..run.figures import charts, style
from ..run.frame import decode_rows
from ..run.study import Grid, Study

Heads = tuple[int, int]
Ints = tuple[int, ...]
Extends = tuple[ExtendCase, ...]
LLAMA = (32, 8)
TP8 = (8, 1)
QWEN = (16, 2)
"""Heads of Llama-3.1-8B, of Llama-3.1-70B on one GPU of eight, of Qwen3-32B on one of four."""
MOST_FLOPS = 4e12
"""A longer call would take 10 ms or more, whatever the kernel."""
MOST_KV_VECTORS = 2**23
"""Tokens x KV heads x requests: 4 GiB of K and V, of which fa3 reads each once a query head."""


def _cached(
    heads: Heads,
    batch: int,
    kv_len: int,
    page_size: int = 1,
) -> DecodeCase:
    return DecodeCase(AttnSpec(*heads, 128, page_size), batch, kv_len)


def _paged(
    heads: Heads,
    q_lens: Ints,
    batches: Ints,
    page_size: int = 1,
) -> Extends:
    """Paged prefill, first without and then with 8,192 tokens before the queries."""
    cases = []
    for q_len, prefix, batch in product(q_lens, (0, 8192), batches):
        cached = _cached(
            heads=heads,
            batch=batch,
            kv_len=q_len + prefix,
            page_size=page_size,
        )
        cases.append(ExtendCase(cached, "prefill_paged", q_len))
    return _not_too_long(cases)


def _ragged(
    heads: Heads,
    q_lens: Ints,
    batches: Ints,
) -> Extends:
    """Ragged prefill, which has no cache."""
    cases = []
    for q_len, batch in product(q_lens, batches):
        lengths = _cached(heads, batch, q_len)
        cases.append(ExtendCase(lengths, "prefill_ragged", q_len))
    return _not_too_long(cases)


def _not_too_long(cases: Iterable[ExtendCase]) -> Extends:
    return tuple(case for case in cases if case.cost.flops <= MOST_FLOPS)


def _few(
    mode: str,
    heads: Heads,
    q_len: int,
    batches: Ints,
    kv_lens: Ints,
    mask: str = "",
    page_size: int = 1,
) -> Extends:
    """A few queries per request, where K and V fit into memory."""
    cases = []
    for batch, kv_len in product(batches, kv_lens):
        _, kv_heads = heads
        if batch * kv_len * kv_heads <= MOST_KV_VECTORS:
            cached = _cached(heads, batch, kv_len, page_size)
            cases.append(ExtendCase(cached, mode, q_len, mask))
    return tuple(cases)


_verify = partial(_few, "target_verify", mask="causal")
_draft = partial(_few, "draft_extend", q_len=5)
_block = partial(_few, "dllm_extend", q_len=32)

BATCHES = (1, 32, 128)
FEWER = (1, 32)
CONTEXTS = (1024, 8192, 32768)
USUAL = (8192,)

PREFILLS = _paged(
    LLAMA,
    q_lens=(128, 512, 2048, 8192),
    batches=(1, 8),
)
OTHER_PREFILLS = (
    *_paged(
        TP8,
        q_lens=(128, 2048, 8192),
        batches=(1, 8),
    ),
    *_paged(
        QWEN,
        q_lens=(512, 2048),
        batches=(1,),
    ),
    *_paged(
        LLAMA,
        q_lens=(128, 2048),
        batches=(1,),
        page_size=16,
    ),
)
RAGGED = _ragged(
    LLAMA,
    q_lens=(512, 2048, 8192),
    batches=(1, 8),
)
OTHER_RAGGED = (
    *_ragged(
        TP8,
        q_lens=(512, 8192),
        batches=(1, 8),
    ),
    *_ragged(
        QWEN,
        q_lens=(2048,),
        batches=(1,),
    ),
)
VERIFIES = (
    *_verify(LLAMA, 4, BATCHES, CONTEXTS),
    *_verify(LLAMA, 8, BATCHES, USUAL),
)
OTHER_VERIFIES = (
    *_verify(TP8, 4, BATCHES, CONTEXTS),
    *_verify(QWEN, 4, FEWER, USUAL),
    *_verify(LLAMA, 4, FEWER, USUAL, page_size=16),
)
LIVE_VERIFIES = _verify(LLAMA, 4, (32,), CONTEXTS)
"""Of `VERIFIES`, what live notebooks measure."""
MASKED = _few(
    "target_verify",
    LLAMA,
    8,
    BATCHES,
    USUAL,
    mask="chain",
)
DRAFTS = _draft(
    LLAMA,
    batches=BATCHES,
    kv_lens=(1024, 8192),
)
OTHER_DRAFTS = _draft(TP8, batches=BATCHES, kv_lens=USUAL)
BLOCKS = _block(
    LLAMA,
    batches=(1, 8, 32),
    kv_lens=(1024, 8192),
)
OTHER_BLOCKS = _block(TP8, batches=FEWER, kv_lens=USUAL)
DECODES = (
    _cached(LLAMA, 1, 8192),
    _cached(LLAMA, 32, 8192),
    _cached(LLAMA, 128, 8192),
    _cached(TP8, 1, 8192),
    _cached(TP8, 32, 8192),
    _cached(TP8, 128, 8192),
)

EAGER_PREFILLS = (*PREFILLS, *RAGGED)
IN_GRAPHS = (*VERIFIES, *DRAFTS, *BLOCKS)
PROMISES = (*VERIFIES, *OTHER_VERIFIES, *BLOCKS)
"""Calls with equally many queries per request: `uniform_q_len` of FlashInfer 0.7.2.post1."""


def _every(step: int, cases: Extends) -> Extends:
    """A sample of the cases, to be measured twice (A/A)."""
    return cases[::step]


def _mixed(
    requests: int,
    tokens: int,
) -> tuple[ExtendCase, tuple[DecodeCase, ExtendCase]]:
    """A batch of decoding requests and, last, a chunk of a prompt; and both of them apart."""
    decodes = _cached(
        heads=LLAMA,
        batch=requests,
        kv_len=8192,
        page_size=16,
    )
    alone = _cached(
        heads=LLAMA,
        batch=1,
        kv_len=8192,
        page_size=16,
    )
    lengths = ["8192"] * (requests + 1)
    queries = ["1"] * requests + [str(tokens)]
    batch = replace(
        decodes,
        batch_size=requests + 1,
        lengths="+".join(lengths),
    )
    one = ExtendCase(
        batch,
        "prefill_paged",
        tokens,
        q_lengths="+".join(queries),
    )
    chunk = ExtendCase(alone, "prefill_paged", tokens)
    return one, (decodes, chunk)


_SIZES = product((4, 8, 16, 32), (128, 512, 2048))
MIXED = dict(_mixed(requests, tokens) for requests, tokens in _SIZES)
"""Mixed batches, whose contexts are all equal -> the decode and the chunk apart."""
DECODING = tuple(dict.fromkeys(decodes for decodes, _ in MIXED.values()))
CHUNKS = tuple(dict.fromkeys(chunk for _, chunk in MIXED.values()))

PIN_FA2 = ("flashinfer-prefill-fa2",)
PIN_FA3 = ("flashinfer-prefill-fa3",)
BOTH = (*PIN_FA2, *PIN_FA3)
BY_LIBRARY = ("flash-attn-3-extend",)
PROMISED = ("flashinfer-prefill-fa2-uniform",)
DECODE = ("flashinfer-fa2", "flashinfer-fa3")
IN_TWO = {
    "flashinfer-prefill-fa2": ("flashinfer-fa2", "flashinfer-prefill-fa2"),
    "flashinfer-prefill-fa3": ("flashinfer-fa2", "flashinfer-prefill-fa3"),
    "flash-attn-3-extend": ("flash-attn-3-precomputed", "flash-attn-3-extend"),
    "flashinfer-batch-pod": ("flashinfer-fa2", "flashinfer-prefill-fa2"),
    "flashinfer-batch-attention-extend": ("flashinfer-fa2", "flashinfer-prefill-fa2"),
}
"""What takes a mixed batch in one call -> what decodes and what takes the chunk in two."""
ONLY_RECORDED = "flashinfer-batch-pod"
"""BatchPOD has records and no backend any more: its module compiled for minutes."""
IN_ONE = tuple(name for name in IN_TWO if name != ONLY_RECORDED)
BESIDE = tuple(dict.fromkeys(decode for decode, _ in IN_TWO.values()))
GRAPH = "graph"
EAGER = "profiler"
"""Timers of the two ways to call."""
_graph = partial(Grid, timers=(GRAPH,), rounds=4)
_eager = partial(Grid, timers=(EAGER,), rounds=4)
PINNED = "0.6.4"
NOW = ""
"""FlashInfer two weeks after SGLang pinned fa2, with `auto` repaired; and what is installed, in the
published records 0.7.2.post1, which vLLM 0.33.0 pins (SGLang 0.5.23: 0.7.2)."""
RELEASES = (PINNED, NOW)

STUDY = Study(
    name="engine_modes",
    question="In which modes and shapes is fa2 the right pin, and what does it cost elsewhere?",
    grids=(
        _eager(EAGER_PREFILLS, BOTH, releases=RELEASES),
        _eager(EAGER_PREFILLS, BY_LIBRARY),
        _eager((*OTHER_PREFILLS, *OTHER_RAGGED), BOTH),
        _graph(IN_GRAPHS, BOTH, releases=RELEASES),
        _graph(IN_GRAPHS, BY_LIBRARY),
        _graph((*OTHER_VERIFIES, *OTHER_DRAFTS, *OTHER_BLOCKS), BOTH),
        _graph(MASKED, PIN_FA2),
        _graph(DECODES, DECODE, releases=RELEASES, again=DECODE[:1]),
        _eager(_every(4, EAGER_PREFILLS), (), releases=RELEASES, again=PIN_FA2),
        _graph(_every(5, IN_GRAPHS), (), releases=RELEASES, again=PIN_FA2),
        _graph(PROMISES, (*PIN_FA2, *PROMISED, *BY_LIBRARY)),
        _graph(_every(3, PROMISES), (), again=PROMISED),
        _eager(tuple(MIXED), IN_ONE, again=PIN_FA2),
        _eager(CHUNKS, (*BOTH, *BY_LIBRARY), again=PIN_FA2),
        _eager(DECODING, BESIDE, again=BESIDE),
        Grid(LIVE_VERIFIES, BOTH, rounds=3, headline=True),
    ),
    reference_machine="nvidia-h200-e0997f6a",
)
PROMISES_ON = "nvidia-h200-f9835d78"
MIXED_ON = "nvidia-h200-8545b675"
"""The machines that published `PROMISES`, and the mixed batches (FlashInfer 0.6.13)."""

FA2 = "fa2"
FA3 = "fa3"
LIBRARY = "library"
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
    is_now = frame.release == NOW
    is_custom = frame["mask"].isin(CUSTOM_MASKS)
    frame = frame[is_now & frame.backend.isin(NAMES) & ~is_custom]
    in_graphs = decode_rows(frame, timer=GRAPH)
    eager = decode_rows(frame, timer=EAGER)
    rows = pd.concat([in_graphs, eager])
    # Decode cases have no such fields.
    usual = {
        "mode": "decode",
        "mask": "causal",
        "q_len": 1,
    }
    columns = rows.columns.union(list(usual), sort=False)
    rows = rows.reindex(columns=columns)
    rows = rows.astype(dict.fromkeys(usual, object))
    rows = rows.fillna(usual)
    is_paged = rows["mode"] == "prefill_paged"
    has_prefix = rows.q_len < rows.kv_len
    group = rows["mode"].mask(is_paged & has_prefix, PREFIX)
    rows = rows.assign(
        backend=rows.backend.map(NAMES),
        group=pd.Categorical(group, GROUPS, ordered=True),
        q_len=rows.q_len.astype(int),
    )
    usual_timer = np.where(rows.group.isin(MANY), EAGER, GRAPH)
    return rows[rows.timer == usual_timer]


def over(
    rows: pd.DataFrame,
    a: str,
    b: str,
) -> pd.DataFrame:
    """`frame.over`, timer by timer, so that no time by events meets one by the profiler."""
    parts = []
    for _, part in rows.groupby("timer"):
        parts.append(frames.over(part, a, b))
    order = ["group", "heads", "q_len", "batch_size", "kv_len"]
    return pd.concat(parts).sort_values(order, ignore_index=True)


def ratio_chart(frame: pd.DataFrame) -> charts.Figure:
    """fa2 / fa3 of every shape, a row per mode; right of 1 fa3 is faster. Bars: 95 % intervals."""
    table = over(mode_rows(frame), FA2, FA3)
    groups = [group for group in GROUPS if group in set(table.group)]
    aside = []
    for _, part in table.groupby("group", observed=True):
        aside.append(charts.spread(part.index, 0.7))
    number = table.group.astype(object).map(groups.index)
    table["place"] = number + np.concatenate(aside)
    figure, (axis,) = charts.panels(
        ["Which FlashInfer kernel is faster, by mode"],
        (8.5, 1.3 + 0.6 * len(groups)),
        frame,
    )
    charts.dots(
        axis,
        table,
        "ratio",
        "place",
        by="heads",
        looks=style.looks(sorted(set(table.heads))),
        interval="x",
    )
    names = []
    for group in groups:
        how = "eager" if group in MANY else "in a graph"
        names.append(f"{group}\n({how})")
    charts.categories(axis, "y", names)
    for row in range(1, len(groups)):
        axis.axhline(row - 0.5, color="0.85", linewidth=1)
    axis.axvline(1, **style.RULE)
    axis.set_xlabel("run time of fa2 / run time of fa3   (right of 1: fa3 is faster)")
    style.log_axes(axis, "x")
    axis.legend(title="heads", loc="lower left", frameon=True)
    return figure
