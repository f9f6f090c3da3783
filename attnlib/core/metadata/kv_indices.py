"""FlashInfer's page arrays in one launch: `kv_indptr`, `kv_indices` and `kv_last_page_len`.

- `pages[i] = min(max_pages, ceil((seq_lens[i] + delta) / page_size))`
- `kv_indptr[i + 1] = sum(pages[: i + 1])`
- `kv_indices[kv_indptr[i] + p] = req_to_token[req_pool_indices[i], p * page_size] // page_size`
- `kv_last_page_len[i] = min(page_size, seq_lens[i] + delta - (pages[i] - 1) * page_size)`

Semantics: SGLang's cumulative sum and `create_flashinfer_kv_indices_triton`, which know page size 1
only, with FlashInfer's `plan` for the other page sizes.

A request that `max_pages` cuts off ends in a full page, so the three arrays always agree on its
length. Slot -1 gives page -1, and so does a pool row outside `req_to_token`, which is not read. An
empty request has no page and a last page of 0 tokens: FlashInfer's kernels do not read it, and its
`get_seq_lens` adds it to 0 full pages.

Words of `kv_indices` from `kv_indptr[bs]` on are left untouched. Pages that do not fit are dropped:
the host cannot know the sum of the pages, and engines share a buffer smaller than bs * max_pages.
`kv_indptr` counts dropped pages too, so `kv_indptr[bs] > capacity` shows it. A sum beyond int32
raises an error, by bs * max_pages. With `kv_start` lengths count from there: a sliding window's
beginning, or an encoder's end. Tokens outside a row of `req_to_token` give page -1 and are not
read.

A row's pages start where those of the rows before it end. Every program sums the lengths before its
own rows itself: they lie in the L2 cache, and to wait for another program would cost more. Program
0 scans them all and writes the two small arrays.

A program loads its first pages while it sums, and takes several rows of a large batch. A row starts
at any word of `kv_indices`, so lanes take neighbouring words, one each.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..spec import INT32_MAX, ceil_div
from .device import load_lengths, pages_of, scan_width, wait_for_predecessor
from .launch import Cut, Launch, Launcher
from .require import (
    PageArrays,
    kept_apart,
    page_bounds,
    require_kv_indices,
    row_stride,
    tensors_named,
    values_of,
)

OUTPUTS = ("kv_indptr", "kv_indices", "kv_last_page_len")
SMALL_GRID = 1024
"""Tiles up to which each has a program of its own. Chosen by hand on an H200, as the sizes below;
study `page_arrays` shows where one is wrong."""
FEW_PAGES = 512
REQUESTS_PER_ROW = 512
MANY_REQUESTS = 1024
"""A program copies several rows of a large batch, or the sum of the lengths would outlast the copy.
Rows of up to `FEW_PAGES` pages: one for each `REQUESTS_PER_ROW` requests of the batch. Longer rows:
two from more than `MANY_REQUESTS` requests on."""
WARPS = 4
PAGES_AT_ONCE = 1024
LENGTHS_PER_WARP = 512
"""Lengths scanned at once: with twice as many, registers halve the programs that are resident."""


@triton.jit
def live_pages(lens, max_pages, SHIFT: tl.constexpr, WHOLE: tl.constexpr):
    """Pages of requests of these lengths, in 0..max_pages; WHOLE: none of a request that has more,
    instead of its first."""
    pages = pages_of(lens, SHIFT)
    return tl.where(pages > max_pages, 0 if WHOLE else max_pages, pages)


@triton.jit
def pages_before(
    seq_lens_ptr,
    end,
    delta,
    max_pages,
    SHIFT: tl.constexpr,
    SCAN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Pages of the requests before `end`."""
    total = 0
    for start in range(0, end, SCAN):
        lens = load_lengths(seq_lens_ptr, start + tl.arange(0, SCAN), end, delta)
        total += tl.sum(live_pages(lens, max_pages, SHIFT, WHOLE), 0)
    return total


@triton.jit
def load_slots(tokens, cols, readable, SHIFT: tl.constexpr):
    """First slots of pages `cols` [COLS] of each row of `tokens` [ROWS]; -1 past `readable`."""
    first_tokens = cols.to(tl.int64) << SHIFT
    live = cols[None, :] < readable[:, None]
    slots = tokens[:, None] + first_tokens[None, :]
    return tl.load(slots, mask=live, other=-1)


