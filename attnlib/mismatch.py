"""Failure injection: scheduler metadata that does not fit its attention call, one case a process.

Each `Mismatch` says what the metadata is told and what the call then does. `run_one` runs it, with
the guard or past it, and judges the output against the oracle. Past the guard it may read and write
out of bounds, so the caller runs each case in a process of its own and takes its death as `died`.

| outcome | meaning |
|---|---|
| refused by the guard | ValueError before the launch, the field named |
| refused by the library | its own check of the tensor's length |
| crashed | a CUDA error: the process is lost |
| wrong | outside the oracle's budget, or not finite |
| harmless | within the budget |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .backends.fa3 import attend, facts_of, launch
from .batch import AttnSpec, DecodeBatch, DecodeCase, PagedKV
from .check import Oracle
from .metadata.scheduler import SchedulerFacts, ask_library, max_words, precompute
from .metadata.splits import layout_of
from .workload import build_workload


@dataclass(frozen=True)
class Mismatch:
    """`told` replaces facts in the metadata call; `call` holds `attend`'s own options.

    `told_tokens` and `call_tokens` set every request's length at either call. With `in_buffer`
    the words lie at the head of a zeroed buffer of the size that the call expects, as engines
    keep one for their graphs.
    """

    name: str
    what: str
    case: DecodeCase
    told: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    told_tokens: int = 0
    call_tokens: int = 0
    in_buffer: bool = False


@dataclass(frozen=True)
class _Call:
    """Inputs of the attention call: `q` [bs * q_len, heads, head_dim], cache, batch and facts."""

    q: torch.Tensor
    kv: PagedKV
    batch: DecodeBatch
    facts: SchedulerFacts
    q_len: int


def _case(heads: tuple[int, int], batch_size: int, kv_len: int, **spec: Any) -> DecodeCase:
    return DecodeCase(AttnSpec(*heads, 128, 64, **spec), batch_size, kv_len)


LONG = _case((16, 4), 1, 32768)
SHORT_MQA = _case((8, 1), 1, 1024)
EIGHT = replace(_case((8, 2), 8, 4096), lengths="ragged")
FIVE = replace(EIGHT, batch_size=5)
ROWS = _case((32, 1), 2, 4096)

MISMATCHES = (
    Mismatch("none", "nothing differs", LONG),
    Mismatch("lengths-grown", "64 tokens told, 8000 attended", _case((16, 2), 1, 8000), {}, {}, 64),
    Mismatch(
        "lengths-shrunk",
        "8000 tokens told, 64 attended",
        _case((16, 2), 1, 8000),
        call_tokens=64,
    ),
    Mismatch(
        "head-counts",
        "head counts divided by the tensor-parallel size, 4, instead of 1",
        LONG,
        {"num_qo_heads": 4, "num_kv_heads": 1},
    ),
    Mismatch(
        "cap-in-call-only", "num_splits=2 given to attention only", LONG, {}, {"num_splits": 2}
    ),
    Mismatch(
        "cap-in-metadata-only", "num_splits=64 given to the metadata", LONG, {"num_splits": 64}
    ),
    Mismatch(
        "narrower-table",
        "metadata for a table of 32768 tokens, attention over one of 1024",
        SHORT_MQA,
        {"max_seqlen_k": 32768},
    ),
    Mismatch(
        "wider-table",
        "metadata for a table of 1024 tokens, attention over one of 32768",
        replace(SHORT_MQA, kv_len=32768),
        {"max_seqlen_k": 1024},
        told_tokens=1024,
        call_tokens=1024,
    ),
    Mismatch("batch-grown", "metadata of 5 requests, attention of 8", EIGHT, {"batch_size": 5}),
    Mismatch("batch-shrunk", "metadata of 8 requests, attention of 5", FIVE, {"batch_size": 8}),
    Mismatch("batch-resized", "metadata of 3 requests, attention of 8", EIGHT, {"batch_size": 3}),
    Mismatch(
        "graph-padding",
        "metadata of 3 requests in the buffer of a graph of 8",
        EIGHT,
        {"batch_size": 3},
        in_buffer=True,
    ),
    Mismatch(
        "dtype-fp8-told", "metadata for FP8, a bf16 cache", SHORT_MQA, {"dtype": "float8_e4m3fn"}
    ),
    Mismatch(
        "dtype-bf16-told",
        "metadata for bf16, an FP8 cache",
        _case((8, 1), 1, 1024, dtype="float8_e4m3fn"),
        {"dtype": "bfloat16"},
    ),
    Mismatch(
        "head-dim",
        "metadata for head_dim 256, attention with 128",
        SHORT_MQA,
        {"head_dim": 256, "head_dim_v": 256},
        {"causal": False},
    ),
    Mismatch(
        "window",
        "metadata for a sliding window, attention without",
        EIGHT,
        {"window": (1023, 0)},
        {"causal": False},
    ),
    Mismatch("causal", "metadata without a causal mask, attention with", LONG, {"causal": False}),
    Mismatch(
        "query-length",
        "metadata for 1 query token, attention with 8",
        ROWS,
        {"max_seqlen_q": 1},
        {"q_len": 8},
    ),
    Mismatch(
        "packing",
        "metadata with pack_gqa=False, where the kernel packs regardless",
        ROWS,
        {"pack_gqa": False},
        {"q_len": 8},
    ),
    Mismatch("sm-margin", "metadata for half the SMs", LONG, {"sm_margin": 66}),
)


def find(name: str) -> Mismatch:
    """The case called `name`; raises ValueError listing the names there are."""
    by_name = {case.name: case for case in MISMATCHES}
    if name not in by_name:
        raise ValueError(f"name must be one of {', '.join(by_name)}, got {name!r}")
    return by_name[name]


def run_one(name: str, *, guard: bool, device: str = "cuda") -> dict[str, Any]:
    """Run one case and judge it: `outcome`, `reason`, `relative_error`, and the splits.

    `splits_in_metadata` and `splits_right` are the most splits of any request that the metadata
    holds and should hold. `cap_of_call` is what the attention call allocates for: it `overruns`
    its buffers where the metadata holds more, whatever becomes of the output. Where an output came
    back, `call` makes it again.
    """
    mismatch = find(name)
    call = _build_call(mismatch, device)
    told = _told_facts(mismatch, call.facts)
    told_lens = _told_lengths(mismatch, call, told)
    words = ask_library(told, told_lens)
    found = {
        "name": name,
        "what": mismatch.what,
        "guard": guard,
        "splits_in_metadata": _most_splits(words, told),
        "splits_right": _most_splits(ask_library(call.facts, call.batch.seq_lens), call.facts),
        "cap_of_call": call.facts.split_cap,
        "overruns": 1 < call.facts.split_cap < _most_splits(words, told),
        "relative_error": None,
        "budget": None,
        "reason": "",
    }
    oracle = Oracle(call.q, call.kv, call.batch.query_rows(call.q_len))
    attention = partial(_past_the_guard, mismatch, call, words)
    if guard:
        attention = partial(_guarded, mismatch, call, told, told_lens)
    try:
        verdict = oracle.check(attention())
    except (ValueError, RuntimeError) as error:
        return found | _refusal(error)
    return found | {
        "outcome": "harmless" if verdict.passed else "wrong",
        "relative_error": verdict.error if math.isfinite(verdict.error) else None,
        "budget": verdict.budget,
        "call": attention,
    }


def _build_call(mismatch: Mismatch, device: str) -> _Call:
    work = build_workload(mismatch.case, device=device)
    q_len = mismatch.call.get("q_len", 1)
    batch, q = work.batch, work.q
    if mismatch.call_tokens:
        lens = torch.full_like(batch.seq_lens_cpu, mismatch.call_tokens)
        batch = DecodeBatch.build(batch.spec, lens, batch.page_table)
    if q_len > 1:
        rows = replace(mismatch.case, batch_size=batch.batch_size * q_len, kv_len=1)
        q = build_workload(rows, device=device).q
    return _Call(q, work.kv, batch, facts_of(batch, **mismatch.call), q_len)


def _told_facts(mismatch: Mismatch, facts: SchedulerFacts) -> SchedulerFacts:
    # The cap goes to one call only, unless the case tells it to the metadata.
    own = {"num_splits": 0} if "num_splits" in mismatch.call else {}
    return replace(facts, **{**own, **mismatch.told})


def _told_lengths(mismatch: Mismatch, call: _Call, told: SchedulerFacts) -> torch.Tensor:
    lens = call.batch.seq_lens
    if mismatch.told_tokens:
        lens = torch.full_like(lens, mismatch.told_tokens)
    elif mismatch.call_tokens:
        lens = torch.full_like(lens, mismatch.case.kv_len)
    rounds = -(-told.batch_size // len(lens))
    return lens.repeat(rounds)[: told.batch_size].contiguous()


def _most_splits(words: torch.Tensor, facts: SchedulerFacts) -> int:
    return int(words[: facts.batch_size].max())


def _placed(mismatch: Mismatch, call: _Call, words: torch.Tensor) -> torch.Tensor:
    if not mismatch.in_buffer:
        return words
    buffer = words.new_zeros(layout_of(call.facts).size)
    buffer[: len(words)] = words
    return buffer


def _past_the_guard(mismatch: Mismatch, call: _Call, words: torch.Tensor) -> torch.Tensor:
    placed = _placed(mismatch, call, words)
    return launch(call.q, call.kv, call.batch, call.facts, words=placed)


def _guarded(
    mismatch: Mismatch, call: _Call, told: SchedulerFacts, lens: torch.Tensor
) -> torch.Tensor:
    buffer = lens.new_zeros(max_words(call.facts.batch_size)) if mismatch.in_buffer else None
    metadata = precompute(told, lens, out=buffer)
    return attend(call.q, call.kv, call.batch, metadata=metadata, **mismatch.call)


def _refusal(error: ValueError | RuntimeError) -> dict[str, str]:
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, ValueError):
        return {"outcome": "refused by the guard", "reason": reason}
    lost = "CUDA error" in reason or type(error).__name__ == "AcceleratorError"
    return {"outcome": "crashed" if lost else "refused by the library", "reason": reason}
