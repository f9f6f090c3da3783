"""A decode step's attention, layer after layer, with the metadata made in one way or another.

| backend | what a step launches before and in its layers |
|---|---|
| flash-attn-3-step-each | FlashAttention-3 prepares its schedule in every layer |
| flash-attn-3-step-once | the schedule once, then the layers |
| flash-attn-3-step-eager | lengths and page table op by op, the schedule once, then the layers |
| flash-attn-3-step-fused | the same with the fused kernel |
| flash-attn-3-step-one-launch | metadata and schedule in one kernel, then the layers |
| flash-attn-3-two-launches | only the metadata of flash-attn-3-step-fused, no layer |
| flash-attn-3-one-launch | only the metadata of flash-attn-3-step-one-launch, no layer |

Layers use copies of the cache in turn, so that twice the L2 is read between two uses of a copy.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...core import backends
from ...core.backends.flash_attn3 import attend, facts_of, reported
from ...core.batch import DecodeBatch, PagedKV
from ...core.metadata.decode import build_decode_metadata
from ...core.metadata.step import build_step_metadata
from ...core.schedule.flash_attn3 import SchedulerMetadata, precompute, reserve
from ...core.spec import require_word
from ...measure.timer import cold_copies, run_timer
from ..base import Subject
from ..call import cache_copies, timed_call
from ..decode.measure import Oracle, build_workload
from ..item import Item
from ..metadata import eager
from .case import StepCase

BUILDERS = {
    "flash-attn-3-step-eager": eager.build_decode_metadata,
    "flash-attn-3-step-fused": build_decode_metadata,
}
ONE_LAUNCH = "flash-attn-3-step-one-launch"
ALONE = {
    "flash-attn-3-two-launches": "flash-attn-3-step-fused",
    "flash-attn-3-one-launch": ONE_LAUNCH,
}
"""Backend that times the metadata alone -> the step of that metadata, which the oracle checks."""
BACKENDS = (
    "flash-attn-3-step-each",
    "flash-attn-3-step-once",
    *BUILDERS,
    ONE_LAUNCH,
    *ALONE,
)
Prepare = Callable[[], SchedulerMetadata | None]


class StepSubject(Subject):
    """Measures one way of making a step's metadata, attention included."""

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
        batch, prepare = self._prepared(ALONE.get(backend, backend))
        step = partial(self._run_layers, batch, prepare, case.layers)
        timed: Callable[[], object] = prepare if backend in ALONE else step
        return timed_call(
            step,
            self._oracle,
            reported(),
            timer=partial(timer, timed),
            traced=timed,
            work_per_call=work,
        )

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

    def _run_layers(self, batch: DecodeBatch, prepare: Prepare, layers: int) -> torch.Tensor:
        metadata = prepare()
        for layer in range(layers):
            cache = self._caches[layer % len(self._caches)]
            out = attend(self._work.q, cache, batch, metadata=metadata)
        return out

    def _prepared(self, backend: str) -> tuple[DecodeBatch, Prepare]:
        """The buffers that a step's layers read, and what a step does before them."""
        if backend == "flash-attn-3-step-each":
            return self._work.batch, lambda: None
        facts = facts_of(self._work.batch)
        if backend == "flash-attn-3-step-once":
            return self._work.batch, partial(precompute, facts, self._work.batch.seq_lens)
        batch, arguments = over_own_buffers(self._work.batch)
        if backend == ONE_LAUNCH:
            scheduler = reserve(facts, batch.seq_lens.device)
            build = partial(build_step_metadata, **arguments, scheduler=scheduler)
            return batch, partial(_after, build, lambda: scheduler)
        build = partial(BUILDERS[backend], **arguments)
        return batch, partial(_after, build, partial(precompute, facts, batch.seq_lens))


def _after(build: Callable[[], None], schedule: Prepare) -> SchedulerMetadata | None:
    build()
    return schedule()


def over_own_buffers(batch: DecodeBatch) -> tuple[DecodeBatch, dict[str, Any]]:
    """`batch` over empty buffers, and the arguments that fill them from a request pool."""
    page_size, width = batch.spec.page_size, batch.page_table.shape[1]
    offsets = torch.arange(page_size, device=batch.page_table.device, dtype=torch.int32)
    slots = batch.page_table[:, :, None] * page_size + offsets
    seq_lens, page_table = torch.zeros_like(batch.seq_lens), torch.zeros_like(batch.page_table)
    return replace(batch, seq_lens=seq_lens, page_table=page_table), {
        "seq_lens": batch.seq_lens.long(),
        "req_pool_indices": torch.arange(batch.batch_size, device=slots.device),
        "req_to_token": slots.view(batch.batch_size, width * page_size),
        "cache_seqlens": seq_lens,
        "cu_seqlens_k": torch.zeros_like(batch.kv_indptr),
        "page_table": page_table,
        "page_size": page_size,
        "max_pages": width,
    }
