"""Decode metadata in one launch: lengths, their prefix sum, and every request's page table.

- `cache_seqlens[i] = seq_lens[i] + delta`
- `cu_seqlens_k[i + 1] = sum(seq_lens[: i + 1] + delta)`
- `page_table[i, p] = req_to_token[req_pool_indices[i], p * page_size] // page_size`
- `swa_page_table[i, p] = swa_slot_map[that slot] // page_size`

for `p < min(max_pages, ceil(cache_seqlens[i] / page_size))`.

Program 0 writes the lengths and scans them, block by block; nobody waits for it. The others copy
pages: a row's programs take its blocks of columns in turn and stop at the last live page, so work
follows the lengths and not the table's width.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .device import copy_row, scan_width, wait_for_predecessor, write_lengths
from .launch import Derived, Grid, Launcher
from .require import StepTensors, require_decode, row_stride

MANY_ROWS = 1024


class Tiling(NamedTuple):
    """Columns of a block, warps of a program, and blocks that a program takes in turn."""

    cols: int
    warps: int
    turns: int


SHORT_ROWS = Tiling(128, 1, 4)
COPY_SMALL, COPY_LARGE = Tiling(1024, 4, 1), Tiling(2048, 4, 2)
GATHER_SMALL, GATHER_LARGE, GATHER_HUGE = Tiling(128, 4, 1), Tiling(256, 8, 4), Tiling(512, 8, 4)


def tiling_of(batch: int, max_pages: int, page_size: int) -> Tiling:
    """How rows are cut into programs.

    Found by hand on an H200, over 29 sizes, without a record: where one is wrong, study
    `decode_metadata` shows it as a size at which a rival is faster. Many short rows are bound by
    the rate at which programs start, a small table by latency (a thread a word), a large one by
    traffic (fewer and longer programs).
    """
    if batch >= MANY_ROWS and max_pages <= (512 if page_size == 1 else 1024):
        return SHORT_ROWS
    words = batch * max_pages
    if page_size == 1:
        return COPY_SMALL if words <= 2**20 else COPY_LARGE
    if words <= 2**17:
        return GATHER_SMALL
    return GATHER_LARGE if words <= 2**22 else GATHER_HUGE


@triton.jit(do_not_specialize=["batch", "delta", "max_pages", "pool_rows", "num_slots"])
def decode_metadata_kernel(
    # inputs
    seq_lens_ptr,  # [batch] int32 or int64
    req_pool_indices_ptr,  # [batch] int32 or int64
    req_to_token_ptr,  # [pool_rows, token_stride] int32
    # outputs
    cache_seqlens_ptr,  # [batch] int32
    cu_seqlens_k_ptr,  # [batch + 1] int32
    page_table_ptr,  # [batch, table_stride] int32
    # of a sliding window, both or neither: an input and an output
    swa_slot_map_ptr,  # [num_slots] int32 or int64
    swa_page_table_ptr,  # as page_table
    # sizes
    batch,
    delta,
    max_pages,
    pool_rows,
    num_slots,
    token_stride,
    table_stride,
    # structure
    SHIFT: tl.constexpr,
    HAS_SWA: tl.constexpr,
    VECTOR: tl.constexpr,
    SCAN: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_decode_metadata`; SHIFT = log2(page_size), blocks of COLS columns."""
    wait_for_predecessor(OVERLAP)
    if tl.program_id(0) == 0:
        if tl.program_id(1) == 0:
            write_lengths(seq_lens_ptr, cache_seqlens_ptr, cu_seqlens_k_ptr, batch, delta, SCAN)
    else:
        row = tl.program_id(0) - 1
        inputs = (seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr)
        tables = (page_table_ptr, swa_slot_map_ptr, swa_page_table_ptr)
        sizes = (delta, max_pages, pool_rows, num_slots, token_stride, table_stride)
        copy_row(row, *inputs, *tables, *sizes, SHIFT, HAS_SWA, VECTOR, COLS)


def derive(t: StepTensors, page_size: int, lead: int = 1, flags: tuple[Any, ...] = ()) -> Derived:
    """The launch of a kernel that copies rows, after `lead` programs of dimension 0.

    `flags` are constants of the kernel between SCAN and COLS.
    """
    batch, (pool_rows, max_ctx) = len(t.seq_lens), t.req_to_token.shape
    strides = row_stride(t.req_to_token), row_stride(t.page_table)
    num_slots = 0 if t.swa_slot_map is None else len(t.swa_slot_map)
    vector = 1 if any(words % 4 for words in (max_ctx, *strides)) else 4
    shift = page_size.bit_length() - 1
    constants = (shift, t.swa_slot_map is not None, vector, scan_width(batch), *flags)

    def cut(seq_len_delta: int, max_pages: int) -> tuple[Grid, tuple[Any, ...], int]:
        cols, warps, turns = tiling_of(batch, max_pages, page_size)
        programs = -(-max_pages // (cols * turns)) or 1
        return (lead + batch, programs), (*constants, cols), warps

    return Derived(batch, (pool_rows, num_slots, *strides), cut)


LAUNCHER = Launcher(decode_metadata_kernel, StepTensors, require_decode, derive)


def build_decode_metadata(
    *,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
    swa_slot_map: torch.Tensor | None = None,
    swa_page_table: torch.Tensor | None = None,
) -> None:
    """Lengths, their prefix sum and page tables of a decode step, in place, in one launch.

    | argument | shape, dtype | |
    |---|---|---|
    | `seq_lens` | [bs] int32 or int64 | tokens in the cache before `seq_len_delta` |
    | `req_pool_indices` | [bs] int32 or int64 | each request's row of `req_to_token` |
    | `req_to_token` | [pool, max_ctx] int32 | KV slot of each token; -1: none |
    | `cache_seqlens` | [bs] int32, out | `seq_lens + seq_len_delta` |
    | `cu_seqlens_k` | [bs + 1] int32, out | 0 and their running sums |
    | `page_table` | [bs, >= max_pages] int32, out | first slot of each page // page_size |
    | `page_size` | power of two | tokens of a KV page |
    | `max_pages` | int >= 0 | columns that may be written |
    | `seq_len_delta` | int >= 0 | added to every length |
    | `swa_slot_map` | [slots] int32 or int64 | slot of the full pool -> slot of the window's pool |
    | `swa_page_table` | as `page_table`, out | of the translated slots; with the map, or neither |

    Columns past a row's live pages, ceil((seq_len + delta) / page_size), and from `max_pages` on
    are left untouched: consumers bound their reads by `cache_seqlens`. Slots are translated, then
    divided; slot -1 stays -1. A pool row outside `req_to_token` gives pages of -1, a slot outside
    the map too: neither is read.

    `cache_seqlens` may be `seq_lens` itself where those are int32 and the delta is 0, as SGLang has
    it under CUDA graphs: every word then becomes what it is, whoever reads it meanwhile.

    Else as all of `core.metadata`. Semantics: SGLang's `normal_decode_set_metadata`, with its
    live-page bound of 0.5.18 and later.
    """
    inputs = (seq_lens, req_pool_indices, req_to_token)
    outputs = (cache_seqlens, cu_seqlens_k, page_table)
    tensors = (*inputs, *outputs, swa_slot_map, swa_page_table)
    LAUNCHER.launch(tensors, (page_size,), (seq_len_delta, max_pages))
