"""What is known of FlashInfer's fa2 planner: its releases, tiles, and the words that it writes.

A plan cuts requests into query tiles and KV chunks; a pair of them is a block, one CTA for each KV
head. Words in an int workspace say which block is what, partial outputs go to a float workspace,
and `info` says at which byte of them.

Read in attention/scheduler.cuh (PrefillPlan), utils.cuh (FA2DetermineCtaTileQ) and allocator.h of
every release in `RELEASES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

MIN_CHUNK = 128
"""FlashInfer cuts no KV chunk below so many tokens, or a page."""
HEAD_DIMS = (64, 128, 256)
"""Those whose query tiles are cut alike in all releases: FA2DetermineCtaTileQ."""
ROWS_SINCE = "0.7.1"
"""Release from which partial outputs have room by query row; before it had it by query tile."""
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
        image = np.full(words, fill, np.int32)
        for name, at in zip(self.names, self.info, strict=True):
            array = getattr(self, name.removesuffix("_offset").removesuffix("_ptr"), None)
            if name.endswith("_offset") and array is not None:
                dtype = np.bool_ if name.startswith("block_valid_mask") else np.int32
                data = np.atleast_1d(array).astype(dtype).view(np.uint8)
                image.view(np.uint8)[at : at + len(data)] = data
        return image


def tile_rows(rows: int, head_dim: int) -> int:
    """Rows of a query tile for requests that have so many: FA2DetermineCtaTileQ below head_dim
    512."""
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16


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
    places, end = {}, 0
    for name, count in (words | ({"block_valid_mask": 0} if masked else {})).items():
        at = end if name == "kv_chunk_size_ptr" else -(-end // 16) * 16
        places[f"{name}_offset"], end = at, at + 4 * count
    return places
