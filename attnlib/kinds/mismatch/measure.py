"""Failure injection: metadata that does not fit its attention call, each case in its own process.

Without the guard a case may read and write out of bounds, and its process may die.

| outcome | meaning |
|---|---|
| refused by the guard | ValueError before the launch, which names the field |
| refused by the library | its own check of the tensor's length |
| crashed | a CUDA error: the process is lost |
| wrong | outside the oracle's budget, or not finite |
| harmless | within the budget |
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...core import backends
from ...core.backends.flash_attn3 import attend, facts_of, launch
from ...core.batch import DecodeBatch, PagedKV
from ...core.extend import ExtendBatch
from ...core.schedule.facts import SchedulerFacts
from ...core.schedule.flash_attn3 import ask_library, precompute
from ...core.schedule.splits import max_words, num_words
from ...core.spec import require_word
from ...measure.timer import run_timer
from ..base import Subject, timed_fields
from ..check import Judge
from ..decode.measure import build_workload
from ..extend.measure import attend_extend
from ..item import Item
from .case import MISMATCHES, Mismatch, MismatchCase, metadata_facts

STATUS = {
    "refused by the guard": "refused",
    "refused by the library": "error",
    "wrong": "incorrect",
}
"""Outcome of `run_one` -> status of the record; a crash is an error that poisons."""


class MismatchSubject(Subject):
    """Runs the mismatch that an item's case names; only a harmless one is timed."""

    def measure(self, item: Item[MismatchCase]) -> dict[str, Any]:
        """Run one attention call with metadata of another call."""
        if missing := backends.unavailable("flash-attn-3"):
            return {"status": "refused", "reason": missing}
        result = run_one(item.case.name, guard=item.case.guard, device=self.bench.device)
        if result["outcome"] == "crashed":
            raise RuntimeError(f"CUDA error: {result['reason']}")
        fields = {
            "oracle_error": result["relative_error"],
            "oracle_budget": result["budget"],
            "reported_backend": result["outcome"],
        }
        splits = f"splits {result['splits_in_metadata']}, right {result['splits_right']}"
        if result["outcome"] != "harmless":
            reason = result["reason"] or f"{splits}, cap of the call {result['cap_of_call']}"
            return {"status": STATUS[result["outcome"]], "reason": reason, **fields}
        timing = run_timer(item.timer)(result["call"])
        return timed_fields(timing, kernels=(), work_per_call=0.0) | {"reason": splits, **fields}


@dataclass(frozen=True)
class _Call:
    """The attention call: `q` [bs * q_len, heads, head_dim], cache, batch and facts."""

    q: torch.Tensor
    kv: PagedKV
    batch: DecodeBatch
    facts: SchedulerFacts
    q_len: int


def run_one(name: str, *, guard: bool, device: str = "cuda") -> dict[str, Any]:
    """Run one case and check it against the oracle: `outcome`, `reason`, `relative_error`, splits.

    `splits_in_metadata`, `splits_right` and `cap_of_call` are as in `Splits`. Where there is an
    output, `call` computes it again. Raises ValueError listing the names of the cases.
    """
    by_name = {case.name: case for case in MISMATCHES}
    require_word("name", name, by_name)
    mismatch = by_name[name]
    call = _build_call(mismatch, device)
    made_for = metadata_facts(mismatch, call.facts)
    lens = _metadata_lengths(mismatch, call, made_for)
    words = ask_library(made_for, lens)
    right = ask_library(call.facts, call.batch.seq_lens)
    result = {
        "splits_in_metadata": int(words[: made_for.batch_size].max()),
        "splits_right": int(right[: call.facts.batch_size].max()),
        "cap_of_call": call.facts.split_cap,
        "relative_error": None,
        "budget": None,
        "reason": "",
    }
    q_lens = torch.full_like(call.batch.seq_lens_cpu, call.q_len)
    oracle = Judge(attend_extend, call.q, call.kv, ExtendBatch.build(call.batch, q_lens))
    if guard:
        attention = partial(_guarded, mismatch, call, made_for, lens)
    else:
        attention = partial(_unguarded, mismatch, call, words)
    try:
        verdict = oracle.check(attention())
    except (ValueError, RuntimeError) as error:
        return result | _refusal(error)
    return result | {
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


def _metadata_lengths(mismatch: Mismatch, call: _Call, made_for: SchedulerFacts) -> torch.Tensor:
    lens = call.batch.seq_lens
    if mismatch.metadata_tokens or mismatch.call_tokens:
        lens = torch.full_like(lens, mismatch.metadata_tokens or mismatch.case.kv_len)
    return lens.repeat(-(-made_for.batch_size // len(lens)))[: made_for.batch_size].contiguous()


def _unguarded(mismatch: Mismatch, call: _Call, words: torch.Tensor) -> torch.Tensor:
    if mismatch.in_buffer:
        buffer = words.new_zeros(num_words(call.facts))
        buffer[: len(words)] = words
        words = buffer
    return launch(call.q, call.kv, call.batch, call.facts, words=words)


def _guarded(
    mismatch: Mismatch, call: _Call, made_for: SchedulerFacts, lens: torch.Tensor
) -> torch.Tensor:
    buffer = lens.new_zeros(max_words(call.facts.batch_size)) if mismatch.in_buffer else None
    metadata = precompute(made_for, lens, out=buffer)
    return attend(call.q, call.kv, call.batch, metadata=metadata, **mismatch.call)


def _refusal(error: ValueError | RuntimeError) -> dict[str, str]:
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, ValueError):
        return {"outcome": "refused by the guard", "reason": reason}
    lost = "CUDA error" in reason or type(error).__name__ == "AcceleratorError"
    return {"outcome": "crashed" if lost else "refused by the library", "reason": reason}
