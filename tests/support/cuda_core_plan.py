"""FlashInfer's plan of decode on CUDA cores, word for word: an oracle of the policy's work plans.

Read in DecodePlan of attention/scheduler.cuh, as `support.library_plan` reads fa2's.
"""

import numpy as np
from support.library_plan import Lengths, LibraryCall, chunk_pages

from attnlib.core.fa2.library import Words, block_indices, in_order, offsets, prefix_sums
from attnlib.core.gpu import CUDA_CORE_CTAS
from attnlib.core.spec import require_int

CUDA_CORE_INFO = """
padded_batch_size v_offset s_offset request_indices_offset kv_tile_indices_offset o_indptr_offset
block_valid_mask_offset kv_chunk_size_ptr_offset enable_cuda_graph split_kv
""".split()
"""Names of `Words.info`, in order, of such a plan: DecodePlanInfo."""


class CudaCoreWords(Words):
    """Without query tiles, `merge_indptr` and `total_num_rows`."""

    names = CUDA_CORE_INFO


def plan_cuda_cores(call: LibraryCall, kv_lens: Lengths) -> CudaCoreWords:
    """The plan of decode on CUDA cores: one query token of each request.

    For kernels whose CTAs per SM are known (`gpu.CUDA_CORE_CTAS`), 16 bits. It is the same in all
    releases, and this planner reads neither window nor `disable_split_kv`. Raises ValueError for a
    fixed split, and where empty requests take more blocks than a graph has: the library does not
    look, and overwrites its words.
    """
    require_int("fixed_split_size", call.fixed_split_size, least=-1, most=0)
    pages = -(-np.asarray(kv_lens) // call.page_size)
    ctas = CUDA_CORE_CTAS[call.head_dim, 2][call.group_size][0] * call.num_sms
    most, size = ctas // call.num_kv_heads, max(int(pages.max()), 1)
    may_split = len(pages) * call.num_kv_heads < ctas
    if may_split:
        size = chunk_pages(pages, most=most, page_size=call.page_size)
    chunks = -(-np.maximum(pages, 1) // size)
    requests, _, kv_tiles = block_indices(np.ones_like(chunks), chunks)
    split = may_split and (call.cuda_graph or len(requests) > len(pages))
    padded = most if call.cuda_graph and split else len(requests)
    if len(requests) > padded:
        raise ValueError(f"kv_lens must give at most {padded} blocks, got {len(requests)}")
    words = {"request_indices": padded, "kv_tile_indices": padded, "o_indptr": padded + 1}
    info = offsets(words | {"kv_chunk_size_ptr": 1}, split) | {"padded_batch_size": padded}
    info |= {"enable_cuda_graph": call.cuda_graph, "split_kv": split}
    info["s_offset"] = split * padded * call.partial_bytes
    return CudaCoreWords(
        info=in_order(info, CUDA_CORE_INFO),
        request_indices=requests,
        qo_tile_indices=None,
        kv_tile_indices=kv_tiles,
        o_indptr=prefix_sums(chunks),
        merge_indptr=None,
        kv_chunk_size=size * call.page_size,
        total_num_rows=None,
        block_valid_mask=np.arange(padded) < len(requests) if split else None,
    )
