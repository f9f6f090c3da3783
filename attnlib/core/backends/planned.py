"""FlashInfer's fa2 with a plan of our own, made on the GPU: `core.fa2`.

Always as in a CUDA graph, since the grid is fixed. 16-bit queries over 16-bit or FP8 caches,
head_dim 64, 128 or 256, any group and page size.
"""

from typing import Any

from ..batch import DecodeBatch, PagedKV
from ..extend import ExtendBatch
from ..fa2.library import HEAD_DIMS, RELEASES
from ..spec import CUSTOM_MASKS, AttnSpec
from .base import Backend, Batch, Plan, installed_version
from .flashinfer import Decode, Prefill
from .table import Entry

State = tuple[Any, ...]
"""What the library's plan holds, its wrapper first, and a planner."""


class _Planned(Backend[Batch, PagedKV]):
    """Comes before the library's wrapper in the bases: always as in a CUDA graph."""

    def __init__(self, entry: Entry, *, device: str, cuda_graph: bool = False) -> None:
        super().__init__(entry, device=device, cuda_graph=True)

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """What fa2 cannot run, and what has no plan of ours."""
        if reason := super().unsupported(entry, spec, mask):
            return reason
        release = installed_version(entry.distribution)
        if release and release not in RELEASES:
            return f"the plan of {', '.join(RELEASES[-3:])} and older is known, got {release}"
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim must be 64, 128 or 256, got {spec.head_dim}"
        if mask in CUSTOM_MASKS:
            return f"takes no custom mask, got {mask}"
        return ""


class PlannedDecode(_Planned[DecodeBatch], Decode):
    """BatchDecodeWithPagedKVCacheWrapper of fa2: one query per request, a paged cache."""

    def prepare(self, batch: DecodeBatch, held: Any) -> State:
        """FlashInfer's plan once, which synchronises, then ours over it; of one held ours alone."""
        if held is None:
            held = _taken_over(
                first=super().prepare(batch, None),
                paged=batch,
                q_len=1,
            )
        return _replanned(held, batch)


class PlannedPrefill(_Planned[ExtendBatch], Prefill):
    """BatchPrefillWithPagedKVCacheWrapper of fa2: as many queries of each request, a paged cache,
    a causal or a full mask. A custom mask is not taken: the host packs its bits by length."""

    def plan(
        self,
        batch: ExtendBatch,
        out: Plan[ExtendBatch] | None = None,
    ) -> Plan[ExtendBatch]:
        """As any backend. ValueError for a ragged cache, for requests with unlike numbers of
        queries, and for others than first planned."""
        if out is None:
            q_len = batch.max_q_len
        else:
            q_len = out.batch.max_q_len
        if batch.ragged or bool((batch.q_lens_cpu != q_len).any()):
            cache = "contiguous" if batch.ragged else "paged"
            raise ValueError(
                f"batch must have a paged cache and {q_len} queries of each request, for a plan on "
                f"the GPU, got a {cache} one and {batch.q_lens_cpu.tolist()[:4]}..."
            )
        return super().plan(batch, out)

    def prepare(self, batch: ExtendBatch, held: Any) -> State:
        """As `PlannedDecode.prepare`."""
        if held is None:
            held = _taken_over(
                first=super().prepare(batch, None),
                paged=batch.paged,
                q_len=batch.max_q_len,
            )
        return _replanned(held, batch.paged)


def _taken_over(first: State, paged: DecodeBatch, q_len: int) -> State:
    """The state of the library's first plan, and a planner of its wrapper."""
    from ..fa2.planner import Fa2Planner  # with Triton, which not all that ask for a reason need

    spec = paged.spec
    planner = Fa2Planner(
        first[0],
        head_dim=spec.head_dim,
        max_seq_len=paged.page_table.shape[1] * spec.page_size,
        page_size=spec.page_size,
        q_len=q_len,
    )
    return (*first, planner)


def _replanned(held: State, paged: DecodeBatch) -> State:
    """The state with page arrays and plan of `paged`; synchronises nothing."""
    planner = held[-1]
    for name, buffer in planner.page_arrays.items():
        array = getattr(paged, name)
        buffer[: len(array)].copy_(array)
    planner.plan(paged.seq_lens)
    return held
