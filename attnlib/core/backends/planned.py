"""FlashInfer's fa2 with a plan of our own, made on the GPU: `core.fa2`.

Always as in a CUDA graph, since the grid is fixed. 16-bit queries over 16-bit or FP8 caches,
head_dim 64, 128 or 256, any group and page size.
"""

import torch

from ..batch import DecodeBatch, PagedKV
from ..extend import ExtendBatch
from ..fa2.library import RELEASES
from ..fa2.planner import Fa2Planner
from ..spec import CUSTOM_MASKS, AttnSpec
from .base import Plan, installed_version, require_same_table
from .flashinfer import Decode, Prefill
from .table import Entry

HEAD_DIMS = (64, 128, 256)
"""Those whose query tiles are cut alike in all releases: FA2DetermineCtaTileQ."""


class PlannedDecode(Decode):
    """BatchDecodeWithPagedKVCacheWrapper of fa2: one query per request, a paged cache."""

    def __init__(self, entry: Entry, *, device: str, cuda_graph: bool = False) -> None:
        super().__init__(entry, device=device, cuda_graph=True)

    def plan(self, batch: DecodeBatch, out: Plan[DecodeBatch] | None = None) -> Plan[DecodeBatch]:
        """FlashInfer's plan once, then ours over it; with `out`, ours alone.

        The first plan synchronises, a replan does not. ValueError unless `out` has a page table of
        this shape.
        """
        if out is None:
            first = super().plan(batch)
            wrapper, scales = first.state
            planner = _planner(wrapper, batch, 1)
            planner.plan(batch.seq_lens)
            return Plan(batch, first.reported_backend, (wrapper, scales, planner))
        held = out.batch
        require_same_table((held.spec, held.page_table), (batch.spec, batch.page_table))
        _replan(out.state[2], batch)
        return Plan(batch, out.reported_backend, out.state)

    def run(self, q: torch.Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> torch.Tensor:
        """FlashInfer's own run."""
        wrapper, scales, _ = plan.state
        return wrapper.run(q, (cache.k_cache, cache.v_cache), *scales)

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """What fa2 cannot run, and what has no plan of ours."""
        return super().unsupported(entry, spec, mask) or _unplanned(entry, spec, mask)


class PlannedPrefill(Prefill):
    """BatchPrefillWithPagedKVCacheWrapper of fa2: as many queries of each request, a paged cache,
    a causal or a full mask. Bits of a custom one lie where lengths say, and the host packs them."""

    def __init__(self, entry: Entry, *, device: str, cuda_graph: bool = False) -> None:
        super().__init__(entry, device=device, cuda_graph=True)

    def plan(self, batch: ExtendBatch, out: Plan[ExtendBatch] | None = None) -> Plan[ExtendBatch]:
        """As `PlannedDecode.plan`. ValueError for a ragged cache, for requests with unlike numbers
        of queries, and for others than first planned."""
        q_len = batch.max_q_len if out is None else out.batch.max_q_len
        if batch.ragged or bool((batch.q_lens_cpu != q_len).any()):
            cache = "contiguous" if batch.ragged else "paged"
            raise ValueError(
                f"batch must have a paged cache and {q_len} queries of each request, for a plan on "
                f"the GPU, got a {cache} one and {batch.q_lens_cpu.tolist()[:4]}..."
            )
        if out is None:
            first = super().plan(batch)
            planner = _planner(first.state, batch.paged, q_len)
            planner.plan(batch.paged.seq_lens)
            return Plan(batch, first.reported_backend, (first.state, planner))
        out.batch.require_alike(batch)
        _replan(out.state[1], batch.paged)
        return Plan(batch, out.reported_backend, out.state)

    def run(self, q: torch.Tensor, cache: PagedKV, plan: Plan[ExtendBatch]) -> torch.Tensor:
        """FlashInfer's own run: [rows, num_qo_heads, head_dim]."""
        return plan.state[0].run(q, (cache.k_cache, cache.v_cache))

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """What fa2 cannot run, and what has no plan of ours."""
        return super().unsupported(entry, spec, mask) or _unplanned(entry, spec, mask)


def _unplanned(entry: Entry, spec: AttnSpec, mask: str) -> str:
    release = installed_version(entry.distribution)
    if release and release not in RELEASES:
        return f"the plan of {', '.join(RELEASES[-3:])} and older is known, got {release}"
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim must be 64, 128 or 256, got {spec.head_dim}"
    return f"takes no custom mask, got {mask}" if mask in CUSTOM_MASKS else ""


def _planner(wrapper: object, batch: DecodeBatch, q_len: int) -> Fa2Planner:
    spec = batch.spec
    return Fa2Planner(
        wrapper,
        head_dim=spec.head_dim,
        max_seq_len=batch.page_table.shape[1] * spec.page_size,
        q_len=q_len,
        page_size=spec.page_size,
    )


def _replan(planner: Fa2Planner, batch: DecodeBatch) -> None:
    for name, buffer in planner.page_arrays.items():
        given = getattr(batch, name)
        buffer[: len(given)].copy_(given)
    planner.plan(batch.seq_lens)
