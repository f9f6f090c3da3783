"""Plans of FlashInfer's fa2: an attention call by a plan of any chunk, and planning alone.

| backend | what is timed |
|---|---|
| fa2-chunk | one attention call by the plan of the case's chunk |
| fa2-plan | one launch that writes a plan's words and the page arrays |
| fa2-plan-alone | the same, started after its neighbour has ended |
| fa2-plan-words | the words alone |

An attention call is checked against the oracle. The chunk that a launch chooses must be within 1 %
of the NumPy twin's in predicted time; for that chunk every word must be the twin's, and the page
arrays the metadata oracle's. Chunks of one call share its tensors, wrapper and judge.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...core import backends
from ...core.backends.base import Backend, Plan
from ...core.fa2.choice import PlanShape, choose, counted, predicted_time
from ...core.fa2.kernel import build_fa2_plan
from ...core.fa2.words import WORD, PlanLayout, chunk_in, plan_words
from ...core.metadata.launch import without_overlap
from ...core.spec import require_word
from ...measure.timer import ROTATING, run_timer
from ..base import Subject
from ..call import timed_call
from ..check import Judge
from ..decode.case import DecodeCase
from ..decode.measure import DecodeSubject
from ..extend.measure import ExtendSubject
from ..inputs import Workload
from ..item import Item
from ..metadata.case import MetadataCase
from ..metadata.measure import POISON, build_call
from .case import PlanCase

CHUNK, ALONE, WORDS = "fa2-chunk", "fa2-plan-alone", "fa2-plan-words"
BACKENDS = (CHUNK, "fa2-plan", ALONE, WORDS)
MOST_APART = 0.01
"""Of predicted time, between the choices of the GPU in float32 and of its twin."""


@dataclass(frozen=True)
class _Call:
    """An attention call that was planned once, and its judge."""

    work: Workload[Any]
    judge: Judge
    backend: Backend
    plan: Plan


class PlanSubject(Subject):
    """Measures plans; keeps the tensors of the last attention call for the next chunk."""

    _call: _Call | None = None

    def measure(self, item: Item[PlanCase]) -> dict[str, Any]:
        """Check, time and trace a call by a plan, or the planning."""
        require_word("backend of a plan", item.backend, BACKENDS)
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
        return timed_call(
            run,
            call.judge,
            call.plan.reported_backend,
            timer=partial(timer, run),
            work_per_call=float(case.call.cost.io_bytes),
        )

    def _prepared(self, case: PlanCase, name: str) -> _Call:
        if self._call is None or self._call.work.case != case.call:
            self._call = None
            kind: Any = DecodeSubject if isinstance(case.call, DecodeCase) else ExtendSubject
            work, judge = kind(self.bench).workload(case.call)
            backend = backends.create(
                name, case.spec, mask="causal", device=self.bench.device, cuda_graph=True
            )
            self._call = _Call(work, judge, backend, backend.plan(work.batch))
        return self._call

    def _planning(self, item: Item[PlanCase], timer: Callable[..., Any]) -> dict[str, Any]:
        """Over tensors of its own, without FlashInfer; `build_kv_indices` takes the same pool."""
        spec, decode, device = item.case.spec, item.case.decode, self.bench.device
        sizes = (decode.batch_size, spec.page_size, decode.kv_len, decode.lengths)
        pages = build_call(MetadataCase("kv_indices", *sizes, seed=decode.seed), device)
        lens = pages.inputs["seq_lens"]
        host, num_sms = lens.cpu().numpy(), self.bench.machine["num_sms"]
        shape = PlanShape.of(spec, host, num_sms, item.case.q_len)
        words = torch.full((PlanLayout.of(shape).int_bytes // WORD,), POISON, dtype=torch.int32)
        chunk = chosen_chunk(lens, words.to(device), shape)
        outputs = {"words": words.to(device)}
        words = plan_words(shape, host, chunk).image(len(words), POISON)
        call = replace(pages, outputs=outputs, wanted={"words": [words]})
        if item.backend == WORDS:
            run = partial(build_fa2_plan, seq_lens=lens, **outputs, shape=shape)
        else:
            outputs |= pages.outputs
            call.wanted.update(pages.wanted)
            tensors = pages.inputs | outputs
            run = partial(build_fa2_plan, **tensors, shape=shape, page_size=spec.page_size)
        return call.measured(run, timer, float(sum(out.nbytes for out in outputs.values())))


def chosen_chunk(lens: torch.Tensor, words: torch.Tensor, shape: PlanShape) -> int:
    """The chunk that a launch chooses; RuntimeError where it is worse than the twin's."""
    build_fa2_plan(seq_lens=lens, words=words, shape=shape)
    host = lens.cpu().numpy()
    chunk = chunk_in(words.cpu().numpy(), PlanLayout.of(shape))
    chunks = np.array([chunk, choose(shape, host).chunk])
    times = predicted_time(shape, counted(shape, host), chunks)
    if times[0] > times[1] * (1 + MOST_APART):
        raise RuntimeError(
            f"chunk must be about as good as the twin's, {chunks[1]}, was {chunks[0]}"
        )
    return int(chunks[0])
