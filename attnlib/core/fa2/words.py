"""The words of a plan of ours, and where they lie in FlashInfer's workspaces.

fa2's kernels take their work from words in the int workspace and 15 integers (PrefillPlanInfo in
scheduler.cuh, the same from 0.5.3 to 0.7.2). The grid is (padded blocks, 1, KV heads).

| word | int32 each | |
|---|---|---|
| `request_indices`, `qo_tile_indices`, `kv_tile_indices` | max_blocks | what a block works on |
| `o_indptr` | batch + 1 | partial rows before each request |
| `merge_indptr` | query rows + 1 | partial rows before each query row |
| `kv_chunk_size`, `total_num_rows` | 1 | tokens; query rows |
| `block_valid_mask` | max_blocks bytes, in whole words | 0: the block ends at once |

Partial outputs lie in the float workspace: float32 [partial rows, num_qo_heads, head_dim], then
their log-sum-exp [partial rows, num_qo_heads]. An empty request has no block: its rows are merged
from nothing, which gives zeros and -inf.
"""

from dataclasses import dataclass

import numpy as np

from .choice import PlanShape, choose, counted
from .library import FA2_INFO, Words, block_indices, in_order, offsets, prefix_sums

WORD = 4
"""Bytes of a word."""
ARRAYS = """
request_indices qo_tile_indices kv_tile_indices o_indptr merge_indptr kv_chunk_size_ptr
total_num_rows block_valid_mask
""".split()
"""In the order of the table."""


@dataclass(frozen=True)
class PlanLayout:
    """Where the words of a shape lie: `info` as `wrapper._plan_info` holds it, and the bytes that
    both workspaces must have."""

    info: tuple[int, ...]
    int_bytes: int
    float_bytes: int

    @classmethod
    def of(cls, shape: PlanShape) -> "PlanLayout":
        """The layout of `shape`."""
        blocks, batch = shape.max_blocks, shape.max_batch_size
        rows, partial = batch * shape.q_len, blocks // shape.q_tiles * shape.q_len
        sizes = (blocks, blocks, blocks, batch + 1, rows + 1, 1, 1)
        info = offsets(dict(zip(ARRAYS, sizes, strict=False)), masked=True)
        lse = partial * shape.num_qo_heads * shape.head_dim * WORD
        info |= {"padded_batch_size": blocks, "total_num_rows": rows, "cta_tile_q": shape.tile}
        info |= {"s_offset": lse, "enable_cuda_graph": True, "split_kv": True}
        int_bytes = info["block_valid_mask_offset"] + -(-blocks // WORD) * WORD
        float_bytes = lse + partial * shape.num_qo_heads * WORD
        return cls(in_order(info, FA2_INFO), int_bytes, float_bytes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of `ARRAYS`, in words."""
        info = dict(zip(FA2_INFO, self.info, strict=True))
        return tuple(info[f"{name}_offset"] // WORD for name in ARRAYS)


def chunk_in(words: np.ndarray, layout: PlanLayout) -> int:
    """Tokens of a KV chunk in written `words`, int32."""
    return int(words[layout.offsets[ARRAYS.index("kv_chunk_size_ptr")]])


def plan_words(shape: PlanShape, seq_lens: np.ndarray, chunk: int = 0) -> Words:
    """What the kernel writes for `seq_lens` [bs] tokens, word for word; a positive `chunk`, in
    tokens, takes the place of the choice.

    Rows from bs to `max_batch_size` are empty. Raises as `choose` does, and ValueError for a chunk
    that cuts into more blocks than the grid has.
    """
    lens = np.zeros(shape.max_batch_size, np.int64)
    given = counted(shape, seq_lens)
    lens[: len(given)] = given
    chunk = chunk or choose(shape, given).chunk
    parts, most = -(-lens // chunk), shape.max_blocks
    blocks = int(parts.sum()) * shape.q_tiles
    if blocks > most:
        raise ValueError(f"chunk must cut into at most {most} blocks, got {blocks} of {chunk}")
    indices = block_indices(np.full_like(parts, shape.q_tiles), parts)
    requests, q_tiles, kv_tiles = (np.pad(index, (0, most - blocks)) for index in indices)
    rows = np.repeat(parts, shape.q_len)
    return Words(
        info=PlanLayout.of(shape).info,
        request_indices=requests,
        qo_tile_indices=q_tiles,
        kv_tile_indices=kv_tiles,
        o_indptr=prefix_sums(parts * shape.q_len),
        merge_indptr=prefix_sums(rows),
        kv_chunk_size=chunk,
        total_num_rows=len(rows),
        block_valid_mask=np.arange(-(-most // WORD) * WORD) < blocks,
    )
