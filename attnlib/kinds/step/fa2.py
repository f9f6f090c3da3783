"""A decode step of an engine that runs FlashInfer's fa2: planned by the library, or on the GPU.

| backend | what a step does for lengths that lie on the GPU |
|---|---|
| fa2-step-copied | copies them to the host, plans there, replays the layers |
| fa2-step-host | the same without the copy: the engine knows them on the host |
| fa2-step-planned | replays the layers, and before them, in the same graph, our planner's launch |

The layers lie in one CUDA graph. For the library, page indices are written on the GPU as engines
do, in one launch, and page sums on the host. `eager` times steps in a row: the host may run ahead
of the GPU, unless it waits for the lengths. `plan_us` is what the host does before a replay.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ...core import backends
from ...core.batch import PagedKV
from ...core.metadata.kv_indices import build_kv_indices
from ...measure.timer import capture, warm_up
from ..decode.case import DecodeCase
from ..inputs import Workload

COPIED, HOST, PLANNED = "fa2-step-copied", "fa2-step-host", "fa2-step-planned"
BACKENDS = dict.fromkeys((COPIED, HOST), "flashinfer-fa2") | {PLANNED: "flashinfer-fa2-planned"}
"""Way of making a step -> the attention backend of its layers."""
SAMPLE_US = 40_000.0
"""Steps in a row last so long: the host's work before the first, which nothing hides, is 1 %."""


class EngineStep:
    """One way of making a step over `caches`, which its `layers` take in turns.

    `pool` holds `req_pool_indices` [bs] and `req_to_token` [bs, tokens] of the same pages.
    """

    def __init__(
        self,
        name: str,
        work: Workload[DecodeCase],
        caches: list[PagedKV],
        layers: int,
        pool: dict[str, torch.Tensor],
    ) -> None:
        batch = work.batch
        self.name, self.work, self.caches, self.layers = name, work, caches, layers
        self.pool, self.lens = pool, batch.seq_lens.clone()
        self.out = torch.empty_like(work.q)
        self._arrays = {
            arr: torch.zeros_like(getattr(batch, arr))
            for arr in ("kv_indptr", "kv_indices", "kv_last_page_len")
        }
        device, spec = str(batch.seq_lens.device), batch.spec
        self._backend = backends.create(BACKENDS[name], spec, device=device, cuda_graph=True)
        self.plan = self._backend.plan(batch)
        self.replay: Callable[[], object] = self._layers
        if batch.seq_lens.is_cuda:
            warm_up(self._layers)
            self.replay = capture([self._layers]).replay

    def __call__(self) -> torch.Tensor:
        """One step; the last layer's output."""
        self.prepare()
        self.replay()
        return self.out

    def prepare(self) -> None:
        """What the host does before it replays the layers."""
        if self.name == PLANNED:
            return
        batch = self.work.batch
        page_size, columns = batch.spec.page_size, batch.page_table.shape[1]
        sizes = {"page_size": page_size, "max_pages": columns}
        build_kv_indices(seq_lens=self.lens, **self.pool, **self._arrays, **sizes)
        lens = self.lens.cpu() if self.name == COPIED else batch.seq_lens_cpu
        pages = (lens + (page_size - 1)) // page_size
        sums = torch.zeros(len(lens) + 1, dtype=torch.int32)
        torch.cumsum(pages, 0, out=sums[1:])
        on_host = replace(
            batch,
            kv_indptr=sums,
            kv_indices=self._arrays["kv_indices"][: int(sums[-1])],
            kv_last_page_len=lens - (pages - 1) * page_size,
        )
        self._backend.plan(on_host, out=self.plan)

    def _layers(self) -> None:
        if self.name == PLANNED:
            self.plan.state[-1].plan(self.lens, **self.pool)
        for layer in range(self.layers):
            cache = self.caches[layer % len(self.caches)]
            out = self._backend.run(self.work.q, cache, self.plan)
        self.out.copy_(out)
