"""A plan for FlashInfer's fa2 in one launch: the choice of `choice`, the words of `words`.

    chunk        = the candidate with the least predicted time, step by step as the twin
    parts[i]     = ceil(len[i] / chunk), 0 of an empty request
    o_indptr     = 0 and running sums of parts * q_len
    merge_indptr = 0 and, per query row, running sums of parts
    block j      : of request r its parts, one query tile after another, r after r

Each of `lead` programs chooses for itself, since waiting for another would cost more, then writes
its share of the requests and clears its share of the rest. All words are written in every launch.
Further programs write the page arrays, where those are asked for.
"""

from collections import namedtuple

import numpy as np
import torch
import triton
import triton.language as tl

from ..batch import require_tensor
from ..metadata import kv_indices as pages
from ..metadata.kv_indices import write_pages
from ..metadata.launch import Derived, Grid, Launcher
from ..metadata.require import EveryCall, PageArrays, require_kv_indices, require_one_device
from ..spec import INT32_MAX, require_int
from .choice import CHUNK_STEP, LIBRARYS, WHOLE, PlanShape, f32
from .library import MIN_CHUNK
from .scores import chosen_chunk, counted_lengths, parts_of
from .words import WORD, Layout

SCORED = 32
"""Requests that a program looks at at once for all candidates."""
WIDE = 1024
"""Requests that it looks at at once otherwise."""
REQUESTS, BLOCKS, WRITTEN = 32, 128, 2048
"""Requests of which a program writes the blocks, blocks that it clears, blocks at once."""
WARPS = 8

PlanTensors = namedtuple(
    "PlanTensors",
    "seq_lens words req_pool_indices req_to_token kv_indptr kv_indices kv_last_page_len",
    defaults=(None, None, None, None, None),
)


