"""FlashMLA's schedule with guards against its silent reuse for another call.

FlashMLA fills a `FlashMLASchedMeta` at the first call and reuses it at every other call, also where
shapes or lengths have changed. `GuardedSchedMeta` serves one plan: it refuses other shapes, other
options, and lengths of another tensor or written since (PyTorch counts writes; a kernel's own
writes and those of a replayed graph are not seen). `require_schedule` looks at the words, so it
sees those too.

The words of dense decode on Hopper, as sgl-flash-mla 1.0.0 writes them (get_decoding_sched_meta.cu)
and reads them (splitkv_mla.cuh): a row of 8 int32 for each part of the GPU.

| word | |
|---|---|
| 0, 1 | first and last request of the part; the first is batch_size where it has no work |
| 2, 3 | its first block of the first request, and the end of its blocks of the last one |
| 4 | which split of the first request it writes |
| 5, 6 | whether the first and the last request are split |
| 7 | padding |

`num_splits` [batch_size + 1] int32 are the sums of the requests' splits.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..spec import require_all_read
from . import library
from .flash_attn3 import writes

BLOCK = 64
"""Tokens of a block: the dense kernel has no other page size."""
REQUEST_BLOCKS = 5
"""What starting a request counts for, in blocks (fixed_overhead_num_blocks)."""


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


def schedule_words(seq_lens: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """What FlashMLA writes for `seq_lens` [bs] tokens: tiles [parts, 8] and splits [bs + 1] int32.

    Parts get equal shares of blocks, in the order of requests. What nothing reads is 0: the
    padding, and all but the requests of a part without work.
    """
    lens = np.asarray(seq_lens, np.int64)
    blocks = np.maximum(-(-lens // BLOCK), 1)
    share = -(-int((blocks + REQUEST_BLOCKS).sum()) // parts) + REQUEST_BLOCKS
    tiles, sums = np.zeros((parts, 8), np.int32), [0]
    request = block = split = 0
    for part in tiles:
        part[:2] = request, request - 1
        if request == len(lens):
            continue
        first, first_block, first_split, room = request, block, split, share
        while request < len(lens) and room >= blocks[request] - block + REQUEST_BLOCKS:
            room -= blocks[request] - block + REQUEST_BLOCKS
            sums.append(sums[-1] + split + 1)
            request, block, split = request + 1, 0, 0
        if request < len(lens) and room > REQUEST_BLOCKS:
            block, split = block + room - REQUEST_BLOCKS, split + 1
        last = request if block else request - 1
        end = block or min(lens[last], blocks[last])  # an empty request has no block to read
        begins_inside, ends_inside = first_block > 0, 0 < end < blocks[last]
        if first == last:
            begins_inside = ends_inside = begins_inside or ends_inside
        part[1:7] = last, first_block, end, first_split, begins_inside, ends_inside
    return tiles, np.array(sums, np.int32)


def tokens_read(tiles: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Tokens of each request that the kernel reads by the words [parts, 8], [bs] int64.

    A part reads a request that is not its last to the end, however long it is now.
    """
    lens = np.asarray(seq_lens, np.int64)
    read = [np.zeros(-(-length // BLOCK), bool) for length in lens]
    for first, last, begin, end in tiles[tiles[:, 0] < len(lens), :4]:
        for request in range(first, last + 1):
            start = begin if request == first else 0
            read[request][start : end if request == last else None] = True
    starts = [np.flatnonzero(blocks) * BLOCK for blocks in read]
    return np.array([np.minimum(n - at, BLOCK).sum() for n, at in zip(lens, starts, strict=True)])


def require_schedule(
    tile_scheduler_metadata: torch.Tensor, num_splits: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """RuntimeError unless FlashMLA's dense schedule reads every token of `seq_lens` [bs].

    The words are those of a call, or those that a graph holds. Copies them and the lengths to the
    host, so it synchronises; the check then takes about 1 ms for 100 requests. ValueError for words
    and splits that are not of one batch this large.
    """
    tiles, sums, lens = (x.cpu().numpy() for x in (tile_scheduler_metadata, num_splits, seq_lens))
    working = tiles[tiles[:, 0] < len(lens)]
    named = [np.arange(first, last + 1) for first, last in working[:, :2]]
    splits = np.bincount(np.concatenate(named), minlength=len(lens))
    if not np.array_equal(splits, np.diff(sums)):
        raise ValueError(
            f"num_splits must be the sums of the {len(lens)} requests' splits, "
            f"{splits.tolist()} by tile_scheduler_metadata, got {np.diff(sums).tolist()}"
        )
    require_all_read("FlashMLA's schedule", tokens_read(tiles, lens), lens, "before the replay")


def _lengths(tensor: torch.Tensor | None) -> tuple[int, int | None]:
    """Address of the lengths and how often they were written."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), writes(tensor))
