"""The words of a plan of ours, and where they lie in FlashInfer's workspaces.

A plan cuts requests into query tiles and KV chunks; a pair of them is a block, one CTA for each KV
head. fa2's kernels take their work from words in the int workspace, and 15 integers say at which
byte they are (PrefillPlanInfo in scheduler.cuh, the same from 0.5.3 to 0.7.4). The grid is (padded
blocks, 1, KV heads).

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

from ..spec import INT32_MAX, ceil_div, require_between, require_int, require_type
from .choice import PlanShape, choose, counted
from .library import FA2_INFO, by_name

WORD = 4
"""Bytes of a word."""
ARRAYS = (
    "request_indices",
    "qo_tile_indices",
    "kv_tile_indices",
    "o_indptr",
    "merge_indptr",
    "kv_chunk_size_ptr",
    "total_num_rows",
    "block_valid_mask",
)
"""In the order of the table."""


@dataclass(frozen=True)
class PlanLayout:
    """Where the words of a plan of fa2 lie in FlashInfer's workspaces.

    Attributes
    ----------
    info : tuple of int
        15 integers, as `wrapper._plan_info` holds them.
    int_bytes, float_bytes : int
        Bytes that both workspaces must have.

    Examples
    --------
    >>> from attnlib.core import PlanShape
    >>> shape = PlanShape(32, 8, 128, kv_bytes=2, max_batch_size=16, max_seq_len=8192, num_sms=132)
    >>> layout = PlanLayout.of(shape)
    >>> layout.int_bytes, layout.float_bytes
    (644, 544896)
    """

    info: tuple[int, ...]
    int_bytes: int
    float_bytes: int

    @classmethod
    def of(cls, shape: PlanShape) -> "PlanLayout":
        """The layout of `shape`."""
        require_type("shape", shape, PlanShape)
        blocks = shape.max_blocks
        batch = shape.max_batch_size
        rows = batch * shape.q_len
        partial = blocks // shape.q_tiles * shape.q_len
        lse = partial * shape.num_qo_heads * shape.head_dim * WORD
        counts = {
            "request_indices": blocks,
            "qo_tile_indices": blocks,
            "kv_tile_indices": blocks,
            "o_indptr": batch + 1,
            "merge_indptr": rows + 1,
            "kv_chunk_size_ptr": 1,
            "total_num_rows": 1,
            "block_valid_mask": 0,  # the last one, in bytes
        }
        info = offsets(counts) | {
            "padded_batch_size": blocks,
            "total_num_rows": rows,
            "cta_tile_q": shape.tile,
            "s_offset": lse,
            "enable_cuda_graph": True,
            "split_kv": True,
        }
        int_bytes = info["block_valid_mask_offset"] + ceil_div(blocks, WORD) * WORD
        float_bytes = lse + partial * shape.num_qo_heads * WORD
        return cls(in_order(info), int_bytes, float_bytes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of `ARRAYS`, in words."""
        info = by_name(self.info)
        return tuple(info[f"{name}_offset"] // WORD for name in ARRAYS)


@dataclass(frozen=True, eq=False)
class Words:
    """What a planner writes: `info` is `wrapper._plan_info`, the rest the words of the module.

    Arrays of blocks may be shorter than the grid: FlashInfer writes those in use alone.
    """

    info: tuple[int, ...]
    request_indices: np.ndarray
    qo_tile_indices: np.ndarray
    kv_tile_indices: np.ndarray
    o_indptr: np.ndarray
    merge_indptr: np.ndarray
    kv_chunk_size: int
    total_num_rows: int
    block_valid_mask: np.ndarray

    def image(self, words: int, fill: int = 0) -> np.ndarray:
        """The first `words` of the int workspace, int32; what is not written holds `fill`."""
        image = np.full(words, fill, np.int32)
        starts = by_name(self.info)
        for name in ARRAYS:
            dtype = np.bool_ if name == "block_valid_mask" else np.int32
            array = np.atleast_1d(getattr(self, name.removesuffix("_ptr")))
            data = array.astype(dtype).view(np.uint8)
            at = starts[f"{name}_offset"]
            image.view(np.uint8)[at : at + len(data)] = data
        return image


def offsets(counts: dict[str, int]) -> dict[str, int]:
    """Byte of the int workspace where each array begins, given its words.

    A multiple of 16 but for the chunk size: FlashInfer's AlignedAllocator.
    """
    places = {}
    end = 0
    for name, count in counts.items():
        if name == "kv_chunk_size_ptr":
            at = end
        else:
            at = ceil_div(end, 16) * 16
        places[f"{name}_offset"] = at
        end = at + WORD * count
    return places


def in_order(info: dict[str, int]) -> tuple[int, ...]:
    """The integers of a plan; those that `info` does not know are 0."""
    return tuple(int(info.get(name, 0)) for name in FA2_INFO)


def block_indices(
    tiles: np.ndarray, chunks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Request, query tile and KV chunk of each block, int32, given tiles and chunks by request."""
    counts = tiles * chunks
    requests = np.repeat(np.arange(len(counts)), counts)
    first_blocks = np.cumsum(counts) - counts
    block = np.arange(len(requests)) - first_blocks[requests]
    qo_tiles, kv_tiles = np.divmod(block, chunks[requests])
    return (
        requests.astype(np.int32),
        qo_tiles.astype(np.int32),
        kv_tiles.astype(np.int32),
    )


def prefix_sums(counts: np.ndarray) -> np.ndarray:
    """0 and the sums of `counts` so far, [n + 1] int32."""
    sums = np.cumsum(counts)
    return np.concatenate([[0], sums]).astype(np.int32)


def chunk_in(words: np.ndarray, layout: PlanLayout) -> int:
    """Tokens of a KV chunk in written `words`, int32."""
    return int(words[layout.offsets[ARRAYS.index("kv_chunk_size_ptr")]])


def plan_words(shape: PlanShape, seq_lens: np.ndarray, chunk: int = 0) -> Words:
    """The plan that `build_fa2_plan` writes, word for word, in NumPy.

    Parameters
    ----------
    shape : PlanShape
        What is fixed.
    seq_lens : ndarray
        [bs] integers, tokens per request; rows from bs to `max_batch_size` are empty.
    chunk : int
        Tokens of a KV chunk, in place of the choice; 0 chooses.

    Returns
    -------
    Words
        The arrays of the plan, and its chunk.

    Raises
    ------
    ValueError
        For more than `max_batch_size` requests, for a length or a chunk below 0, and for a chunk
        that cuts into more blocks than the grid has.

    Examples
    --------
    One long request beside fifteen short ones is cut into many parts:

    >>> import numpy as np
    >>> from attnlib.core import PlanShape
    >>> shape = PlanShape(32, 8, 128, kv_bytes=2, max_batch_size=16, max_seq_len=8192, num_sms=132)
    >>> words = plan_words(shape, np.array([8192] + [100] * 15))
    >>> words.kv_chunk_size, int(words.block_valid_mask.sum())
    (456, 33)
    """
    require_type("shape", shape, PlanShape)
    require_int("chunk", chunk, least=0)
    lens = np.zeros(shape.max_batch_size, np.int64)
    given = counted(shape, seq_lens)
    if len(given):
        require_between("seq_lens", np.asarray(seq_lens), 0, INT32_MAX)
    lens[: len(given)] = given
    chunk = chunk or choose(shape, given).chunk
    parts = ceil_div(lens, chunk)
    most = shape.max_blocks
    blocks = int(parts.sum()) * shape.q_tiles
    if blocks > most:
        raise ValueError(f"chunk must cut into at most {most} blocks, got {blocks} of {chunk}")
    indices = block_indices(np.full_like(parts, shape.q_tiles), parts)
    unused = (0, most - blocks)
    requests, q_tiles, kv_tiles = (np.pad(index, unused) for index in indices)
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
        block_valid_mask=np.arange(ceil_div(most, WORD) * WORD) < blocks,
    )
