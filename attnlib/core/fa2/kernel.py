"""A plan for FlashInfer's fa2 in one launch: the choice of `choice`, the words of `words`.

    parts[i]     = ceil(len[i] / chunk), 0 of an empty request
    o_indptr     = 0 and running sums of parts * q_len
    merge_indptr = 0 and, per query row, running sums of parts
    block j      : of request r its parts, one query tile after another, r after r

Each of `lead` programs chooses for itself, since waiting for another would cost more, then writes
its share of the requests and clears its share of the rest. All words are written in every launch.
Further programs write the page arrays, where those are asked for.
"""

from functools import partial
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..batch import require_tensor
from ..metadata import kv_indices as pages
from ..metadata.device import as_int32
from ..metadata.kv_indices import write_pages
from ..metadata.launch import Bound, Cut, Grid, Launch, Launcher
from ..metadata.require import (
    PageArrays,
    has_separate_rows,
    kept_apart,
    require_kv_indices,
    require_one_device,
    require_values,
    tensors_named,
)
from ..spec import INT32_MAX, ceil_div, require_page_size, require_type
from . import choice
from .choice import PlanShape
from .library import MIN_CHUNK
from .words import WORD, PlanLayout

BLOCK_TOKENS = tl.constexpr(choice.BLOCK_TOKENS)
LONE = tl.constexpr(choice.LONE)
DRAIN = tl.constexpr(choice.DRAIN)
MARGIN = tl.constexpr(choice.MARGIN)
WHOLE = tl.constexpr(choice.WHOLE)
CHUNK_STEP = tl.constexpr(choice.CHUNK_STEP)
BETWEEN = tl.constexpr(choice.BETWEEN)
LEAST = tl.constexpr(MIN_CHUNK)
FAR_AWAY = tl.constexpr(INT32_MAX)

OUTPUTS = ("words", "overflow", *pages.OUTPUTS)
SCORED = 16
"""Requests that a program cuts at once by all candidates."""
WIDE = 256
"""Requests that it reads at once otherwise."""
ROUNDING = tl.constexpr(2.0**23)
"""From here to twice as much all float32 values are whole numbers."""
REQUESTS = 16
"""Requests whose blocks a program writes."""
WIDTH = tl.constexpr(64)
"""Blocks of each that it writes at once."""
BLOCKS = tl.constexpr(128)
"""Unused blocks that it clears at once."""
WARPS = 8
"""Of a program."""
FEW_WARPS = 4
"""The same where at most FEW requests are captured: reductions cross fewer warps."""
FEW = 128


class PlanTensors(NamedTuple):
    """The tensors of `build_fa2_plan`, or none."""

    seq_lens: Any
    words: Any
    overflow: Any = None
    req_pool_indices: Any = None
    req_to_token: Any = None
    block_table: Any = None
    kv_indptr: Any = None
    kv_indices: Any = None
    kv_last_page_len: Any = None


@triton.jit
def given_lengths(seq_lens_ptr, rows, batch, delta):
    """Tokens of requests `rows`, int32; 0 past the batch."""
    lens = tl.load(seq_lens_ptr + rows, mask=rows < batch, other=-delta)
    return tl.maximum(as_int32(lens, delta), 0)


@triton.jit
def counted_lengths(seq_lens_ptr, rows, batch, delta, limit, most):
    """Tokens that blocks read of requests `rows`, int32; 0 past the batch and of a request of more
    than `limit` tokens."""
    lens = given_lengths(seq_lens_ptr, rows, batch, delta)
    return tl.minimum(tl.where(lens > limit, 0, lens), most)


@triton.jit
def parts_of(lens, inverse):
    """ceil(lens / chunk) as float32, given 1 / chunk, without a conversion between float and int.

    0.5 - 0.5 / chunk is added, and the sum rounded by adding and subtracting 2^23. Exact up to 2^21
    tokens, as float32 errs by less than half a token there.
    """
    return lens.to(tl.float32) * inverse + (0.5 - 0.5 * inverse) + ROUNDING - ROUNDING


