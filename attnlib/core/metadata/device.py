"""Device functions of the metadata kernels.

FlashAttention-3 sorts its requests. Here a request's place is the number of those ahead of it,
counted, so programs need nothing from each other and equal requests keep their order.
"""

import triton
import triton.language as tl

from ..schedule.splits import BATCHES_PER_CTA
from ..spec import INT32_MAX

MAX_SCAN = 4096
"""Lengths scanned at once; a larger batch takes several turns."""
MAX_PART = 512
"""Requests that others are compared with at once; more take several turns, in as few registers."""
PER_WARP = 256
"""Requests that a warp compares others with: one warp alone takes too long for a thousand."""
CTA = tl.constexpr(BATCHES_PER_CTA)
LONGEST = tl.constexpr(INT32_MAX)
"""A length beyond it counts as it."""
ROWS = tl.constexpr(8)
"""Requests that one program schedules. A block lies in one CTA's share of the library's order."""


def scan_width(batch: int) -> int:
    """Lengths per turn for a batch: a power of two in 32..MAX_SCAN."""
    return min(MAX_SCAN, max(32, triton.next_power_of_2(batch)))


def span_width(batch: int) -> int:
    """Requests that one is ordered among, with room: a power of two from 32 on."""
    return max(32, triton.next_power_of_2(min(batch, BATCHES_PER_CTA)))


def part_width(span: int) -> int:
    """Of those, the requests that are compared at once."""
    return min(MAX_PART, span)


@triton.jit
def wait_for_predecessor(OVERLAP: tl.constexpr):
    """Where launches overlap: let the next kernel start, and wait for the previous one."""
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def as_int32(lens, delta):
    """Lengths + delta, int32, held within its range: an int64 length must not wrap."""
    lens = tl.maximum(lens, -LONGEST)
    lens = tl.minimum(lens, -delta + LONGEST)
    return lens.to(tl.int32) + delta


@triton.jit
def pages_of(lens, SHIFT: tl.constexpr):
    """Pages of 2^SHIFT tokens that hold `lens`; none below one token. A sum with the page size
    would leave int32."""
    return ((tl.maximum(lens, 0) - 1) >> SHIFT) + 1


@triton.jit
def load_lengths(seq_lens_ptr, rows, end, delta):
    """Lengths + delta of `rows`, int32; 0 from row `end` on, where nothing is read."""
    lens = tl.load(seq_lens_ptr + rows, mask=rows < end, other=-delta)
    return as_int32(lens, delta)


@triton.jit
def write_lengths(
    seq_lens_ptr, cache_seqlens_ptr, cu_seqlens_k_ptr, batch, delta, SCAN: tl.constexpr
):
    """`cache_seqlens` = lengths + delta, `cu_seqlens_k` = 0 and their running sums; int32."""
    tl.store(cu_seqlens_k_ptr, 0)
    total = 0
    for start in range(0, batch, SCAN):
        rows = start + tl.arange(0, SCAN)
        lens = load_lengths(seq_lens_ptr, rows, batch, delta)
        tl.store(cache_seqlens_ptr + rows, lens, mask=rows < batch)
        after = cu_seqlens_k_ptr + 1 + rows
        tl.store(after, total + tl.cumsum(lens, 0), mask=rows < batch)
        total += tl.sum(lens, 0)


