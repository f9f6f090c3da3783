"""What is known of FlashInfer's fa2 planner: its releases, its query tiles, its 15 integers.

Read in attention/scheduler.cuh (PrefillPlan) and utils.cuh (FA2DetermineCtaTileQ) of every release
in `RELEASES`. From 0.7.4 on a decode wrapper of a graph tells the planner that each request has one
length of queries: the grid has no spare blocks then, and past a wave no merge.
"""

from collections.abc import Sequence

from ..releases import FLASHINFER, read_releases

MIN_CHUNK = 128
"""The shortest KV chunk of FlashInfer, in tokens, unless a page is longer."""
HEAD_DIMS = (64, 128, 256)
"""Those whose query tiles are cut alike in all releases: FA2DetermineCtaTileQ."""
ROWS_SINCE = "0.7.1"
"""Release from which FlashInfer reserves partial outputs by query row; before, by query tile."""
_READ = [*read_releases(FLASHINFER)]
RELEASES = tuple(_READ[_READ.index("0.4.0") :])
"""Releases of FlashInfer whose planner was read, oldest first."""
FA2_INFO = (
    "padded_batch_size",
    "total_num_rows",
    "total_num_rows_offset",
    "cta_tile_q",
    "request_indices_offset",
    "qo_tile_indices_offset",
    "kv_tile_indices_offset",
    "merge_indptr_offset",
    "o_indptr_offset",
    "kv_chunk_size_ptr_offset",
    "v_offset",
    "s_offset",
    "block_valid_mask_offset",
    "enable_cuda_graph",
    "split_kv",
)
"""Names of the integers of a plan, in order: PrefillPlanInfo."""


def by_name(info: Sequence[int]) -> dict[str, int]:
    """The integers of a plan by their names."""
    return dict(zip(FA2_INFO, info, strict=True))


def tile_rows(rows: int, head_dim: int) -> int:
    """Rows of a query tile, given the query rows: FA2DetermineCtaTileQ below head_dim 512."""
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16
