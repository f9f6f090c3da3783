"""Plans of FlashInfer's fa2: an attention call by a plan of any chunk, and planning alone.

| backend | what is timed |
|---|---|
| fa2-chunk | one attention call by the plan of the case's chunk |
| fa2-plan | one launch that writes a plan's words and the page arrays |
| fa2-plan-alone | the same, started after its neighbour has ended |
| fa2-plan-words | the words alone |

An attention call is held to the oracle, every word of a plan to the NumPy twin's and of the page
arrays to the metadata oracle's. Chunks of one call share its tensors, wrapper and judge.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...core import backends
from ...core.backends.base import Backend, Plan
from ...core.fa2.choice import PlanShape
from ...core.fa2.kernel import build_fa2_plan
from ...core.fa2.words import WORD, Layout, plan_words
from ...core.metadata.launch import without_overlap
from ...measure.timer import ROTATING, run_timer
from ...measure.trace import trace_kernels
from ..base import Bench, timed_fields
from ..call import Workload, timed_call
from ..check import Judge
from ..decode.case import DecodeCase
from ..decode.measure import DecodeSubject
from ..extend.measure import ExtendSubject
from ..item import Item
from ..metadata import oracle
from ..metadata.case import MetadataCase
from ..metadata.measure import POISON
from ..metadata.workload import build_request_pool
from .case import PlanCase

CHUNK, ALONE, WORDS = "fa2-chunk", "fa2-plan-alone", "fa2-plan-words"
BACKENDS = (CHUNK, "fa2-plan", ALONE, WORDS)
PAGES = ("kv_indptr", "kv_indices", "kv_last_page_len")


@dataclass(frozen=True)
class _Call:
    """An attention call that was planned once, and its judge."""

    work: Workload[Any]
    judge: Judge
    backend: Backend
    plan: Plan
    io_bytes: float


class PlanSubject:
    """Measures plans; keeps the tensors of the last attention call for the next chunk."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._call: _Call | None = None

    def measure(self, item: Item[PlanCase]) -> dict[str, Any]:
        """Check, time and trace a call by a plan, or the planning."""
        if item.backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise ValueError(f"backend must be one of {known} for a plan, got {item.backend!r}")
        self.bench.require_release("flashinfer-python", item.release)
        if item.timer in ROTATING:
            raise ValueError(f"timer must not need copies of the cache, got {item.timer!r}")
        timer = run_timer(item.timer)
        if item.backend == CHUNK:
            return self._attention(item.case, timer)
        with without_overlap() if item.backend == ALONE else nullcontext():
            return self._planning(item, timer)

    def _attention(self, case: PlanCase, timer: Callable[..., Any]) -> dict[str, Any]:
        name = "flashinfer-fa2-planned" if case.q_len == 1 else "flashinfer-prefill-fa2-planned"
        reason = backends.unavailable(name)
        if reason := reason or backends.unsupported(name, case.spec, mask="causal"):
            return {"status": "refused", "reason": reason}
        call = self._prepared(case, name)
        batch = getattr(call.work.batch, "paged", call.work.batch)
        call.plan.state[-1].plan_with(batch.seq_lens_cpu, case.chunk)
        run = partial(call.backend.run, call.work.q, call.work.kv, call.plan)
        told = (run, call.judge, call.plan.reported_backend)
        return timed_call(*told, timer=partial(timer, run), work_per_call=call.io_bytes)

    def _prepared(self, case: PlanCase, name: str) -> _Call:
        if self._call is None or self._call.work.case != case.call:
            self._call = None
            subject: Any = DecodeSubject if isinstance(case.call, DecodeCase) else ExtendSubject
            device = self.bench.device
            work = subject.build(case.call, device=device)
            judge = Judge(subject.attend, work.q, work.kv, work.batch)
            backend = backends.create(
                name, case.spec, mask="causal", device=device, cuda_graph=True
            )
            moved = float(subject.cost(case.call).io_bytes)
            self._call = _Call(work, judge, backend, backend.plan(work.batch), moved)
        return self._call

    def _planning(self, item: Item[PlanCase], timer: Callable[..., Any]) -> dict[str, Any]:
        num_sms, device = self.bench.machine["num_sms"], self.bench.device
        planning = _Planning.of(item.case, num_sms, device, item.backend != WORDS)
        planning.run()
        wrong, rows = planning.wrong_words(), item.case.decode.batch_size
        verdict = {"oracle_error": float(wrong), "oracle_budget": 0.0, "oracle_rows": rows}
        if wrong:
            return {"status": "incorrect", "reason": f"{wrong} words differ", **verdict}
        timing = timer(planning.run)
        kernels = trace_kernels(planning.run) if self.bench.device == "cuda" else ()
        written = float(sum(tensor.nbytes for tensor in planning.outputs.values()))
        return timed_fields(timing, kernels=kernels, work_per_call=written) | verdict


@dataclass(frozen=True)
class _Planning:
    """A launch over tensors of its own, without FlashInfer: outputs start out poisoned."""

    run: Callable[[], None]
    outputs: dict[str, torch.Tensor]
    wanted: dict[str, np.ndarray]

    @classmethod
    def of(cls, case: PlanCase, num_sms: int, device: str, pages: bool) -> "_Planning":
        """Planning for `case`, with the page arrays if `pages`."""
        pool, page_size = _pool_of(case, device), case.spec.page_size
        lens = pool["seq_lens"].cpu().numpy()
        shape = PlanShape.of(case.spec, lens, num_sms, case.q_len)
        words = plan_words(shape, lens).image(Layout.of(shape).int_bytes // WORD, POISON)
        wanted = {"words": words}
        arguments: dict[str, Any] = {"seq_lens": pool["seq_lens"]}
        if pages:
            host = (tensor.cpu().numpy() for tensor in pool.values())
            most = shape.max_seq_len // page_size
            found = oracle.kv_indices(*host, page_size=page_size, max_pages=most)
            wanted |= dict(zip(PAGES, found, strict=True))
            arguments = pool | {"page_size": page_size}
        outputs = {
            name: torch.full(words.shape, POISON, dtype=torch.int32, device=device)
            for name, words in wanted.items()
        }
        run = partial(build_fa2_plan, **arguments, **outputs, shape=shape)
        return cls(run, outputs, wanted)

    def wrong_words(self) -> int:
        """Words that differ from those that are wanted."""
        pairs = ((self.outputs[name].cpu().numpy(), words) for name, words in self.wanted.items())
        return sum(int(np.count_nonzero(have != words)) for have, words in pairs)


def _pool_of(case: PlanCase, device: str) -> dict[str, torch.Tensor]:
    """Lengths of the case and a request pool: `build_request_pool` of a metadata case alike."""
    decode = case.decode
    sizes = (decode.batch_size, case.spec.page_size, decode.kv_len, decode.lengths)
    return build_request_pool(MetadataCase("kv_indices", *sizes, seed=decode.seed), device=device)
