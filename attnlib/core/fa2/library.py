"""The plans that FlashInfer's own planner makes on the host, word for word. NumPy, no GPU.

A plan cuts requests into query tiles and KV chunks; a pair of them is a block, one CTA for each KV
head. Words in an int workspace say which block is what, partial outputs go to a float workspace,
and `info` says at which byte of them.

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
from typing import ClassVar, TypeAlias

import numpy as np

from ..gpu import FA2_CTAS
from ..spec import Grouped, require_int, require_word

Lengths: TypeAlias = Sequence[int] | np.ndarray
"""Tokens of each request, [bs]."""
MIN_CHUNK = 128
"""FlashInfer cuts no KV chunk below so many tokens, or a page."""

HEAD_DIMS = (64, 128, 256)
"""Those whose query tiles are cut alike in all releases: FA2DetermineCtaTileQ."""
_SINCE = {"wide_tiles": "0.6.14", "uniform_q_len": "0.6.16", "row_partials": "0.7.1"}
RELEASES = """
0.4.0 0.4.1 0.5.0 0.5.1 0.5.2 0.5.3 0.6.0 0.6.1 0.6.2 0.6.3 0.6.4 0.6.5 0.6.6 0.6.7 0.6.7.post1
0.6.7.post2 0.6.7.post3 0.6.8 0.6.8.post1 0.6.9 0.6.10 0.6.10.post1 0.6.11 0.6.11.post1 0.6.11.post2
0.6.11.post3 0.6.12 0.6.13 0.6.14 0.6.15 0.6.15.post1 0.6.16 0.6.16.post1 0.6.16.post2 0.6.16.post3
0.6.16.post4 0.6.17 0.6.18 0.6.18.post1 0.7.0 0.7.0.post1 0.7.1 0.7.2 0.7.2.post1
""".split()
"""Releases of FlashInfer whose planner was read, oldest first."""
FA2_INFO = """
padded_batch_size total_num_rows total_num_rows_offset cta_tile_q request_indices_offset
qo_tile_indices_offset kv_tile_indices_offset merge_indptr_offset o_indptr_offset
kv_chunk_size_ptr_offset v_offset s_offset block_valid_mask_offset enable_cuda_graph split_kv
""".split()
"""Names of `Words.info`, in order, of an fa2 plan: PrefillPlanInfo."""


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
        return RELEASES.index(self.release) >= RELEASES.index(_SINCE[change])

    @property
    def partial_bytes(self) -> int:
        """Bytes of a partial output of all heads, float32; softmax sums lie behind all of them."""
        return 4 * self.num_qo_heads * self.head_dim


@dataclass(frozen=True, eq=False)
class Words:
    """What a planner writes: `info` is `wrapper._plan_info`, the rest are words.

    | field | shape | content |
    |---|---|---|
    | `request_indices` | blocks, int32 | the request of a block |
    | `qo_tile_indices` | the same | which of its query tiles |
    | `kv_tile_indices` | the same | which of its KV chunks |
    | `o_indptr` | bs + 1, int32 | partial outputs before a request's own |
    | `merge_indptr` | rows + 1, int32 | before a query token's; None unless they are merged |
    | `kv_chunk_size` | | tokens of a KV chunk; -page_size where splits are disabled |
    | `total_num_rows` | | query tokens of this plan; None if eager |
    | `block_valid_mask` | `info[0]`, bool | whether a block is in use; None if not written |

    The first three have `info[0]` words in the workspace: what follows the blocks in use is left
    as it was by the library, and cleared by us. So is the end of `merge_indptr` in a graph with
    fewer tokens than `graph_rows`.
    """

    names: ClassVar[Sequence[str]] = FA2_INFO
    info: tuple[int, ...]
    request_indices: np.ndarray
    qo_tile_indices: np.ndarray
    kv_tile_indices: np.ndarray
    o_indptr: np.ndarray
    merge_indptr: np.ndarray | None
    kv_chunk_size: int
    total_num_rows: int | None
    block_valid_mask: np.ndarray | None

    def image(self, words: int, fill: int = 0) -> np.ndarray:
        """The first `words` of the int workspace, int32; what is not written holds `fill`."""
        found = np.full(words, fill, np.int32)
        for name, at in zip(self.names, self.info, strict=True):
            array = getattr(self, name.removesuffix("_offset").removesuffix("_ptr"), None)
            if name.endswith("_offset") and array is not None:
                kind = np.bool_ if name.startswith("block_valid_mask") else np.int32
                data = np.atleast_1d(array).astype(kind).view(np.uint8)
                found.view(np.uint8)[at : at + len(data)] = data
        return found


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


def tile_rows(rows: int, head_dim: int) -> int:
    """Rows of a query tile for requests that have so many: FA2DetermineCtaTileQ below head_dim
    512."""
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16


def lengths_of(name: str, lens: Lengths, least: int = 0) -> np.ndarray:
    """`lens` as int64 [bs]; ValueError unless they are one or more integers from `least` on."""
    found = np.asarray(lens)
    if found.ndim != 1 or found.size == 0 or found.dtype.kind not in "iu" or found.min() < least:
        raise ValueError(f"{name} must hold lengths >= {least}, got {found.tolist()} {found.dtype}")
    return found.astype(np.int64)


def block_indices(
    tiles: np.ndarray, chunks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Request, query tile and KV chunk of each block, int32, of requests with so many of them."""
    counts = tiles * chunks
    requests = np.repeat(np.arange(len(counts)), counts)
    block = np.arange(len(requests)) - (np.cumsum(counts) - counts)[requests]
    qo_tiles, kv_tiles = np.divmod(block, chunks[requests])
    return requests.astype(np.int32), qo_tiles.astype(np.int32), kv_tiles.astype(np.int32)


def prefix_sums(counts: np.ndarray) -> np.ndarray:
    """0 and the sums of `counts` so far, [n + 1] int32."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def in_order(info: dict[str, int], names: Sequence[str]) -> tuple[int, ...]:
    """The integers of a plan; those that `info` does not know are 0."""
    return tuple(int(info.get(name, 0)) for name in names)


def offsets(words: dict[str, int], masked: bool) -> dict[str, int]:
    """Byte of the int workspace where each array of so many words begins, and the mask, the last.

    A multiple of 16 but for the chunk size: AlignedAllocator.
    """
    found, end = {}, 0
    for name, count in (words | ({"block_valid_mask": 0} if masked else {})).items():
        at = end if name == "kv_chunk_size_ptr" else -(-end // 16) * 16
        found[f"{name}_offset"], end = at, at + 4 * count
    return found
