"""A request's pages, copied by one Triton program: what the kernels of a step share.

Rows are copied four words at a time. The load is bounded by the row's end rounded up to four, which
stays inside `req_to_token`; the store is exact, in whole vectors and then word by word.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_live(target, cols, values, live, VECTOR: tl.constexpr):
    """Store `values` in columns below `live`: whole vectors first, so that those stay vectors."""
    whole = tl.multiple_of(live // VECTOR * VECTOR, VECTOR)
    tl.store(target + cols, values, mask=cols < whole)
    if VECTOR > 1:
        tl.store(target + cols, values, mask=(cols >= whole) & (cols < live))


@triton.jit
def copy_row(
    row,
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
    SHIFT: tl.constexpr,
    HAS_SWA: tl.constexpr,
    VECTOR: tl.constexpr,
    COLS: tl.constexpr,
):
    """The live pages of request `row`, shared out over the programs of dimension 1."""
    length = tl.load(seq_lens + row).to(tl.int32) + delta
    pool_row = tl.load(req_pool_indices + row).to(tl.int64)
    known = (pool_row >= 0) & (pool_row < pool_rows)
    tokens = req_to_token + pool_row * token_stride
    target = row.to(tl.int64) * table_stride
    live = tl.minimum((length + (1 << SHIFT) - 1) >> SHIFT, max_pages)
    readable = tl.multiple_of((live + VECTOR - 1) // VECTOR * VECTOR, VECTOR)
    for start in range(tl.program_id(1) * COLS, live, tl.num_programs(1) * COLS):
        cols = tl.multiple_of(start, COLS) + tl.arange(0, COLS)
        inside = cols < (readable if SHIFT == 0 else live)
        slots = tl.load(tokens + (cols.to(tl.int64) << SHIFT), mask=inside & known, other=-1)
        store_live(page_table + target, cols, slots >> SHIFT, live, VECTOR)
        if HAS_SWA:
            mapped = (cols < live) & (slots >= 0) & (slots < num_slots)
            moved = tl.load(swa_slot_map + slots, mask=mapped, other=-1)
            store_live(swa_page_table + target, cols, moved >> SHIFT, live, VECTOR)
