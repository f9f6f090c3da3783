"""Decode metadata in one launch: lengths, their prefix sum, and every request's page table.

One Triton kernel. Program 0 writes the lengths and scans them, block by block; nobody waits for
it. The others copy pages: a row's programs take its blocks of columns in turn and stop at the last
live page, so work follows the lengths and not the table's width. A row needs nothing from the
prefix sum, which is why the scan is off every other program's path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import DirectLaunches, Known, remember, require_launchable
from .lengths import scan_width, write_lengths
from .require import MAX_INT32, require_decode, signature
from .rows import copy_row

MANY_ROWS = 1024


class Tiling(NamedTuple):
    """Columns a block, warps a program, and blocks that a program takes in turn."""

    cols: int
    warps: int
    turns: int


SHORT_ROWS = Tiling(128, 1, 4)
COPY_SMALL, COPY_LARGE = Tiling(1024, 4, 1), Tiling(2048, 4, 2)
GATHER_SMALL, GATHER_LARGE, GATHER_HUGE = Tiling(128, 4, 1), Tiling(256, 8, 4), Tiling(512, 8, 4)


def tiling_of(batch: int, max_pages: int, page_size: int) -> Tiling:
    """How rows are cut into programs; limits found on an H200 over 29 sizes.

    Many short rows are bound by the rate at which programs start: one warp each. A small table is
    latency, so every word gets a thread of its own at once; a large one traffic, so that fewer and
    longer programs win. At page_size 1 a row is copied in vectors, else gathered word by word.
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
    seq_lens,
    req_pool_indices,
    req_to_token,
    cache_seqlens,
    cu_seqlens_k,
    page_table,
    swa_slot_map,
    swa_page_table,
    batch,
    delta,
    max_pages,
    pool_rows,
    num_slots,
    token_stride,
    table_stride,
    SHIFT: tl.constexpr,
    HAS_SWA: tl.constexpr,
    VECTOR: tl.constexpr,
    SCAN: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_decode_metadata`; SHIFT = log2(page_size), COLS columns a block."""
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if tl.program_id(0) == 0:
        if tl.program_id(1) == 0:
            write_lengths(seq_lens, cache_seqlens, cu_seqlens_k, batch, delta, SCAN)
    else:
        copy_row(
            tl.program_id(0) - 1,
            seq_lens,
            req_pool_indices,
            req_to_token,
            page_table,
            swa_slot_map,
            swa_page_table,
            delta,
            max_pages,
            pool_rows,
            num_slots,
            token_stride,
            table_stride,
            SHIFT,
            HAS_SWA,
            VECTOR,
            COLS,
        )


_KNOWN: dict[tuple[Any, ...], Known] = {}


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
    | `seq_len_delta` | int >= 0 | a runtime value: another one compiles nothing |
    | `swa_slot_map` | [slots] int32 | slot of the full pool -> slot of the window's pool |
    | `swa_page_table` | as `page_table`, out | of the translated slots; with the map, or neither |

    Columns past a row's live pages, ceil((seq_len + delta) / page_size), and from `max_pages` on
    are left untouched: consumers bound their reads by `cache_seqlens`. Slots are translated, then
    divided; slot -1 stays -1. A pool row outside `req_to_token` gives pages of -1, a slot outside
    the map too: neither is read.

    All tensors contiguous, on one device. Raises ValueError or TypeError naming the argument before
    anything is launched. Capturable: a replay reads lengths and rows as they are then. Semantics:
    SGLang's `normal_decode_set_metadata`, with its live-page bound of 0.5.18 and later.
    """
    tensors = (
        seq_lens,
        req_pool_indices,
        req_to_token,
        cache_seqlens,
        cu_seqlens_k,
        page_table,
        swa_slot_map,
        swa_page_table,
    )
    known = _KNOWN.get(signature(tensors, page_size))
    # What a signature does not hold is looked at in every call.
    if (
        known is None
        or type(max_pages) is not int
        or not 0 <= max_pages <= known.reachable
        or type(seq_len_delta) is not int
        or not 0 <= seq_len_delta <= MAX_INT32
        or seq_lens.data_ptr() == cache_seqlens.data_ptr()
    ):
        known = _check(tensors, page_size, max_pages, seq_len_delta)
    tiling = tiling_of(known.batch, max_pages, page_size)
    programs = -(-max_pages // (tiling.cols * tiling.turns)) or 1
    grid = (1 + known.batch, programs)
    numbers = (known.batch, seq_len_delta, max_pages, *known.scalars)
    known.launches(grid, tensors, numbers, (*known.constants, tiling.cols), tiling.warps)


def _check(tensors: tuple[Any, ...], page_size: int, max_pages: int, seq_len_delta: int) -> Known:
    known = checked(tensors, page_size, max_pages, seq_len_delta)
    return remember(_KNOWN, signature(tensors, page_size), known)


def checked(tensors: tuple[Any, ...], page_size: int, max_pages: int, seq_len_delta: int) -> Known:
    """What follows from arguments of `build_decode_metadata`, which may raise as it does.

    `tensors` are the first eight parameters of its kernel, in order.
    """
    names = decode_metadata_kernel.arg_names[: len(tensors)]
    reachable = require_decode(
        **dict(zip(names, tensors, strict=True)),
        page_size=page_size,
        max_pages=max_pages,
        seq_len_delta=seq_len_delta,
    )
    require_launchable(tensors[0].device)
    return _derive(tensors, page_size, reachable)


def _derive(tensors: tuple[Any, ...], page_size: int, reachable: int) -> Known:
    batch, (pool_rows, max_ctx), columns = len(tensors[0]), tensors[2].shape, tensors[5].shape[1]
    slot_map = tensors[6]
    num_slots = 0 if slot_map is None else len(slot_map)
    vector = 1 if max_ctx % 4 or columns % 4 else 4
    return Known(
        batch=batch,
        reachable=reachable,
        scalars=(pool_rows, num_slots, max_ctx, columns),
        constants=(page_size.bit_length() - 1, slot_map is not None, vector, scan_width(batch)),
        launches=DirectLaunches(decode_metadata_kernel, tensors[0].device),
    )