@triton.jit
def write_plan(
    here,
    programs,
    seq_lens_ptr,
    words_ptr,
    batch,
    delta,
    most,
    max_blocks,
    max_batch,
    Q_LEN: tl.constexpr,
    Q_TILES: tl.constexpr,
    FACTS: tl.constexpr,
    UNITS: tl.constexpr,
    SPANS: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """The share of program `here` in the words; OFFSETS are those of `Layout`."""
    FAR: tl.constexpr = SPANS[0]
    SPAN: tl.constexpr = SPANS[2]
    BLOCKS_HERE: tl.constexpr = SPANS[3]
    WIDTH: tl.constexpr = SPANS[4]
    Q_SPAN: tl.constexpr = SPANS[5]
    chunk = chosen_chunk(
        *(seq_lens_ptr, batch, delta, most, max_blocks),
        *(Q_TILES, FACTS, UNITS, SPANS),
    )
    inverse = tl.div_rn(1.0, chunk.to(tl.float32))
    share = (max_batch + programs - 1) // programs
    before = 0
    total = 0
    for start in range(0, max_batch, FAR):
        rows = start + tl.arange(0, FAR)
        lens = counted_lengths(seq_lens_ptr, rows, batch, delta, most)
        parts = parts_of(lens, chunk, inverse)
        total += tl.sum(parts, 0)
        before += tl.sum(tl.where(rows < here * share, parts, 0), 0)
    for start in range(here * share, tl.minimum(here * share + share, max_batch), SPAN):
        rows = start + tl.arange(0, SPAN)
        inside = rows < tl.minimum(here * share + share, max_batch)
        lens = counted_lengths(seq_lens_ptr, rows, batch, delta, most)
        parts = tl.where(inside, parts_of(lens, chunk, inverse), 0)
        ends = before + tl.cumsum(parts, 0)
        before += tl.sum(parts, 0)
        tl.store(words_ptr + OFFSETS[3] + 1 + rows, ends * Q_LEN, mask=inside)
        query = tl.arange(0, Q_SPAN)
        sums = (ends - parts)[:, None] * Q_LEN + (query[None, :] + 1) * parts[:, None]
        target = words_ptr + OFFSETS[4] + 1 + rows[:, None] * Q_LEN + query[None, :]
        tl.store(target, sums, mask=inside[:, None] & (query[None, :] < Q_LEN))
        own = tl.maximum(parts, 1)[:, None]
        for begin in range(0, tl.max(parts, 0) * Q_TILES, WIDTH):
            within = begin + tl.arange(0, WIDTH)[None, :]
            live = within < parts[:, None] * Q_TILES
            tile = within // own if Q_TILES > 1 else within * 0
            block = words_ptr + (ends - parts)[:, None] * Q_TILES + within
            tl.store(block + OFFSETS[0], rows[:, None] + within * 0, mask=live)
            tl.store(block + OFFSETS[1], tile + rows[:, None] * 0, mask=live)
            tl.store(block + OFFSETS[2], within - tile * own, mask=live)
    # What the valid mask ends at once, and the mask itself, in whole words.
    valid_ptr = (words_ptr + OFFSETS[7]).to(tl.pointer_type(tl.uint8))
    for start in range(here * BLOCKS_HERE, max_blocks, programs * BLOCKS_HERE):
        block = start + tl.arange(0, BLOCKS_HERE)
        used = block < total * Q_TILES
        idle = (block < max_blocks) & (used == 0)
        zero = block * 0
        tl.store(words_ptr + OFFSETS[0] + block, zero, mask=idle)
        tl.store(words_ptr + OFFSETS[1] + block, zero, mask=idle)
        tl.store(words_ptr + OFFSETS[2] + block, zero, mask=idle)
        tl.store(valid_ptr + block, used.to(tl.uint8), mask=block < (max_blocks + 3) // 4 * 4)
    if here == 0:
        tl.store(words_ptr + OFFSETS[3], 0)
        tl.store(words_ptr + OFFSETS[4], 0)
        tl.store(words_ptr + OFFSETS[5], chunk)
        tl.store(words_ptr + OFFSETS[6], max_batch * Q_LEN)


@triton.jit(
    do_not_specialize=[
        *("batch", "delta", "lead", "most", "max_blocks", "max_batch"),
        *("max_pages", "pool_rows", "token_stride", "capacity"),
    ]
)
def plan_kernel(
    # inputs
    seq_lens_ptr,  # [batch] int32 or int64
    # output
    words_ptr,  # int32, laid out as `Layout` says
    # of the page arrays, all or none: inputs and outputs
    req_pool_indices_ptr,  # [batch] int32 or int64
    req_to_token_ptr,  # [pool_rows, token_stride] int32
    kv_indptr_ptr,  # [max_batch + 1] int32
    kv_indices_ptr,  # [capacity] int32
    kv_last_page_len_ptr,  # [max_batch] int32
    # sizes
    batch,
    delta,
    lead,
    most,
    max_blocks,
    max_batch,
    max_pages,
    pool_rows,
    token_stride,
    capacity,
    # structure
    Q_LEN: tl.constexpr,
    Q_TILES: tl.constexpr,
    FACTS: tl.constexpr,
    UNITS: tl.constexpr,
    SPANS: tl.constexpr,
    OFFSETS: tl.constexpr,
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
    part = tl.program_id(0)
    if part >= lead:
        if COLS:
            inputs = (seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr)
            outputs = (kv_indptr_ptr, kv_indices_ptr, kv_last_page_len_ptr)
            sizes = (batch, max_batch, delta, max_pages, pool_rows, token_stride, capacity)
            write_pages(part - lead, *inputs, *outputs, *sizes, SHIFT, SCAN, ROWS, COLS)
    elif tl.program_id(1) == 0:
        tensors = (seq_lens_ptr, words_ptr)
        limits = (batch, delta, most, max_blocks, max_batch)
        write_plan(part, lead, *tensors, *limits, Q_LEN, Q_TILES, FACTS, UNITS, SPANS, OFFSETS)


def require_plan(t: PlanTensors, shape: PlanShape, page_size: int, seq_len_delta: int) -> EveryCall:
    """Raise unless these are tensors of a plan of `shape`."""
    require_tensor("seq_lens", t.seq_lens, (None,), "int32", "int64", contiguous=True)
    batch, room = t.seq_lens.shape[0], shape.max_batch_size
    if batch > room:
        raise ValueError(f"seq_lens must hold at most {room} requests, as captured, got {batch}")
    require_int("seq_len_delta", seq_len_delta, least=0)
    words = Layout.of(shape).int_bytes // WORD
    require_tensor("words", t.words, (words,), "int32", contiguous=True)
    require_one_device(t._asdict())
    apart: tuple[tuple[int, int, bool], ...] = ()
    if page_size:
        require_tensor("kv_indptr", t.kv_indptr, (room + 1,), "int32", contiguous=True)
        require_tensor("kv_last_page_len", t.kv_last_page_len, (room,), "int32", contiguous=True)
        require_kv_indices(
            page_arrays(t, batch), page_size, seq_len_delta, -(-shape.max_seq_len // page_size)
        )
        apart = tuple((0, t._fields.index(n), False) for n in ("kv_indptr", "kv_last_page_len"))
    return EveryCall(((0, INT32_MAX),), apart)


def page_arrays(t: PlanTensors, batch: int) -> PageArrays:
    """What `build_kv_indices` would take of them, of the first `batch` requests."""
    short = {"kv_indptr": t.kv_indptr[: batch + 1], "kv_last_page_len": t.kv_last_page_len[:batch]}
    same = ("seq_lens", "req_pool_indices", "req_to_token", "kv_indices")
    return PageArrays(**{name: getattr(t, name) for name in same}, **short)


def derive(t: PlanTensors, shape: PlanShape, page_size: int) -> Derived:
    """The launch: a program per REQUESTS requests, then those of the page arrays."""
    layout, batch, room = Layout.of(shape), len(t.seq_lens), shape.max_batch_size
    wide = triton.next_power_of_2(max(batch, 1))
    rows = min(REQUESTS, triton.next_power_of_2(room))
    spans = (min(WIDE, wide), min(SCORED, wide), rows, BLOCKS, WRITTEN // rows)
    bits = shape.tile_tokens.bit_length() - 1
    constants = (
        *(shape.q_len, shape.q_tiles, facts_of(shape)),
        (bits, bits + shape.coarse, CHUNK_STEP, MIN_CHUNK, WHOLE, shape.cached_tokens),
        (*spans, triton.next_power_of_2(shape.q_len)),
        layout.offsets,
    )
    lead = max(-(-room // REQUESTS), min(8, -(-shape.max_blocks // BLOCKS)))
    most = -(-shape.max_seq_len // max(page_size, 1))
    grid: Grid = (lead, 1)
    tiles: tuple[object, ...] = (0, 0, 0, 0)
    sizes: tuple[int, ...] = (0, 0, 0)
    if page_size:
        _, scalars, cut_pages = pages.derive(page_arrays(t, batch), page_size)
        sizes = scalars[:-1]
        (parts, columns), tiles, _ = cut_pages(0, most)
        grid = (lead + parts, columns)

    def cut(seq_len_delta: int) -> tuple[Grid, tuple[object, ...], int]:
        return grid, (*constants, *tiles), WARPS

    longest = min(shape.max_seq_len, shape.seen)
    return Derived(batch, (lead, longest, shape.max_blocks, room, most, *sizes), cut)


def facts_of(shape: PlanShape) -> tuple[float, ...]:
    """FACTS of the kernel: what the twin rounds to float32 before the batch is looked at."""
    rates, own = shape.rates, np.float32(shape.rates.block_tokens)
    known = (shape.copies, shape.slots, shape.us_at(rates.block_gbps) ** 2)
    starts = (own, 2 * own * shape.tile_tokens, own * own)
    shares = (rates.mean_share, rates.longest_share, rates.mixing)
    costs = (
        rates.merge_us * shape.q_len * shape.num_qo_heads,
        rates.deep_us,
        rates.cut_us,
        rates.start_us,
    )
    speeds: tuple[object, ...] = ()
    for cached in (False, True):
        full, first = (shape.us_per_token(f32(x), cached) for x in (shape.slots, 1))
        speeds += (shape.shared_us(cached), full / f32(shape.slots), first)
    return tuple(float(f32(x)) for x in (*known, *starts, *shares, *costs, *speeds, LIBRARYS))


LAUNCHER = Launcher(plan_kernel, PlanTensors, require_plan, derive, enable_fp_fusion=False)


def build_fa2_plan(
    *,
    seq_lens: torch.Tensor,
    words: torch.Tensor,
    shape: PlanShape,
    seq_len_delta: int = 0,
    req_pool_indices: torch.Tensor | None = None,
    req_to_token: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    kv_last_page_len: torch.Tensor | None = None,
    page_size: int = 0,
) -> None:
    """Write the plan of `shape` for `seq_lens` [bs] int32 or int64 into `words`, in one launch.

    `words` is int32 [`Layout.int_bytes` / 4]. Rows past `seq_lens` are empty. Lengths, delta added,
    count as at most `max_seq_len`. With a `page_size` the same launch writes the page arrays as
    `build_kv_indices` does, `kv_indptr` [max_batch_size + 1] and `kv_last_page_len`
    [max_batch_size]; the other five are not looked at without one. Else as all of `core.metadata`.
    """
    paged = (req_pool_indices, req_to_token, kv_indptr, kv_indices, kv_last_page_len)
    tensors = (seq_lens, words, *(paged if page_size else (None,) * 5))
    LAUNCHER.launch(tensors, (shape, page_size), (seq_len_delta,))