@triton.jit
def store_live(target, cols, values, live, VECTOR: tl.constexpr):
    """Store `values` in columns below `live`: whole vectors first, so that those stay vectors."""
    whole = tl.multiple_of(live // VECTOR * VECTOR, VECTOR)
    tl.store(target + cols, values, mask=cols < whole)
    if VECTOR > 1:
        tl.store(target + cols, values, mask=(cols >= whole) & (cols < live))


@triton.jit
def write_pages(
    row,
    seq_lens_ptr,
    req_pool_indices_ptr,
    req_to_token_ptr,
    page_table_ptr,
    swa_slot_map_ptr,
    swa_page_table_ptr,
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
    """The live pages of request `row`, in blocks of COLS columns that its programs share."""
    length = as_int32(tl.load(seq_lens_ptr + row), delta)
    pool_row = tl.load(req_pool_indices_ptr + row).to(tl.int64)
    in_pool = (pool_row >= 0) & (pool_row < pool_rows)
    # VECTOR divides both strides: rows of any such width are read and written in vectors.
    tokens = req_to_token_ptr + tl.multiple_of(pool_row * token_stride, VECTOR)
    target = tl.multiple_of(row.to(tl.int64) * table_stride, VECTOR)
    live = tl.minimum(pages_of(length, SHIFT), max_pages)
    readable = tl.multiple_of((live + VECTOR - 1) // VECTOR * VECTOR, VECTOR)
    step = tl.num_programs(1) * COLS
    for start in range(tl.program_id(1) * COLS, live, step):
        cols = tl.multiple_of(start, COLS) + tl.arange(0, COLS)
        inside = cols < (readable if SHIFT == 0 else live)
        first_tokens = tokens + (cols.to(tl.int64) << SHIFT)
        slots = tl.load(first_tokens, mask=inside & in_pool, other=-1)
        store_live(page_table_ptr + target, cols, slots >> SHIFT, live, VECTOR)
        if HAS_SWA:
            mapped = (cols < live) & (slots >= 0) & (slots < num_slots)
            moved = tl.load(swa_slot_map_ptr + slots, mask=mapped, other=-1)
            moved = moved.to(tl.int32) >> SHIFT
            store_live(swa_page_table_ptr + target, cols, moved, live, VECTOR)


@triton.jit
def write_schedule(
    block,
    kind_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    words_ptr,
    batch,
    delta,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The words of requests `block` * ROWS and up; SPAN holds all that they are ordered among.

    `kind_ptr` is a row of `kinds.StepSchedules.table`, which no kernel writes: it is read before
    the wait. The others are read in parts of PART, so that few registers hold them.
    """
    split_cap = tl.load(kind_ptr)
    query_tokens = tl.load(kind_ptr + 1)
    token_rows = tl.load(kind_ptr + 2)
    block_m = tl.load(kind_ptr + 3)
    block_n = tl.load(kind_ptr + 4)
    heads = tl.load(kind_ptr + 5)
    sms = tl.load(kind_ptr + 6)
    l2_blocks = tl.load(kind_ptr + 7)
    unpacked = tl.load(kind_ptr + 8)
    sorts = tl.load(kind_ptr + 9) != 0
    swizzles = tl.load(kind_ptr + 10) != 0
    words_ptr += tl.load(kind_ptr + 11)
    wait_for_predecessor(OVERLAP)
    rows = block * ROWS + tl.arange(0, ROWS)
    first = block * ROWS // CTA * CTA
    end = tl.minimum(batch, first + CTA)
    live = rows < batch
    blocks = kv_blocks(seq_lens_ptr, rows, live, delta, block_n)
    m_blocks = query_blocks(cu_seqlens_q_ptr, rows, live, query_tokens, token_rows, block_m)
    tiles = tl.zeros([PART], tl.int32)
    for start in range(0, SPAN, PART):
        others = first + start + tl.arange(0, PART)
        inside = others < end
        n = kv_blocks(seq_lens_ptr, others, inside, delta, block_n)
        m = query_blocks(cu_seqlens_q_ptr, others, inside, query_tokens, token_rows, block_m)
        tiles += n * m
    # In float32 and in this order: the library rounds after each step.
    work = tl.sum(tiles, 0).to(tl.float32) * 1.1 * heads.to(tl.float32)
    share = tl.ceil(tl.div_rn(work, sms.to(tl.float32)))
    share = tl.maximum(share.to(tl.int32), 1)
    splits = splits_of(blocks, share, split_cap)
    split_blocks = (blocks + splits - 1) // splits
    places = rows
    if sorts:
        keys = order_keys(split_blocks, m_blocks, block_n, block_m, swizzles)
        ahead = tl.zeros([ROWS, PART], tl.int32)
        for start in range(0, SPAN, PART):
            others = first + start + tl.arange(0, PART)
            inside = others < end
            n = kv_blocks(seq_lens_ptr, others, inside, delta, block_n)
            m = query_blocks(cu_seqlens_q_ptr, others, inside, query_tokens, token_rows, block_m)
            others_splits = splits_of(n, share, split_cap)
            n = (n + others_splits - 1) // others_splits
            others_keys = order_keys(n, m, block_n, block_m, swizzles)
            others_keys = tl.where(inside, others_keys, -LONGEST)
            earlier = others[None, :] < rows[:, None]
            is_ahead = others_keys[None, :] > keys[:, None]
            is_ahead |= (others_keys[None, :] == keys[:, None]) & earlier
            ahead += is_ahead.to(tl.int32)
        places = tl.where(live, first + tl.sum(ahead, 1), rows)
    padded = (batch + 3) // 4 * 4
    room = rows < padded
    tl.store(words_ptr + places, tl.where(live, splits, 0), mask=room)
    target = words_ptr + padded + places
    tl.store(target, tl.where(live, m_blocks, 0), mask=room)
    words = 2 * padded
    if sorts:
        target = words_ptr + words + places
        tl.store(target, tl.where(live, rows, 0), mask=room)
        words += padded
    if swizzles:
        fit = l2_blocks // tl.maximum(split_blocks, 1)
        in_l2 = tl.where(fit >= 2, 2, 1)
        in_l2 = tl.where(fit >= 4, 4, in_l2)
        in_l2 = tl.where(fit >= 8, 8, in_l2)
        in_l2 = tl.where(fit >= 16, 16, in_l2)
        in_l2 = tl.minimum(in_l2 * unpacked, heads)
        target = words_ptr + words + places
        tl.store(target, tl.where(live, in_l2, 0), mask=room)
        words += padded
    if block == 0:
        tl.store(words_ptr + words, 0)


@triton.jit
def splits_of(blocks, share, split_cap):
    """Splits of requests of `blocks` KV blocks, each of about `share` of them."""
    splits = tl.minimum((blocks + share - 1) // share, split_cap)
    return tl.maximum(splits, 1)


@triton.jit
def order_keys(split_blocks, m_blocks, block_n, block_m, swizzles):
    """What requests are ordered by, largest first."""
    keys = split_blocks
    if swizzles:  # of what is sorted, a causal mask alone
        keys = keys * block_n - m_blocks * block_m
    return keys


@triton.jit
def kv_blocks(seq_lens_ptr, rows, inside, delta, block_n):
    """Blocks of `block_n` tokens that each of `rows` has; 0 outside."""
    lens = as_int32(tl.load(seq_lens_ptr + rows, mask=inside, other=-delta), delta)
    return (lens + block_n - 1) // block_n


@triton.jit
def query_blocks(cu_seqlens_q_ptr, rows, inside, tokens, token_rows, block_m):
    """Tiles of `block_m` query rows: of `tokens` for all requests, or of each one's own."""
    if cu_seqlens_q_ptr is not None:
        end = tl.load(cu_seqlens_q_ptr + rows + 1, mask=inside, other=0)
        tokens = end - tl.load(cu_seqlens_q_ptr + rows, mask=inside, other=0)
    return (tokens * token_rows + block_m - 1) // block_m