@triton.jit
def write_pages(
    part,
    seq_lens_ptr,
    req_pool_indices_ptr,
    req_to_token_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    kv_last_page_len_ptr,
    batch,
    all_rows,
    delta,
    max_pages,
    pool_rows,
    token_stride,
    capacity,
    SHIFT: tl.constexpr,
    SCAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr = False,
    kv_start_ptr=None,
    max_ctx=0,
):
    """The arrays, by parts: part 0 writes `kv_indptr` and `kv_last_page_len`, block by block (rows
    from `batch` on are empty), and each later part the pages of ROWS requests. Programs of
    dimension 1 share a part's pages. Without `req_pool_indices` the other table is a block table:
    a page per word, rows in the order of the batch."""
    begin = tl.program_id(1) * COLS
    if part == 0:
        if begin == 0:
            tl.store(kv_indptr_ptr, 0)
            total = 0
            for start in range(0, all_rows, SCAN):
                rows = start + tl.arange(0, SCAN)
                lens = load_lengths(seq_lens_ptr, rows, batch, delta)
                pages = live_pages(lens, max_pages, SHIFT, WHOLE)
                if kv_last_page_len_ptr is not None:
                    last = tl.minimum(lens - ((pages - 1) << SHIFT), 1 << SHIFT)
                    last = tl.where(pages > 0, last, 0)
                    tl.store(kv_last_page_len_ptr + rows, last, mask=rows < all_rows)
                sums = total + tl.cumsum(pages, 0)
                tl.store(kv_indptr_ptr + 1 + rows, sums, mask=rows < all_rows)
                total += tl.sum(pages, 0)
    else:
        first = (part - 1) * ROWS
        rows = first + tl.arange(0, ROWS)
        lens = load_lengths(seq_lens_ptr, rows, batch, delta)
        pages = live_pages(lens, max_pages, SHIFT, WHOLE)
        longest = tl.max(pages, 0)
        if begin < longest:
            PER_WORD: tl.constexpr = 0 if req_pool_indices_ptr is None else SHIFT
            if req_pool_indices_ptr is None:
                pool = rows.to(tl.int64)
            else:
                pool = tl.load(req_pool_indices_ptr + rows, mask=rows < batch, other=-1)
                pool = pool.to(tl.int64)
            readable = tl.where((pool >= 0) & (pool < pool_rows), pages, 0)
            tokens = req_to_token_ptr + pool * token_stride
            if kv_start_ptr is not None:
                moved = tl.load(kv_start_ptr + rows, mask=rows < batch, other=0)
                moved = moved.to(tl.int64)
                inside = (moved >= 0) & (moved < max_ctx)
                remaining = (max_ctx - moved + ((1 << SHIFT) - 1)) >> SHIFT
                readable = tl.where(inside, tl.minimum(readable, remaining), 0)
                tokens += moved
            slots = load_slots(tokens, begin + tl.arange(0, COLS), readable, PER_WORD)
            before = pages_before(seq_lens_ptr, first, delta, max_pages, SHIFT, SCAN, WHOLE)
            starts = tl.zeros_like(pages) + before
            if ROWS > 1:
                above = first + tl.arange(0, ROWS)
                lens = load_lengths(seq_lens_ptr, above, batch, delta)
                taller = live_pages(lens, max_pages, SHIFT, WHOLE)
                earlier = above[None, :] < rows[:, None]
                starts += tl.sum(tl.where(earlier, taller[None, :], 0), 1)
            step = tl.num_programs(1) * COLS
            for start in range(begin, longest, step):
                cols = start + tl.arange(0, COLS)
                words = starts[:, None] + cols[None, :]
                live = (cols[None, :] < pages[:, None]) & (words < capacity)
                tl.store(kv_indices_ptr + words, slots >> PER_WORD, mask=live)
                slots = load_slots(tokens, cols + step, readable, PER_WORD)


