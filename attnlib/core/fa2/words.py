"""The words of a plan in FlashInfer's workspaces, and where they lie.

fa2's kernels take their work from words in the int workspace and 15 integers (PrefillPlanInfo in
scheduler.cuh, the same from 0.5.3 to 0.7.2). The grid is (padded blocks, 1, KV heads).

| word | int32 each | |
|---|---|---|
| `request_indices`, `qo_tile_indices`, `kv_tile_indices` | max_blocks | what a block works on |
| `o_indptr` | batch + 1 | partial rows before each request |
| `merge_indptr` | query rows + 1 | partial rows before each query row |
| `kv_chunk_size`, `total_num_rows` | 1 | tokens; query rows |
| `block_valid_mask` | max_blocks bytes | 0: the block ends at once |

Partial outputs lie in the float workspace: float32 [partial rows, num_qo_heads, head_dim], then
their log-sum-exp [partial rows, num_qo_heads]. An empty request has no block: its rows are merged
from nothing, which gives zeros and -inf.
"""

from dataclasses import dataclass

import numpy as np

from .choice import Choice, PlanShape, choose, counted

ALIGN = 16
"""Bytes, of every word array: as the library's allocator."""
WORD = 4


@dataclass(frozen=True)
class Layout:
    """Where the words of a shape lie: offsets in int32 words into the int workspace, `valid` in
    bytes; bytes that both workspaces must have."""

    request: int
    q_tile: int
    kv_tile: int
    o_indptr: int
    merge_indptr: int
    chunk: int
    rows: int
    valid: int
    int_bytes: int
    lse: int
    float_bytes: int

    @classmethod
    def of(cls, shape: PlanShape) -> "Layout":
        """The layout of `shape`."""
        blocks, batch = shape.max_blocks, shape.max_batch_size
        sizes = (blocks, blocks, blocks, batch + 1, batch * shape.q_len + 1, 1, 1)
        ends = np.cumsum([-(-size * WORD // ALIGN) * ALIGN for size in sizes]).tolist()
        partial = blocks // shape.q_tiles * shape.q_len * shape.num_qo_heads * WORD
        lse, valid = partial * shape.head_dim, ends[-1]
        names = ("request", "q_tile", "kv_tile", "o_indptr", "merge_indptr", "chunk", "rows")
        starts = dict(zip(names, (end // WORD for end in (0, *ends)), strict=False))
        room = {"int_bytes": valid + -(-blocks // WORD) * WORD, "float_bytes": lse + partial}
        return cls(**starts, valid=valid, lse=lse, **room)

    @property
    def offsets(self) -> tuple[int, ...]:
        """In words, in the order of the fields."""
        starts = (self.request, self.q_tile, self.kv_tile, self.o_indptr, self.merge_indptr)
        return (*starts, self.chunk, self.rows, self.valid // WORD)

    def info(self, shape: PlanShape) -> list[int]:
        """The 15 integers, as `wrapper._plan_info` holds them."""
        rows = shape.max_batch_size * shape.q_len
        offsets = (self.request, self.q_tile, self.kv_tile, self.merge_indptr, self.o_indptr)
        return [
            *(shape.max_blocks, rows, self.rows * WORD, shape.tile),
            *(offset * WORD for offset in offsets),
            *(self.chunk * WORD, 0, self.lse, self.valid, 1, 1),
        ]


@dataclass(frozen=True)
class Words:
    """The words of one plan, int64 arrays as the table above says, and the choice behind them."""

    choice: Choice
    request_indices: np.ndarray
    qo_tile_indices: np.ndarray
    kv_tile_indices: np.ndarray
    o_indptr: np.ndarray
    merge_indptr: np.ndarray
    kv_chunk_size: int
    total_num_rows: int
    block_valid_mask: np.ndarray

    def image(self, layout: Layout, fill: int = 0) -> np.ndarray:
        """The words as they lie in the int workspace, int32 [int_bytes // 4]; gaps hold `fill`."""
        words = np.full(layout.int_bytes // WORD, fill, np.int32)
        scalars = (np.array([n]) for n in (self.kv_chunk_size, self.total_num_rows))
        indices = (self.request_indices, self.qo_tile_indices, self.kv_tile_indices)
        arrays = (*indices, self.o_indptr, self.merge_indptr, *scalars)
        for begin, array in zip(layout.offsets, arrays, strict=False):
            words[begin : begin + len(array)] = array
        mask = words.view(np.uint8)[layout.valid :]
        mask[:] = 0
        mask[: len(self.block_valid_mask)] = self.block_valid_mask
        return words


def plan_words(shape: PlanShape, seq_lens: np.ndarray, chunk: int = 0) -> Words:
    """What the kernel writes for `seq_lens` [bs] tokens, word for word; a positive `chunk`, in
    tokens, takes the place of the choice.

    Rows from bs to `max_batch_size` are empty. Raises as `choose` does, and ValueError for a chunk
    that cuts into more blocks than the grid has.
    """
    lens = np.zeros(shape.max_batch_size, np.int64)
    given = counted(shape, seq_lens)
    lens[: len(given)] = given
    choice = choose(shape, given)
    chunk = chunk or choice.chunk
    parts = -(-lens // chunk)
    blocks = parts * shape.q_tiles
    if blocks.sum() > shape.max_blocks:
        raise ValueError(
            f"chunk must cut into at most {shape.max_blocks} blocks, got {blocks.sum()} of {chunk}"
        )
    within = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    own_parts = np.repeat(parts, blocks)
    padding = (0, shape.max_blocks - len(within))
    per_row = np.repeat(parts, shape.q_len)
    return Words(
        choice,
        np.pad(np.repeat(np.arange(len(lens)), blocks), padding),
        np.pad(within // np.maximum(own_parts, 1), padding),
        np.pad(within % np.maximum(own_parts, 1), padding),
        np.concatenate([[0], np.cumsum(parts * shape.q_len)]),
        np.concatenate([[0], np.cumsum(per_row)]),
        chunk,
        len(per_row),
        np.pad(np.ones(len(within), np.int64), padding),
    )
