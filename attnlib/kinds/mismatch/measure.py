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
from ..base import Subject, oracle_fields, timed_fields
from ..check import Judge
from ..decode.measure import build_workload
from ..extend.measure import attend_extend
from ..item import Item
from .case import MISMATCHES, Mismatch, MismatchCase, metadata_facts, metadata_lengths


@dataclass(frozen=True)
class _Call:
    """The attention call: `q` [bs * q_len, heads, head_dim], cache, batch and facts."""

    q: torch.Tensor
    kv: PagedKV
    batch: DecodeBatch
    facts: SchedulerFacts


class MismatchSubject(Subject):
    """Runs the mismatch that an item's case names; only a harmless one is timed."""

    def measure(self, item: Item[MismatchCase]) -> dict[str, Any]:
        """Run one attention call with metadata of another call.

        `reported_backend` is the outcome. Raises ValueError listing the names of the mismatches,
        RuntimeError if the process is lost.
        """
        if missing := backends.unavailable("flash-attn-3"):
            return {"status": "refused", "reason": missing}
        by_name = {mismatch.name: mismatch for mismatch in MISMATCHES}
        require_word("name", item.case.name, by_name)
        mismatch = by_name[item.case.name]
        call = _build_call(mismatch, self.bench.device)
        made_for = metadata_facts(mismatch, call.facts)
        lens = torch.from_numpy(metadata_lengths(mismatch, made_for.batch_size))
        lens = lens.to(self.bench.device)
        words = ask_library(made_for, lens)
        right = ask_library(call.facts, call.batch.seq_lens)
        in_metadata = int(words[: made_for.batch_size].max())
        splits = f"splits {in_metadata}, right {int(right[: call.facts.batch_size].max())}"
        run = partial(_unguarded, mismatch, call, words)
        if item.case.guard:
            run = partial(_guarded, mismatch, call, made_for, lens)
        q_lens = torch.full_like(call.batch.seq_lens_cpu, call.facts.max_seqlen_q)
        oracle = Judge(attend_extend, call.q, call.kv, ExtendBatch.build(call.batch, q_lens))
        try:
            verdict = oracle.check(run())
        except (ValueError, RuntimeError) as error:
            return _refused(error)
        fields = oracle_fields(verdict)
        if not verdict.passed:
            reason = f"{splits}, cap of the call {call.facts.split_cap}"
            return fields | {"reason": reason, "reported_backend": "wrong"}
        timed = timed_fields(run_timer(item.timer)(run), kernels=(), work_per_call=0.0)
        return timed | fields | {"reason": splits, "reported_backend": "harmless"}


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
    return _Call(q, work.kv, batch, facts_of(batch, **mismatch.call))


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


def _refused(error: ValueError | RuntimeError) -> dict[str, Any]:
    """The fields of a call that was refused; RuntimeError if the process is lost."""
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, ValueError):
        return {"status": "refused", "reported_backend": "refused by the guard", "reason": reason}
    if "CUDA error" in reason or type(error).__name__ == "AcceleratorError":
        raise RuntimeError(f"CUDA error: {reason}") from error
    return {"status": "error", "reported_backend": "refused by the library", "reason": reason}
