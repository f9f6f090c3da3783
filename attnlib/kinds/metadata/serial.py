"""The design that SGLang shipped in 0.5.10, written anew from its description: a rival to measure.

One program walks the batch alone and adds the lengths up one by one; every program copies one block
of columns of one row over the table's full width, live or not. Engines should not use it.
"""

import torch
import triton
import triton.language as tl

from ...core.metadata.launch import require_launchable
from ...core.metadata.require import StepTensors
from .eager import require_decode_once


@triton.jit
def serial_metadata_kernel(
    seq_lens_ptr,
    req_pool_indices_ptr,
    req_to_token_ptr,
    cache_seqlens_ptr,
    cu_seqlens_k_ptr,
    page_table_ptr,
    swa_slot_map_ptr,
    swa_page_table_ptr,
    batch,
    max_pages,
    token_stride,
    table_stride,
    DELTA: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_SWA: tl.constexpr,
    COLS: tl.constexpr,
):
    """Prefix sum in program (0, 0), then one row and one block of COLS columns per program."""
    row, block = tl.program_id(0), tl.program_id(1)
    if row == 0 and block == 0:
        total = 0
        for request in range(batch):
            length = (tl.load(seq_lens_ptr + request) + DELTA).to(tl.int32)
            tl.store(cache_seqlens_ptr + request, length)
            tl.store(cu_seqlens_k_ptr + request, total)
            total += length
        tl.store(cu_seqlens_k_ptr + batch, total)
    cols = block * COLS + tl.arange(0, COLS)
    inside = cols < max_pages
    source = tl.load(req_pool_indices_ptr + row).to(tl.int64) * token_stride
    slots = tl.load(req_to_token_ptr + source + cols.to(tl.int64) * PAGE, mask=inside)
    target = row.to(tl.int64) * table_stride + cols
    tl.store(page_table_ptr + target, slots // PAGE, mask=inside)
    if HAS_SWA:
        moved = tl.load(swa_slot_map_ptr + slots, mask=inside)
        tl.store(swa_page_table_ptr + target, moved // PAGE, mask=inside)


def build_decode_metadata(
    *, page_size: int, max_pages: int, seq_len_delta: int = 0, **tensors: torch.Tensor | None
) -> None:
    """As `core.metadata.decode.build_decode_metadata`, all `max_pages` columns, slots >= 0."""
    t = StepTensors(**tensors)
    require_decode_once(t, page_size, seq_len_delta, max_pages)
    require_launchable(t.seq_lens.device)
    has_swa = t.swa_slot_map is not None
    cols, warps = (256, 8) if page_size == 1 and not has_swa else (128, 4)
    batch = len(t.seq_lens)
    grid = (max(1, batch), max(1, triton.cdiv(max_pages, cols)))
    serial_metadata_kernel[grid](
        *t[:-1],
        batch,
        max_pages if batch else 0,
        t.req_to_token.shape[1],
        t.page_table.shape[1],
        DELTA=seq_len_delta,
        PAGE=page_size,
        HAS_SWA=has_swa,
        COLS=cols,
        num_warps=warps,
    )
