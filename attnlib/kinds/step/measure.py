"""A decode step's attention, layer after layer: FlashAttention-3's schedule in each, or once.

Layers use copies of the cache in turn, so that twice the L2 is read between two uses of a copy.
"""

from functools import partial
from typing import Any

import torch

from ...core import backends
from ...core.backends.flash_attn3 import attend, facts_of, reported
from ...core.batch import PagedKV
from ...core.schedule.flash_attn3 import precompute
from ...core.spec import require_word
from ...measure.timer import cold_copies, run_timer
from ..base import Subject
from ..call import cache_copies, timed_call
from ..decode.measure import Oracle, build_workload
from ..item import Item
from .case import StepCase

EACH, ONCE = BACKENDS = ("flash-attn-3-step-each", "flash-attn-3-step-once")


class StepSubject(Subject):
    """Measures one way of making a step's schedule, attention included."""

    _case: StepCase | None = None

    def measure(self, item: Item[StepCase]) -> dict[str, Any]:
        """Check the last layer's output by the oracle, then trace and time the step."""
        case, backend = item.case, item.backend
        require_word("backend of a step", backend, BACKENDS)
        library, spec = "flash-attn-3", case.decode.spec
        if reason := backends.unavailable(library) or backends.unsupported(library, spec):
            return {"status": "refused", "reason": reason}
        timer = run_timer(item.timer)
        self._prepare(case)
        work = float(case.decode.cost.io_bytes * case.layers)
        step = partial(self._run_layers, backend, case.layers)
        timed = partial(timer, step)
        return timed_call(step, self._oracle, reported(), timer=timed, work_per_call=work)

    def _prepare(self, case: StepCase) -> None:
        if case == self._case:
            return
        self._case = None
        self._caches: list[PagedKV] = []
        self._work = work = build_workload(case.decode, device=self.bench.device)
        self._oracle = Oracle(work.q, work.kv, work.batch)
        l2_bytes = int(self.bench.machine["l2_mib"] * 2**20)
        copies = min(case.layers, cold_copies(case.decode.cost.kv_bytes, l2_bytes))
        self._caches = cache_copies(work.kv, copies)
        self._case = case

    def _run_layers(self, backend: str, layers: int) -> torch.Tensor:
        batch, metadata = self._work.batch, None
        if backend == ONCE:
            metadata = precompute(facts_of(batch), batch.seq_lens)
        for layer in range(layers):
            cache = self._caches[layer % len(self._caches)]
            out = attend(self._work.q, cache, batch, metadata=metadata)
        return out
