"""FlashInfer's fa2 with a plan of our own, made on the GPU: `core.fa2`."""

import torch

from ..batch import DecodeBatch, PagedKV
from ..extend import ExtendBatch
from ..fa2.planner import Fa2Planner
from .base import Plan
from .flashinfer import Decode, Prefill
from .table import Entry


class PlannedDecode(Decode):
    """BatchDecodeWithPagedKVCacheWrapper of fa2, always as in a CUDA graph: the grid is fixed."""

    def __init__(self, entry: Entry, *, device: str, cuda_graph: bool = False) -> None:
        super().__init__(entry, device=device, cuda_graph=True)

    def plan(self, batch: DecodeBatch, out: Plan[DecodeBatch] | None = None) -> Plan[DecodeBatch]:
        """FlashInfer's plan once, then ours over it; with `out`, ours alone. Both wait for the
        host; `Fa2Planner.plan` alone does not, and can be captured."""
        if out is None:
            first = super().plan(batch)
            wrapper, scales = first.state
            planner = _planner(wrapper, batch, 1)
            planner.plan(batch.seq_lens)
            return Plan(batch, first.reported_backend, (wrapper, scales, planner))
        _replan(out.state[2], batch)
        return Plan(batch, out.reported_backend, out.state)

    def run(self, q: torch.Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> torch.Tensor:
        """FlashInfer's own run."""
        wrapper, scales, _ = plan.state
        return wrapper.run(q, (cache.k_cache, cache.v_cache), *scales)


class PlannedPrefill(Prefill):
    """BatchPrefillWithPagedKVCacheWrapper of fa2, for as many queries of each request."""

    def __init__(self, entry: Entry, *, device: str, cuda_graph: bool = False) -> None:
        super().__init__(entry, device=device, cuda_graph=True)

    def plan(self, batch: ExtendBatch, out: Plan[ExtendBatch] | None = None) -> Plan[ExtendBatch]:
        """As `PlannedDecode.plan`. ValueError for a ragged cache, and where queries differ."""
        lens = batch.q_lens_cpu
        if batch.ragged or int(lens.min()) != int(lens.max()):
            raise ValueError(
                f"q_lens must be alike and the cache paged for a plan on the GPU, got "
                f"{lens.tolist()[:4]}..., ragged {batch.ragged}"
            )
        if out is None:
            first = super().plan(batch)
            planner = _planner(first.state, batch.paged, int(lens[0]))
            planner.plan(batch.paged.seq_lens)
            return Plan(batch, first.reported_backend, (first.state, planner))
        out.batch.require_alike(batch)
        _replan(out.state[1], batch.paged)
        return Plan(batch, out.reported_backend, out.state)

    def run(self, q: torch.Tensor, cache: PagedKV, plan: Plan[ExtendBatch]) -> torch.Tensor:
        """FlashInfer's own run: [rows, num_qo_heads, head_dim]."""
        return plan.state[0].run(q, (cache.k_cache, cache.v_cache))


def _planner(wrapper: object, batch: DecodeBatch, q_len: int) -> Fa2Planner:
    spec = batch.spec
    return Fa2Planner(
        wrapper,
        head_dim=spec.head_dim,
        max_seq_len=batch.page_table.shape[1] * spec.page_size,
        q_len=q_len,
    )


def _replan(planner: Fa2Planner, batch: DecodeBatch) -> None:
    arrays = planner.page_arrays
    for name, buffer in arrays.items():
        given = getattr(batch, name)
        buffer[: len(given)].copy_(given)
    planner.plan(batch.seq_lens)
