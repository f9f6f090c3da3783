"""FlashMLA's schedule with a guard against its silent reuse for another call.

FlashMLA fills a `FlashMLASchedMeta` at the first call and reuses it at every other call, also where
shapes or lengths have changed. `GuardedSchedMeta` serves one plan: it refuses other shapes, other
options, and lengths of another tensor or written since (PyTorch counts writes; a kernel's own
writes and those of a replayed graph are not seen).
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from . import library
from .flash_attn3 import writes


@dataclass
class GuardedSchedMeta:
    """FlashMLA's schedule, and the call that it was made for."""

    _meta: Any = field(default=None, repr=False)
    _made_for: tuple[Any, ...] = ()

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor | None,
        cache_seqlens: torch.Tensor | None,
        head_dim_v: int,
        **options: Any,
    ) -> torch.Tensor:
        """The output of `flash_mla_with_kvcache`; ValueError, with nothing launched, if stale."""
        flash_mla = library.load(library.FLASHMLA)
        shapes = {name: tuple(x.shape) for name, x in options.items() if torch.is_tensor(x)}
        words = {name: x for name, x in options.items() if not torch.is_tensor(x)}
        sizes = (tuple(q.shape), tuple(k_cache.shape[1:]), head_dim_v, shapes, words)
        call = (*sizes, *_lengths(cache_seqlens))
        if self._meta is None:
            self._meta, self._made_for = flash_mla.get_mla_metadata()[0], call
        if call != self._made_for:
            raise ValueError(f"FlashMLA's schedule must be for {self._made_for}, got {call}")
        return flash_mla.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, self._meta, **options
        )[0]

    def refill(self, cache_seqlens: torch.Tensor) -> None:
        """Write dense attention's schedule for new lengths [bs] int32 into the memory that a CUDA
        graph reads. Before the first call there is nothing to write."""
        if self._meta is None:
            return
        heads = self._made_for[0][2]
        tiles, splits = library.load(library.FLASHMLA).get_mla_decoding_metadata(
            cache_seqlens, heads, 1, heads, use_legacy=True
        )
        self._meta.tile_scheduler_metadata.copy_(tiles)
        self._meta.num_splits.copy_(splits)
        self._made_for = (*self._made_for[:5], *_lengths(cache_seqlens))


def _lengths(tensor: torch.Tensor | None) -> tuple[int, int | None]:
    """Address of the lengths and how often they were written."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), writes(tensor))
