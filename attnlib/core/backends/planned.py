"""FlashInfer's fa2 with a plan of our own, made on the GPU: `core.fa2`.

Always as in a CUDA graph, since the grid is fixed. 16-bit queries over 16-bit or FP8 caches,
head_dim 64, 128 or 256, any group and page size.
"""

from typing import Any

from ..batch import DecodeBatch
from ..fa2.library import HEAD_DIMS, RELEASES
from ..spec import AttnSpec
from .base import installed_version
from .flashinfer import Decode
from .table import Entry


class PlannedDecode(Decode):
    """BatchDecodeWithPagedKVCacheWrapper of fa2: one query per request, a paged cache.

    A plan's state is what the library's plan holds, its wrapper first, and a planner.
    """

    def __init__(self, entry: Entry, *, device: str, cuda_graph: bool = False) -> None:
        super().__init__(entry, device=device, cuda_graph=True)

    def prepare(self, batch: DecodeBatch, held: Any) -> tuple[Any, ...]:
        """FlashInfer's plan once, which synchronises, then ours over it; of one held ours alone."""
        if held is None:
            first = super().prepare(batch, None)
            held = (*first, _planner_of(first[0], batch))
        planner = held[-1]
        for name, buffer in planner.page_arrays.items():
            array = getattr(batch, name)
            buffer[: len(array)].copy_(array)
        planner.plan(batch.seq_lens)
        return held

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
        return ""


def _planner_of(wrapper: Any, batch: DecodeBatch) -> Any:
    from ..fa2.planner import Fa2Planner  # with Triton, which not all that ask for a reason need

    return Fa2Planner(
        wrapper,
        head_dim=batch.spec.head_dim,
        max_seq_len=batch.page_table.shape[1] * batch.spec.page_size,
        page_size=batch.spec.page_size,
    )