@triton.jit
def blocks_per_head(
    seq_lens_ptr, chunks, batch, delta, limit, most, N: tl.constexpr, SCORED: tl.constexpr
):
    """`choice.blocks_per_head` as float32: parts of all requests for each of `chunks` [N]."""
    inverse = tl.div_rn(1.0, chunks.to(tl.float32))
    parts = tl.zeros((N, SCORED), tl.float32)
    for start in range(0, batch, SCORED):
        rows = start + tl.arange(0, SCORED)
        lens = counted_lengths(seq_lens_ptr, rows, batch, delta, limit, most)
        parts += parts_of(lens[None, :], inverse[:, None])
    return tl.sum(parts, 1)


@triton.jit
def predicted_time(blocks, chunks, tokens, longest, COPIES: tl.constexpr, SLOTS: tl.constexpr):
    """`choice.predicted_time` in float32, of `blocks` per head that `chunks` cut."""
    blocks = tl.maximum(blocks, 1.0)
    mean_block = tokens / blocks + BLOCK_TOKENS
    longest_block = tl.minimum(chunks, longest).to(tl.float32) + BLOCK_TOKENS
    waves = tl.div_rn(blocks * COPIES, blocks * 0 + SLOTS)  # exact where it is a whole number
    rest = waves - tl.floor(waves)
    has_rest = rest > 0
    lone_wave = tl.sqrt(rest * rest + LONE * LONE) - rest
    last_wave = tl.where(has_rest, lone_wave * mean_block, 0.0)
    even = mean_block / longest_block
    even = even * even * even * even
    drain = even * last_wave + (1 - even) * DRAIN * longest_block
    work = waves * mean_block
    lone = longest_block * LONE
    busy = tl.sqrt(work * work + lone * lone)
    return busy + tl.where(waves > 1, drain, 0.0)


@triton.jit
def whole_pages(tokens, PAGE: tl.constexpr):
    """`choice.in_pages`."""
    return (tokens + (PAGE - 1)) // PAGE * PAGE


@triton.jit
def most_and_all(longest, refused, pages, tokens, longest_2, refused_2, pages_2, tokens_2):
    """Combine what is known of two groups of requests."""
    longest = tl.maximum(longest, longest_2)
    return longest, tl.maximum(refused, refused_2), pages + pages_2, tokens + tokens_2


@triton.jit
def both_sums(first, second, first_2, second_2):
    """Combine two sums of two groups."""
    return first + first_2, second + second_2


@triton.jit
def judged(time, best, fits, cuts, fewest, time_2, best_2, fits_2, cuts_2, fewest_2):
    """Combine two groups of candidates: the fastest with its time, the shortest that fits a wave,
    the longest that does not, and the fewest blocks."""
    best = tl.where(time <= time_2, best, best_2)
    time = tl.minimum(time, time_2)
    fits, cuts = tl.minimum(fits, fits_2), tl.maximum(cuts, cuts_2)
    return time, best, fits, cuts, tl.minimum(fewest, fewest_2)


@triton.jit
def lesser(key, value, key_2, value_2):
    """Of two pairs the one with the lesser key."""
    return tl.minimum(key, key_2), tl.where(key <= key_2, value, value_2)