# Not specialised on sizes: a new size compiles nothing, a stride of 16 words gets no wide loads.
@triton.jit(
    do_not_specialize=[
        "delta",
        "max_pages",
        "batch",
        "pool_rows",
        "token_stride",
        "capacity",
        "max_ctx",
    ]
)
def kv_indices_kernel(
    # inputs
    seq_lens_ptr,  # [batch] int32 or int64
    req_pool_indices_ptr,  # [batch] int32 or int64
    req_to_token_ptr,  # [pool_rows, token_stride] int32
    # outputs
    kv_indptr_ptr,  # [batch + 1] int32
    kv_indices_ptr,  # [capacity] int32
    kv_last_page_len_ptr,  # [batch] int32, or none
    kv_start_ptr,  # [batch] int32 or int64, or none; an input
    # numbers
    delta,
    max_pages,
    # sizes
    batch,
    pool_rows,
    token_stride,
    capacity,
    max_ctx,
    # structure
    SHIFT: tl.constexpr,
    SCAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_kv_indices`; SHIFT = log2(page_size), tiles of ROWS x COLS pages."""
    wait_for_predecessor(OVERLAP)
    write_pages(
        tl.program_id(0),
        seq_lens_ptr,
        req_pool_indices_ptr,
        req_to_token_ptr,
        kv_indptr_ptr,
        kv_indices_ptr,
        kv_last_page_len_ptr,
        batch,
        batch,
        delta,
        max_pages,
        pool_rows,
        token_stride,
        capacity,
        SHIFT,
        SCAN,
        ROWS,
        COLS,
        False,
        kv_start_ptr,
        max_ctx,
    )


def launch_of(t: PageArrays, page_size: int) -> Launch:
    """The launch of the kernel; a program takes several tiles in turn where the grid is large."""
    batch = len(t.seq_lens)
    pool_rows, max_ctx = t.req_to_token.shape
    scan = min(scan_width(batch), LENGTHS_PER_WARP * WARPS)

    def cut(seq_len_delta: int, max_pages: int) -> Cut:
        if max_pages > FEW_PAGES:
            rows = 1 if batch <= MANY_REQUESTS else 2
            cols = PAGES_AT_ONCE
            turns = 2 * rows
        else:
            wanted = max(1, ceil_div(batch, REQUESTS_PER_ROW))
            rows = min(8, triton.next_power_of_2(wanted))
            cols = PAGES_AT_ONCE // rows
            turns = rows
        groups = ceil_div(batch, rows)
        blocks = ceil_div(max_pages, cols)
        if groups * blocks > SMALL_GRID:
            blocks = ceil_div(blocks, turns)
        constants = (page_size.bit_length() - 1, scan, rows, cols)
        return (1 + groups, max(1, blocks)), constants, WARPS

    room = INT32_MAX // max(1, batch)
    reason = f"int32 counts the pages of {batch} requests"
    capacity = min(len(t.kv_indices), INT32_MAX)
    return Launch(
        bounds=page_bounds(t, page_size, room, reason),
        apart=kept_apart(t._asdict(), OUTPUTS),
        sizes=(batch, pool_rows, row_stride(t.req_to_token), capacity, max_ctx),
        cut=cut,
    )


def prepare(t: PageArrays, page_size: int) -> Launch:
    """The launch of `build_kv_indices`, or the error for wrong tensors."""
    require_kv_indices(t, page_size)
    return launch_of(t, page_size)


LAUNCHER = Launcher(kv_indices_kernel, prepare)


def build_kv_indices(
    *,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
    check: bool = False,
    **tensors: Tensor | None,
) -> None:
    """FlashInfer's description of a paged KV cache, in place, in one launch.

    Values that are out of range: see the module. What holds for all builders: `core.metadata`.

    Parameters
    ----------
    page_size : int
        A power of two.
    max_pages : int
        Pages of a request from here on are cut off.
    seq_len_delta : int
        At least 0; added to every length.
    check : bool
        Whether values are looked at too: a request that has no room, or is not in the pool, raises
        ValueError. It waits for the GPU, and no graph can capture it.
    seq_lens : Tensor
        [bs] int32 or int64, tokens in the cache before `seq_len_delta`.
    req_pool_indices : Tensor
        [bs] int32 or int64, each request's row of `req_to_token`.
    req_to_token : Tensor
        [pool, max_ctx] int32, KV slot of each token; -1: none.
    kv_indptr : Tensor
        [bs + 1] int32, out: 0 and running sums of the requests' **pages**.
    kv_indices : Tensor
        [capacity] int32, out: their pages, one request after another.
    kv_last_page_len : Tensor, optional
        [bs] int32, out: tokens in the last page, 1..page_size; 0: no page.
    kv_start : Tensor, optional
        [bs] int32 or int64, a request's first token that counts, a multiple of `page_size`.

    Raises
    ------
    ValueError, TypeError
        Before the launch, naming the argument.

    Examples
    --------
    Under TRITON_INTERPRET=1, without a GPU. Two requests of 5 and 2 tokens:

    >>> import torch
    >>> req_to_token = torch.tensor([[0, 1, 2, 3, -1, -1], [8, 9, 10, 11, 12, -1]])
    >>> kv_indptr = torch.zeros(3, dtype=torch.int32)
    >>> kv_indices = torch.full((4,), -1, dtype=torch.int32)
    >>> build_kv_indices(
    ...     page_size=4,
    ...     max_pages=2,
    ...     seq_lens=torch.tensor([5, 2]),
    ...     req_pool_indices=torch.tensor([1, 0]),
    ...     req_to_token=req_to_token.int(),
    ...     kv_indptr=kv_indptr,
    ...     kv_indices=kv_indices,
    ... )
    >>> kv_indptr.tolist(), kv_indices.tolist()
    ([0, 2, 3], [2, 3, 0, -1])
    """
    t: PageArrays = tensors_named(PageArrays, tensors)
    values = None
    if check:
        values = values_of(t, page_size, max_pages, seq_len_delta)
    LAUNCHER.launch(t, (page_size,), (seq_len_delta, max_pages), values)
