"""A decode step's attention, layer after layer: FlashAttention-3's schedule in each, or once.

Layers use copies of the cache in turn, so that twice the L2 is read between two uses of a copy.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...core import backends
from ...core.backends.flash_attn3 import attend, facts_of
from ...core.batch import PagedKV
from ...core.schedule.flash_attn3 import precompute
from ...core.schedule.library import supplier
from ...core.spec import require_word
from ...measure.calls.base import Subject
from ...measure.calls.call import cache_copies, timed_call
from ...measure.calls.check import Judge
from ...measure.calls.decode import measure as decode
from ...measure.calls.form import Item
from ...measure.calls.inputs import Workload
from ...measure.timer import cold_copies, run_timer
from .case import EACH, ONCE, StepCase


class StepSubject(Subject):
    """Measures one way of making a step's schedule, attention included."""

    def measure(self, item: Item[StepCase]) -> dict[str, Any]:
        """Check the last layer's output by the oracle, then trace and time the step."""
        case = item.case
        backend = item.backend
        require_word("backend of a step", backend, (EACH, ONCE))
        library = "flash-attn-3"
        reason = backends.unavailable(library)
        reason = reason or backends.unsupported(library, case.decode.spec)
        if reason:
            return {"status": "refused", "reason": reason}
        timer = run_timer(item.timer)
        work, caches, judge = self.prepared(case)
        step = partial(run_layers, backend, work, caches, case.layers)
        return timed_call(
            step,
            judge.check,
            timer=partial(timer, step),
            work_per_call=float(case.decode.cost.io_bytes * case.layers),
            gpu=self.bench.device == "cuda",
            reported=f"{library} ({supplier()})",
        )

    def prepare(self, case: StepCase) -> tuple[Workload, list[PagedKV], Judge]:
        """The tensors of a layer, the copies of its cache, and their judge."""
        work = decode.build_workload(case.decode, device=self.bench.device)
        l2_bytes = int(self.bench.machine["l2_mib"] * 2**20)
        copies = min(case.layers, cold_copies(case.decode.cost.kv_bytes, l2_bytes))
        judge = Judge(
            decode.attend,
            work.q,
            work.kv,
            work.batch,
        )
        return work, cache_copies(work.kv, copies), judge


def run_layers(
    backend: str,
    work: Workload,
    caches: Sequence[PagedKV],
    layers: int,
) -> torch.Tensor:
    """The output of the last of `layers` layers, over the caches in turn."""
    batch = work.batch
    metadata = None
    if backend == ONCE:
        metadata = precompute(facts_of(batch), batch.seq_lens)
    for layer in range(layers):
        cache = caches[layer % len(caches)]
        out = attend(
            q=work.q,
            kv=cache,
            batch=batch,
            metadata=metadata,
        )
    return out
