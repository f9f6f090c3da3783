"""FlashInfer's own plans, word for word, as its planner makes them on the host: a test's oracle.

Read in attention/scheduler.cuh (PrefillPlan, PrefillSplitQOKVIndptr), utils.cuh
(FA2DetermineCtaTileQ) and allocator.h of every release in `RELEASES`. What changed on the way:

| since | what |
|---|---|
| 0.6.14 | smaller query tiles at head_dim 512 |
| 0.6.16 | `uniform_q_len` |
| 0.7.1 | room for partial outputs by query row, not by tile; a mask in graphs only, but in all |

Not modelled: workspaces that are too small, CTAs left to another kernel (POD), values with another
head_dim than keys, GPUs before Ampere.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from attnlib.core.fa2.library import (
    FA2_INFO,
    MIN_CHUNK,
    RELEASES,
    ROWS_SINCE,
    Words,
    block_indices,
    in_order,
    offsets,
    prefix_sums,
    tile_rows,
)
from attnlib.core.gpu import FA2_CTAS
from attnlib.core.spec import Grouped, require_int, require_word

Lengths: TypeAlias = Sequence[int] | np.ndarray
"""Tokens of each request, [bs]."""
SINCE = {"wide_tiles": "0.6.14", "uniform_q_len": "0.6.16", "row_partials": ROWS_SINCE}


@dataclass(frozen=True)
class LibraryCall(Grouped):
    """What is planned for, besides lengths.

    | field | meaning |
    |---|---|
    | `num_qo_heads`, `num_kv_heads`, `head_dim` | of a layer, on one GPU |
    | `page_size` | tokens of a KV page |
    | `cuda_graph` | whether the wrapper is made for CUDA graphs |
    | `num_sms` | multiprocessors of the GPU |
    | `release` | of FlashInfer, one of `RELEASES` |
    | `window_left` | tokens before its own that a query sees; -1: all |
    | `fixed_split_size` | pages of a KV chunk; the planner decides unless it is positive |
    | `disable_split_kv` | whether every request is one KV chunk |
    | `uniform_q_len` | query tokens that each request of a graph has, always; 0: no promise |
    | `graph_rows` | query tokens of all requests, of a graph's first plan; 0: this is the first |

    Raises ValueError naming the field, what it must be and what it was.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    cuda_graph: bool
    num_sms: int
    release: str
    window_left: int = -1
    fixed_split_size: int = -1
    disable_split_kv: bool = False
    uniform_q_len: int = 0
    graph_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "num_sms"):
            require_int(name, getattr(self, name))
        self.require_groups()
        for name, least in (("window_left", -1), ("fixed_split_size", -1), ("graph_rows", 0)):
            require_int(name, getattr(self, name), least=least)
        require_word("release", self.release, RELEASES)
        require_int("uniform_q_len", self.uniform_q_len, least=0)
        if self.uniform_q_len and not self.has("uniform_q_len"):
            raise ValueError(f"release must have uniform_q_len, since 0.6.16, got {self.release!r}")

    def has(self, change: str) -> bool:
        """Whether the release is not older than `change`, of the table above."""
        return RELEASES.index(self.release) >= RELEASES.index(SINCE[change])

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial output of all heads, float32; softmax sums lie behind all of them."""
        return 4 * self.num_qo_heads * self.head_dim


def plan_fa2(call: LibraryCall, kv_lens: Lengths, q_lens: Lengths | None = None) -> Words:
    """The plan of prefill, or of decode on tensor cores: then one query token of each request.

    Raises ValueError for lengths that are none, for others than `uniform_q_len` or more than
    `graph_rows` promise, and for a fixed split that takes more blocks than a graph has.
    """
    pages = -(-lengths_of("kv_lens", kv_lens) // call.page_size)
    q_lens = np.ones_like(pages) if q_lens is None else lengths_of("q_lens", q_lens)
    if len(q_lens) != len(pages):
        raise ValueError(f"q_lens must be of {len(pages)} requests, got {len(q_lens)}")
    rows = int(q_lens.sum())
    room = (call.cuda_graph and call.graph_rows) or rows
    if rows > room:
        raise ValueError(f"q_lens must sum up to {room}, graph_rows, at most, got {rows}")
    most = FA2_CTAS * call.num_sms // call.num_kv_heads
    tile, most_tiles = _query_tile(call, q_lens, room)
    tiles = -(-q_lens * call.group_size // tile)
    chunks, size, split = _kv_chunks(call, pages, tiles, most=most, tile=tile)
    requests, qo_tiles, kv_tiles = block_indices(tiles, chunks)
    padded = max(most, most_tiles) if call.cuda_graph else len(requests)
    if len(requests) > padded:
        raise ValueError(
            f"fixed_split_size must give at most {padded} blocks, a graph's, got {len(requests)}"
        )
    masked, partials = split, padded * tile
    if call.has("row_partials"):
        masked, partials = call.cuda_graph, -(-partials // call.group_size)
    words = dict.fromkeys(("request_indices", "qo_tile_indices", "kv_tile_indices"), padded)
    words |= {"o_indptr": len(pages) + 1, "kv_chunk_size_ptr": 1}
    words |= {"total_num_rows": 1} if call.cuda_graph else {}
    words |= {"merge_indptr": room + 1} if split else {}
    info = offsets(words, masked) | {"padded_batch_size": padded, "total_num_rows": room}
    info |= {"cta_tile_q": tile, "enable_cuda_graph": call.cuda_graph, "split_kv": split}
    info["s_offset"] = split * partials * call.partial_bytes
    return Words(
        info=in_order(info, FA2_INFO),
        request_indices=requests,
        qo_tile_indices=qo_tiles,
        kv_tile_indices=kv_tiles,
        o_indptr=prefix_sums(q_lens * chunks),
        merge_indptr=prefix_sums(np.repeat(chunks, q_lens)) if split else None,
        kv_chunk_size=size * call.page_size,
        total_num_rows=rows if call.cuda_graph else None,
        block_valid_mask=np.arange(padded) < len(requests) if masked else None,
    )


def chunk_pages(
    pages: np.ndarray, *, most: int, page_size: int, tiles: np.ndarray | int = 1
) -> int:
    """Pages of FlashInfer's KV chunks: the fewest that cut requests of `pages` into `most` or less.

    A chunk counts once for each of its request's query `tiles`. At least 128 tokens or a page; as
    long as the longest where requests alone are more than `most`.
    """
    least = max(MIN_CHUNK // page_size, 1)
    sizes = range(least, int(pages.max()))
    fits = bisect_left(sizes, True, key=lambda size: int((tiles * -(-pages // size)).sum()) <= most)
    return least + fits


def _kv_chunks(
    call: LibraryCall, pages: np.ndarray, tiles: np.ndarray, *, most: int, tile: int
) -> tuple[np.ndarray, int, bool]:
    """Chunks of each request [bs], pages of a chunk, and whether partial outputs are merged."""
    if call.disable_split_kv:
        # A chunk is the largest int64 of pages; what is left of its tokens in an int32 is -1 page.
        return np.ones_like(pages), -1, False
    if call.window_left >= 0:
        pages = np.minimum(pages, -(-(call.window_left + tile) // call.page_size))
    pages = np.maximum(pages, 1)
    if call.fixed_split_size > 0:
        chunks = -(-pages // call.fixed_split_size)
        return chunks, call.fixed_split_size, bool((chunks > 1).any())
    size = chunk_pages(pages, most=most, page_size=call.page_size, tiles=tiles)
    return -(-pages // size), size, call.cuda_graph or size < int(pages.max())


def _query_tile(call: LibraryCall, q_lens: np.ndarray, room: int) -> tuple[int, int]:
    """Rows of a query tile (a query token has one for each head of its group), and the most tiles
    that a graph of `room` query tokens can have."""
    group = call.group_size
    if not call.cuda_graph:
        return _tile_rows(call, int(q_lens.sum()) * group // len(q_lens)), 0
    if call.uniform_q_len:
        if (q_lens != call.uniform_q_len).any():
            raise ValueError(f"q_lens must all be {call.uniform_q_len}, got {q_lens.tolist()}")
        tile = _tile_rows(call, call.uniform_q_len * group)
        return tile, len(q_lens) * -(-call.uniform_q_len * group // tile)
    # The longest of them if the others have a token each. In the library's uint32: with fewer
    # tokens than that it wraps, and tiles are the largest.
    longest = (room - len(q_lens) + 1) % 2**32
    tile = _tile_rows(call, longest * group)
    return tile, -(-room * group // tile) + len(q_lens) - 1


def _tile_rows(call: LibraryCall, rows: int) -> int:
    if call.has("wide_tiles") and call.head_dim >= 512:
        return 16 if rows <= 32 else 32
    return tile_rows(rows, call.head_dim)


def lengths_of(name: str, lens: Lengths, least: int = 0) -> np.ndarray:
    """`lens` as int64 [bs]; ValueError unless they are one or more integers from `least` on."""
    array = np.asarray(lens)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu" or array.min() < least:
        raise ValueError(f"{name} must hold lengths >= {least}, got {array.tolist()} {array.dtype}")
    return array.astype(np.int64)