@triton.jit
def chosen_chunk(
    seq_lens_ptr,
    batch,
    delta,
    limit,
    most,
    max_blocks,
    capacity,
    SHIFT: tl.constexpr,
    PAGE: tl.constexpr,
    Q_TILES: tl.constexpr,
    COPIES: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`choice.choose(...).chunk`, `most`, and what overflows, as scalars.

    The last two are the tokens of the longest request above `limit`, and the pages of all requests
    where they are more than `capacity`: no request has a block then, and `most` is 0.
    """
    # Reductions cross warps: one for all, after the loop.
    longest_of = tl.zeros((WIDE,), tl.int32)
    refused_of = tl.zeros((WIDE,), tl.int32)
    pages_of = tl.zeros((WIDE,), tl.int32)
    tokens_of = tl.zeros((WIDE,), tl.float32)
    for start in range(0, batch, WIDE):
        lens = given_lengths(seq_lens_ptr, start + tl.arange(0, WIDE), batch, delta)
        refused_of = tl.maximum(refused_of, tl.where(lens > limit, lens, 0))
        lens = tl.where(lens > limit, 0, lens)
        pages_of += (lens + ((1 << SHIFT) - 1)) >> SHIFT
        lens = tl.minimum(lens, most)
        longest_of = tl.maximum(longest_of, lens)
        tokens_of += lens.to(tl.float32)
    lanes = (longest_of, refused_of, pages_of, tokens_of)
    longest, refused, pages, tokens = tl.reduce(lanes, 0, most_and_all)
    if pages > capacity:
        longest = 0
        tokens = 0.0
        most = 0
    else:
        pages = 0

    # The candidates, see `choice.candidates`.
    place = tl.arange(0, 2 * WHOLE)
    rung = tl.maximum(place - WHOLE, 0)
    ladder = ((4 + rung % 4) << (rung // 4)) * 32
    equal = (tl.maximum(longest, 1) + place) // (place + 1)
    equal = (equal + CHUNK_STEP - 1) // CHUNK_STEP * CHUNK_STEP
    chunks = tl.maximum(tl.where(place < WHOLE, equal, ladder), LEAST)
    chunks = whole_pages(chunks, PAGE)
    uncut = (tl.maximum(longest, 1) + CHUNK_STEP - 1) // CHUNK_STEP * CHUNK_STEP
    uncut = whole_pages(tl.maximum(uncut, LEAST), PAGE)
    limits = (batch, delta, limit, most)
    blocks = blocks_per_head(seq_lens_ptr, chunks, *limits, 2 * WHOLE, SCORED)
    time = predicted_time(blocks, chunks, tokens, longest, COPIES, SLOTS)
    time = tl.where(blocks * Q_TILES <= max_blocks, time, float("inf"))
    wave: tl.constexpr = SLOTS // COPIES
    fits = tl.where(blocks <= wave, chunks, FAR_AWAY)
    cuts = tl.where(blocks > wave, chunks, LEAST - 1)
    known = (time, chunks, fits, cuts, blocks)
    best_time, best, high, low, fewest = tl.reduce(known, 0, judged)

    # FlashInfer's own, see `choice.library_chunk`.
    if fewest <= wave:
        steps = (high - low) * (tl.arange(0, BETWEEN) + 1)
        between = low + (steps + (BETWEEN - 1)) // BETWEEN
        between = whole_pages(between, PAGE)
        counts = blocks_per_head(seq_lens_ptr, between, *limits, BETWEEN, SCORED)
        between_time = predicted_time(counts, between, tokens, longest, COPIES, SLOTS)
        between_time = tl.where(counts * Q_TILES <= max_blocks, between_time, float("inf"))
        key = tl.where((counts <= wave) | (between == high), between, FAR_AWAY)
        library, library_time = tl.reduce((key, between_time), 0, lesser)
    else:
        library = uncut
        library_time = predicted_time(fewest, uncut, tokens, longest, COPIES, SLOTS)
    leaves = best_time + BLOCK_TOKENS < library_time * (1 - MARGIN)
    return tl.where(leaves, best, library), most, refused, pages


@triton.jit
def write_requests(sums_ptr, merge_ptr, parts, ends, rows, inside, Q_LEN: tl.constexpr):
    """`o_indptr` and `merge_indptr` behind requests `rows`, which end with part `ends`."""
    tl.store(sums_ptr + 1 + rows, ends * Q_LEN, mask=inside)
    for query in range(Q_LEN):
        sums = (ends - parts) * Q_LEN + (query + 1) * parts
        tl.store(merge_ptr + 1 + rows * Q_LEN + query, sums, mask=inside)


@triton.jit
def write_blocks(request_ptr, q_tile_ptr, kv_tile_ptr, rows, parts, ends, Q_TILES: tl.constexpr):
    """The blocks of requests `rows`."""
    divisor = tl.maximum(parts, 1)[:, None]
    for begin in range(0, tl.max(parts, 0) * Q_TILES, WIDTH):
        within = begin + tl.arange(0, WIDTH)[None, :]
        live = within < parts[:, None] * Q_TILES
        tile = within // divisor if Q_TILES > 1 else within * 0
        block = (ends - parts)[:, None] * Q_TILES + within
        tl.store(request_ptr + block, rows[:, None] + within * 0, mask=live)
        tl.store(q_tile_ptr + block, tile + rows[:, None] * 0, mask=live)
        tl.store(kv_tile_ptr + block, within - tile * divisor, mask=live)


@triton.jit
def write_unused(request_ptr, q_tile_ptr, kv_tile_ptr, mask_ptr, here, programs, used, max_blocks):
    """Zeros for blocks from `used` on, and the mask of all, in whole words."""
    for start in range(here * BLOCKS, max_blocks, programs * BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        idle = (block < max_blocks) & (block >= used)
        zero = block * 0
        tl.store(request_ptr + block, zero, mask=idle)
        tl.store(q_tile_ptr + block, zero, mask=idle)
        tl.store(kv_tile_ptr + block, zero, mask=idle)
        in_use = (block < used).to(tl.uint8)
        tl.store(mask_ptr + block, in_use, mask=block < (max_blocks + 3) // 4 * 4)


@triton.jit(
    do_not_specialize=[
        "batch",
        "delta",
        "lead",
        "limit",
        "most",
        "max_blocks",
        "max_batch",
        "max_pages",
        "pool_rows",
        "row_stride",
        "capacity",
    ]
)
def plan_kernel(
    # inputs
    seq_lens_ptr,  # [batch] int32 or int64
    # output
    words_ptr,  # int32, laid out as `PlanLayout` says
    overflow_ptr,  # [2] int32, or none
    # of the page arrays, all or none: inputs, of a token pool or a block table, and outputs
    req_pool_indices_ptr,  # [batch] int32 or int64
    req_to_token_ptr,  # [pool_rows, row_stride] int32
    block_table_ptr,  # [pool_rows, row_stride] int32
    kv_indptr_ptr,  # [max_batch + 1] int32
    kv_indices_ptr,  # [capacity] int32
    kv_last_page_len_ptr,  # [max_batch] int32
    # number
    delta,
    # sizes
    batch,
    lead,
    limit,
    most,
    max_blocks,
    max_batch,
    max_pages,
    pool_rows,
    row_stride,
    capacity,
    # the shape
    PAGE: tl.constexpr,
    Q_LEN: tl.constexpr,
    Q_TILES: tl.constexpr,
    COPIES: tl.constexpr,
    SLOTS: tl.constexpr,
    # where arrays of words begin
    REQUEST_AT: tl.constexpr,
    Q_TILE_AT: tl.constexpr,
    KV_TILE_AT: tl.constexpr,
    O_INDPTR_AT: tl.constexpr,
    MERGE_INDPTR_AT: tl.constexpr,
    CHUNK_AT: tl.constexpr,
    ROWS_AT: tl.constexpr,
    MASK_AT: tl.constexpr,
    # requests at once
    SCORED: tl.constexpr,
    WIDE: tl.constexpr,
    WRITTEN: tl.constexpr,
    # of the page arrays, see `metadata.kv_indices`
    SHIFT: tl.constexpr,
    SCAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `build_fa2_plan`; `lead` programs of dimension 0 come before those of the pages."""
    # The kernel after us may read the words before it waits: it must not start early.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    here = tl.program_id(0)
    if here >= lead:
        if COLS:
            by_table: tl.constexpr = block_table_ptr is not None
            write_pages(
                here - lead,
                seq_lens_ptr,
                None if by_table else req_pool_indices_ptr,
                block_table_ptr if by_table else req_to_token_ptr,
                kv_indptr_ptr,
                kv_indices_ptr,
                kv_last_page_len_ptr,
                batch,
                max_batch,
                delta,
                max_pages,
                pool_rows,
                row_stride,
                capacity,
                SHIFT,
                SCAN,
                ROWS,
                COLS,
                True,
            )
    elif tl.program_id(1) == 0:
        chunk, most, refused, pages = chosen_chunk(
            seq_lens_ptr,
            batch,
            delta,
            limit,
            most,
            max_blocks,
            capacity,
            SHIFT,
            PAGE,
            Q_TILES,
            COPIES,
            SLOTS,
            SCORED,
            WIDE,
        )
        limits = (batch, delta, limit, most)
        inverse = tl.div_rn(1.0, chunk.to(tl.float32))
        first = here * ((max_batch + lead - 1) // lead)
        end = tl.minimum(first + (max_batch + lead - 1) // lead, max_batch)
        before_of = tl.zeros((WIDE,), tl.int32)
        total_of = tl.zeros((WIDE,), tl.int32)
        for start in range(0, batch, WIDE):
            rows = start + tl.arange(0, WIDE)
            parts = parts_of(counted_lengths(seq_lens_ptr, rows, *limits), inverse).to(tl.int32)
            total_of += parts
            before_of += tl.where(rows < first, parts, 0)
        before, total = tl.reduce((before_of, total_of), 0, both_sums)
        blocks = (words_ptr + REQUEST_AT, words_ptr + Q_TILE_AT, words_ptr + KV_TILE_AT)
        sums = (words_ptr + O_INDPTR_AT, words_ptr + MERGE_INDPTR_AT)
        for start in range(first, end, WRITTEN):
            rows = start + tl.arange(0, WRITTEN)
            parts = parts_of(counted_lengths(seq_lens_ptr, rows, *limits), inverse).to(tl.int32)
            parts = tl.where(rows < end, parts, 0)
            ends = before + tl.cumsum(parts, 0)
            before += tl.sum(parts, 0)
            write_requests(*sums, parts, ends, rows, rows < end, Q_LEN)
            write_blocks(*blocks, rows, parts, ends, Q_TILES)
        mask_ptr = (words_ptr + MASK_AT).to(tl.pointer_type(tl.uint8))
        write_unused(*blocks, mask_ptr, here, lead, total * Q_TILES, max_blocks)
        if here == 0:
            tl.store(words_ptr + O_INDPTR_AT, 0)
            tl.store(words_ptr + MERGE_INDPTR_AT, 0)
            tl.store(words_ptr + CHUNK_AT, chunk)
            tl.store(words_ptr + ROWS_AT, max_batch * Q_LEN)
            if overflow_ptr is not None:
                tl.store(overflow_ptr, refused, mask=refused > 0)
                tl.store(overflow_ptr + 1, pages, mask=pages > 0)


def require_plan(t: PlanTensors, shape: PlanShape, page_size: int) -> None:
    """Raise unless these are tensors of a plan of `shape`."""
    require_tensor("seq_lens", t.seq_lens, (None,), "int32", "int64", contiguous=True)
    batch = t.seq_lens.shape[0]
    room = shape.max_batch_size
    if batch > room:
        raise ValueError(f"seq_lens must hold at most {room} requests, as captured, got {batch}")
    words = PlanLayout.of(shape).int_bytes // WORD
    require_tensor("words", t.words, (words,), "int32", contiguous=True)
    if t.overflow is not None:
        require_tensor("overflow", t.overflow, (2,), "int32", contiguous=True)
    if page_size:
        if t.overflow is None:
            raise ValueError(
                "overflow must be given where page arrays are written: it tells of the requests "
                "that have no room in them, got none"
            )
        require_tensor("kv_indptr", t.kv_indptr, (room + 1,), "int32", contiguous=True)
        require_tensor("kv_last_page_len", t.kv_last_page_len, (room,), "int32", contiguous=True)


def page_launch(t: PlanTensors, shape: PlanShape, page_size: int) -> tuple[Launch, int]:
    """The launch of `build_kv_indices` for these requests, and the pages that a row of their pool
    or block table holds."""
    batch = len(t.seq_lens)
    by_table = t.block_table is not None
    rows = t.block_table if by_table else t.req_to_token
    arrays = PageArrays(
        seq_lens=t.seq_lens,
        req_pool_indices=t.req_pool_indices,
        req_to_token=rows,
        kv_indptr=t.kv_indptr[: batch + 1],
        kv_indices=t.kv_indices,
        kv_last_page_len=t.kv_last_page_len[:batch],
    )
    if by_table:
        require_block_table(t, page_size)
        columns = rows.shape[1]
        words = "block_table must have a column per page"
    else:
        require_kv_indices(arrays, page_size)
        columns = ceil_div(rows.shape[1], page_size)
        words = "req_to_token (a block table is given as block_table) must have a column per token"
    if columns * page_size < shape.max_seq_len:
        raise ValueError(
            f"{words} for max_seq_len {shape.max_seq_len}, page_size {page_size}, got "
            f"{list(rows.shape)}"
        )
    return pages.launch_of(arrays, page_size), columns


def require_block_table(t: PlanTensors, page_size: int) -> None:
    """Raise unless there is a row of pages per request, and no token pool beside it."""
    for name in ("req_pool_indices", "req_to_token"):
        if getattr(t, name) is not None:
            raise ValueError(
                f"block_table must be given without {name}: its rows are in the batch's order"
            )
    require_page_size(page_size)
    require_tensor("kv_indices", t.kv_indices, (None,), "int32", contiguous=True)
    require_tensor("block_table", t.block_table, (None, None), "int32")
    if len(t.block_table) < len(t.seq_lens) or not has_separate_rows(t.block_table):
        raise ValueError(
            f"block_table must have a row of neighbouring words per request, {len(t.seq_lens)}, "
            f"got {list(t.block_table.shape)} with strides {t.block_table.stride()}"
        )


def leading_programs(shape: PlanShape) -> int:
    """Programs that write the plan: one per REQUESTS requests, and enough to clear the grid."""
    writing = ceil_div(shape.max_batch_size, REQUESTS)
    clearing = ceil_div(shape.max_blocks, BLOCKS.value)
    return max(writing, min(8, clearing))


def prepare(tensors: tuple[Any, ...], shape: PlanShape, page_size: int) -> Launch:
    """The launch: programs that write the plan, then those of the page arrays."""
    t = PlanTensors(*tensors)
    require_plan(t, shape, page_size)
    batch = len(t.seq_lens)
    room = shape.max_batch_size
    width = triton.next_power_of_2(room)
    constants = (
        shape.page_size,
        shape.q_len,
        shape.q_tiles,
        shape.copies,
        shape.slots,
        *PlanLayout.of(shape).offsets,
        min(width, SCORED),
        min(width, WIDE),
        min(width, REQUESTS),
    )
    lead = leading_programs(shape)
    grid: Grid = (lead, 1)
    tiles: tuple[object, ...] = (0, 0, 0, 0)
    pool_rows = 0
    stride = 0
    capacity = INT32_MAX
    limit = choice.MAX_TOKENS
    max_pages = 0
    if page_size:
        of_pages, columns = page_launch(t, shape, page_size)
        # int32 counts the pages of a batch.
        max_pages = min(columns, limit // page_size, INT32_MAX // max(batch, 1))
        limit = max_pages * page_size
        _, pool_rows, stride, capacity, _ = of_pages.sizes
        longest = ceil_div(shape.max_seq_len, page_size)
        (parts, wide), tiles, _ = of_pages.cut(0, longest)
        grid = (lead + parts, wide)
    require_one_device(t._asdict())

    def cut(seq_len_delta: int) -> Cut:
        warps = FEW_WARPS if room <= FEW else WARPS
        return grid, (*constants, *tiles), warps

    return Launch(
        bounds=(Bound("seq_len_delta", INT32_MAX),),
        apart=kept_apart(t._asdict(), OUTPUTS),
        sizes=(
            batch,
            lead,
            limit,
            shape.most_seen,
            shape.max_blocks,
            room,
            max_pages,
            pool_rows,
            stride,
            capacity,
        ),
        cut=cut,
    )


LAUNCHER = Launcher(plan_kernel, prepare)


def build_fa2_plan(
    *,
    seq_lens: Tensor,
    words: Tensor,
    shape: PlanShape,
    seq_len_delta: int = 0,
    page_size: int = 0,
    check: bool = False,
    **tensors: Tensor | None,
) -> None:
    """Write a plan of fa2 in one launch, and with a `page_size` FlashInfer's page arrays too.

    `Fa2Planner.plan` calls it with a wrapper's buffers. Requests that do not fit are skipped, and
    counted in `overflow`: see there.

    Parameters
    ----------
    seq_lens : Tensor
        [bs] int32 or int64, tokens per request; rows past it are empty.
    words : Tensor
        [`PlanLayout.int_bytes` / 4] int32, out.
    shape : PlanShape
        What is fixed.
    seq_len_delta : int
        Added to every length.
    page_size : int
        Tokens of a page; 0 writes no page arrays, and of the tensors below takes `overflow` alone.
    check : bool
        Whether values are looked at too: a request that has no room, or is not in the pool, raises
        ValueError. It waits for the GPU, and no graph can capture it.
    overflow : Tensor, optional
        [2] int32, out, as `Fa2Planner.overflow`: tokens of the longest request that was skipped,
        and pages of a batch that was; required with a `page_size`.
    kv_indptr, kv_indices, kv_last_page_len : Tensor, optional
        [max_batch_size + 1], [capacity], [max_batch_size] int32, out, as `build_kv_indices` writes.
    req_pool_indices, req_to_token : Tensor, optional
        [bs] int32 or int64, [pool, max_ctx] int32: the slot of each token.
    block_table : Tensor, optional
        [>= bs, max_pages] int32: pages of request i in row i, in place of slots.

    Raises
    ------
    ValueError
        Before the launch, for tensors that do not fit.

    Examples
    --------
    Under TRITON_INTERPRET=1, without a GPU; the kernel writes the words of `plan_words`:

    >>> import numpy as np
    >>> import torch
    >>> from attnlib.core import PlanLayout, PlanShape, plan_words
    >>> shape = PlanShape(32, 8, 128, kv_bytes=2, max_batch_size=2, max_seq_len=512, num_sms=132)
    >>> words = torch.zeros(PlanLayout.of(shape).int_bytes // 4, dtype=torch.int32)
    >>> build_fa2_plan(seq_lens=torch.tensor([300, 200]), words=words, shape=shape)
    >>> wanted = plan_words(shape, np.array([300, 200])).image(len(words))
    >>> bool((words.numpy() == wanted).all())
    True
    """
    require_type("shape", shape, PlanShape)
    given = {"seq_lens": seq_lens, "words": words, **tensors}
    used = tensors_named(PlanTensors, given)
    for name in PlanTensors._fields[3:]:
        if getattr(used, name) is not None and not page_size:
            raise ValueError(f"page_size must be given with {name}, got 0")
    values = None
    if check:
        values = partial(_require_values, used, page_size, seq_len_delta)
    LAUNCHER.launch(used, (shape, page_size), (seq_len_delta,), values)


def _require_values(t: PlanTensors, page_size: int, seq_len_delta: int) -> None:
    most = choice.MAX_TOKENS
    if page_size:
        rows = t.req_to_token if t.block_table is None else t.block_table
        tokens = 1 if t.block_table is None else page_size
        most = min(most, rows.shape[1] * tokens)
    require_values(
        t._asdict(),
        page_size=page_size or 1,
        most_tokens=most,
        seq_len_delta=seq_len_delta,
    )
