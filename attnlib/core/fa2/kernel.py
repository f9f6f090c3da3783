"""A plan for FlashInfer's fa2 in one launch: the choice of `choice`, the words of `words`.

    chunk        = the candidate with the least predicted time, step by step as the twin
    parts[i]     = ceil(len[i] / chunk), 0 of an empty request
    o_indptr     = 0 and running sums of parts * q_len
    merge_indptr = 0 and, per query row, running sums of parts
    block j      : of request r its parts, one query tile after another, r after r

Every program chooses for itself, since waiting for another would cost more, then writes its share
of the requests and clears its share of the rest. All words are written in every launch.

Predicted times are float32 and equal the twin's to the bit: no multiply-add is fused, divisions and
square roots round to nearest, and sums are sums of integers.
"""

from collections import namedtuple

import numpy as np
import torch
import triton
import triton.language as tl

from ..batch import require_tensor
from ..metadata.launch import Derived, Grid, Launcher
from ..metadata.require import EveryCall, require_one_device
from ..spec import INT32_MAX, require_int
from .choice import CHUNK_STEP, LADDER, MIN_CHUNK, TILE_TOKENS, WHOLE, PlanShape, f32
from .words import Layout

SCORED = 32
"""Requests that a program looks at at once for all candidates."""
WIDE = 1024
"""Requests that it looks at at once otherwise."""
REQUESTS, BLOCKS, WIDTH = 32, 128, 64
"""Requests of which a program writes the blocks, WIDTH at a time, and blocks that it clears."""
WARPS = 8

PlanTensors = namedtuple("PlanTensors", "seq_lens ladder words valid")


@triton.jit
def counted_lengths(seq_lens_ptr, rows, batch, delta, most):
    """Tokens of requests `rows` that blocks look at, int32; 0 past the batch."""
    lens = tl.load(seq_lens_ptr + rows, mask=rows < batch, other=-delta).to(tl.int32) + delta
    return tl.minimum(tl.maximum(lens, 0), most)


@triton.jit
def parts_of(lens, inverse):
    """ceil(lens / chunk), given 1 / chunk: half a token from the next whole number, a float32
    quotient of lengths up to 2^21 cannot reach it."""
    return ((lens.to(tl.float32) - 0.5) * inverse + 1.0).to(tl.int32)


@triton.jit
def us_per_token(blocks, slots, shared_us, alone):
    """Microseconds per token while so many blocks are in flight; `alone` is squared."""
    shared = tl.minimum(tl.maximum(blocks, 1.0), slots) * shared_us
    return tl.sqrt_rn(shared * shared + alone)


@triton.jit
def predicted_us(n, ends, squares, live, longest, chunks, FACTS: tl.constexpr, UNITS: tl.constexpr):
    """`choice.predicted_us`, of sums over the batch per candidate [64] int32."""
    TILE: tl.constexpr = UNITS[0]
    UNIT: tl.constexpr = UNITS[1]
    copies: tl.constexpr = FACTS[0]
    slots: tl.constexpr = FACTS[1]
    shared_us: tl.constexpr = FACTS[2]
    alone: tl.constexpr = FACTS[3]
    own: tl.constexpr = FACTS[4]
    twice_own: tl.constexpr = FACTS[5]
    own_squared: tl.constexpr = FACTS[6]
    n = n.to(tl.float32)
    ends = ends.to(tl.float32)
    some = live.to(tl.float32)
    chunk = ((chunks + (TILE - 1)) // TILE * TILE).to(tl.float32) + own
    whole = n - some
    rest = ends * TILE + some * own
    work = whole * chunk + rest
    power = squares.to(tl.float32) * (UNIT * UNIT) + ends * twice_own
    power = whole * (chunk * chunk) + (power + some * own_squared)
    block = tl.minimum(chunks, longest)
    longest_block = ((block + (TILE - 1)) // TILE * TILE).to(tl.float32) + own
    blocks = n * copies
    mean = tl.div_rn(rest, some)
    short = tl.minimum(mean, chunk)
    at_all = us_per_token(blocks, slots, shared_us, alone)
    at_whole = us_per_token(whole * copies, slots, shared_us, alone)
    at_half = us_per_token(blocks * 0.5, slots, shared_us, alone)
    one = short * at_all + (chunk - short) * at_whole
    one = tl.where(whole > 0, one, mean * at_all + (longest_block - mean) * at_half)
    waves = tl.floor(tl.div_rn(blocks, blocks * 0.0 + slots))
    left = blocks - waves * slots
    at_left = us_per_token(left, slots, shared_us, alone)
    per_slot: tl.constexpr = FACTS[7]
    partial = tl.div_rn(work, tl.maximum(n, 1.0)) * (at_left - left * per_slot)
    partial = tl.where(left > 0, partial, 0.0)
    uneven = tl.div_rn(power, work) * FACTS[8] + longest_block * FACTS[9]
    uneven = uneven * FACTS[10]
    spread = tl.maximum(tl.div_rn(power * n, work * work) - 1.0, 0.0)
    weight = waves * FACTS[11] * spread
    drain = tl.div_rn(partial + weight * uneven, 1.0 + weight)
    many = tl.maximum(work * copies * per_slot + drain, longest_block * FACTS[10])
    deepest = ((longest + chunks - 1) // chunks).to(tl.float32)
    cut = tl.where(deepest > 1, FACTS[14], 0.0)
    merge = whole * FACTS[12] + deepest * FACTS[13]
    return tl.where(blocks <= slots, one, many) + (merge + (cut + FACTS[15]))


@triton.jit
def chosen_chunk(
    seq_lens_ptr,
    ladder_ptr,
    batch,
    delta,
    most,
    max_blocks,
    Q_TILES: tl.constexpr,
    FACTS: tl.constexpr,
    UNITS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """`choice.choose(...).chunk` as a scalar."""
    TILE: tl.constexpr = UNITS[0]
    UNIT: tl.constexpr = UNITS[1]
    STEP: tl.constexpr = UNITS[2]
    LEAST: tl.constexpr = UNITS[3]
    WHOLES: tl.constexpr = UNITS[4]
    FAR: tl.constexpr = SPANS[0]
    SPAN: tl.constexpr = SPANS[1]
    longest = 0
    live = 0
    for start in range(0, batch, FAR):
        lens = counted_lengths(seq_lens_ptr, start + tl.arange(0, FAR), batch, delta, most)
        longest = tl.maximum(longest, tl.max(lens, 0))
        live += tl.sum((lens > 0).to(tl.int32), 0)
    which = tl.arange(0, 2 * WHOLES)
    equal = (tl.maximum(longest, 1) + which) // (which + 1)
    equal = (equal + STEP - 1) // STEP * STEP
    fixed = tl.load(ladder_ptr + which - WHOLES, mask=which >= WHOLES, other=0)
    chunks = tl.maximum(tl.where(which < WHOLES, equal, fixed), LEAST)
    inverse = tl.div_rn(1.0, chunks.to(tl.float32))
    n = tl.zeros((2 * WHOLES, SPAN), tl.int32)
    ends = tl.zeros((2 * WHOLES, SPAN), tl.int32)
    squares = tl.zeros((2 * WHOLES, SPAN), tl.int32)
    for start in range(0, batch, SPAN):
        lens = counted_lengths(seq_lens_ptr, start + tl.arange(0, SPAN), batch, delta, most)
        parts = parts_of(lens[None, :], inverse[:, None])
        last = lens[None, :] + chunks[:, None] * (1 - parts)
        last = tl.where(lens[None, :] > 0, last, 0)
        n += parts
        ends += (last + (TILE - 1)) // TILE
        tiles = (last + (UNIT - 1)) // UNIT
        squares += tiles * tiles
    n = tl.sum(n, 1)
    us = predicted_us(
        *(n, tl.sum(ends, 1), tl.sum(squares, 1), tl.maximum(live, 1), longest, chunks),
        *(FACTS, UNITS),
    )
    us = tl.where(n * Q_TILES <= max_blocks, us, float("inf"))
    best = tl.argmin(us, 0)
    return tl.sum(tl.where(which == best, chunks, 0), 0)


@triton.jit(do_not_specialize=["batch", "delta", "most", "max_blocks", "max_batch"])
def plan_kernel(
    # inputs
    seq_lens_ptr,  # [batch] int32 or int64
    ladder_ptr,  # [WHOLE] int32, candidates
    # outputs
    words_ptr,  # int32, laid out as `Layout` says
    valid_ptr,  # [max_blocks] uint8
    # sizes
    batch,
    delta,
    most,
    max_blocks,
    max_batch,
    # structure
    Q_LEN: tl.constexpr,
    Q_TILES: tl.constexpr,
    FACTS: tl.constexpr,
    UNITS: tl.constexpr,
    SPANS: tl.constexpr,
    OFFSETS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `plan_fa2`; OFFSETS are those of `Layout`."""
    # The kernel after us may read the words before it waits: it must not start early.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    FAR: tl.constexpr = SPANS[0]
    SPAN: tl.constexpr = SPANS[2]
    BLOCKS_HERE: tl.constexpr = SPANS[3]
    WIDTH: tl.constexpr = SPANS[4]
    Q_SPAN: tl.constexpr = SPANS[5]
    here = tl.program_id(0)
    chunk = chosen_chunk(
        *(seq_lens_ptr, ladder_ptr, batch, delta, most, max_blocks),
        *(Q_TILES, FACTS, UNITS, SPANS),
    )
    inverse = tl.div_rn(1.0, chunk.to(tl.float32))
    programs = tl.num_programs(0)
    share = (max_batch + programs - 1) // programs
    before = 0
    total = 0
    for start in range(0, max_batch, FAR):
        rows = start + tl.arange(0, FAR)
        parts = parts_of(counted_lengths(seq_lens_ptr, rows, batch, delta, most), inverse)
        total += tl.sum(parts, 0)
        before += tl.sum(tl.where(rows < here * share, parts, 0), 0)
    for start in range(here * share, tl.minimum(here * share + share, max_batch), SPAN):
        rows = start + tl.arange(0, SPAN)
        inside = rows < tl.minimum(here * share + share, max_batch)
        parts = parts_of(counted_lengths(seq_lens_ptr, rows, batch, delta, most), inverse)
        parts = tl.where(inside, parts, 0)
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
            block = (ends - parts)[:, None] * Q_TILES + within
            tl.store(words_ptr + OFFSETS[0] + block, rows[:, None] + within * 0, mask=live)
            tl.store(words_ptr + OFFSETS[1] + block, within // own, mask=live)
            tl.store(words_ptr + OFFSETS[2] + block, within % own, mask=live)
    # What the valid mask ends at once, and the mask itself.
    for start in range(here * BLOCKS_HERE, max_blocks, programs * BLOCKS_HERE):
        block = start + tl.arange(0, BLOCKS_HERE)
        inside = block < max_blocks
        used = block < total * Q_TILES
        zero = block * 0
        tl.store(words_ptr + OFFSETS[0] + block, zero, mask=inside & (used == 0))
        tl.store(words_ptr + OFFSETS[1] + block, zero, mask=inside & (used == 0))
        tl.store(words_ptr + OFFSETS[2] + block, zero, mask=inside & (used == 0))
        tl.store(valid_ptr + block, used.to(tl.uint8), mask=inside)
    if here == 0:
        tl.store(words_ptr + OFFSETS[3], 0)
        tl.store(words_ptr + OFFSETS[4], 0)
        tl.store(words_ptr + OFFSETS[5], chunk)
        tl.store(words_ptr + OFFSETS[6], max_batch * Q_LEN)


def require_plan(t: PlanTensors, shape: PlanShape, seq_len_delta: int) -> EveryCall:
    """Raise unless these are tensors of a plan of `shape`."""
    require_tensor("seq_lens", t.seq_lens, (None,), "int32", "int64", contiguous=True)
    if t.seq_lens.shape[0] > shape.max_batch_size:
        raise ValueError(
            f"seq_lens must hold at most {shape.max_batch_size} requests, as captured, got "
            f"{t.seq_lens.shape[0]}"
        )
    require_int("seq_len_delta", seq_len_delta, least=0)
    layout = Layout.of(shape)
    require_tensor("words", t.words, (layout.valid // 4,), "int32", contiguous=True)
    require_tensor("valid", t.valid, (shape.max_blocks,), "uint8", contiguous=True)
    require_tensor("ladder", t.ladder, (WHOLE,), "int32", contiguous=True)
    require_one_device(t._asdict())
    return EveryCall(((0, INT32_MAX),), ())


def derive(t: PlanTensors, shape: PlanShape) -> Derived:
    """The launch: a program per REQUESTS requests."""
    layout, batch = Layout.of(shape), len(t.seq_lens)
    unit = TILE_TOKENS << shape.coarse
    wide = max(16, triton.next_power_of_2(max(batch, 1)))
    spans = (min(WIDE, wide), min(SCORED, wide), REQUESTS, BLOCKS, WIDTH)
    offsets = (layout.request, layout.q_tile, layout.kv_tile, layout.o_indptr)
    constants = (
        *(shape.q_len, shape.q_tiles, facts_of(shape)),
        (TILE_TOKENS, unit, CHUNK_STEP, MIN_CHUNK, WHOLE),
        (*spans, triton.next_power_of_2(shape.q_len)),
        (*offsets, layout.merge_indptr, layout.chunk, layout.rows),
    )
    grid = (max(-(-shape.max_batch_size // REQUESTS), min(8, -(-shape.max_blocks // BLOCKS))), 1)

    def cut(seq_len_delta: int) -> tuple[Grid, tuple[object, ...], int]:
        return grid, constants, WARPS

    most = min(shape.max_seq_len, shape.seen)
    return Derived(batch, (most, shape.max_blocks, shape.max_batch_size), cut)


def facts_of(shape: PlanShape) -> tuple[float, ...]:
    """FACTS of the kernel: what the twin rounds to float32 before the batch is looked at."""
    rates, own = shape.rates, np.float32(shape.rates.block_tokens)
    slots = f32(shape.slots)
    full, first = (shape.us_per_token(f32(x)) for x in (shape.slots, 1))
    shares = (rates.mean_share, rates.longest_share, first, rates.mixing)
    costs = (shape.merge_us, rates.deep_us, rates.cut_us, rates.start_us)
    squared = (2 * own * TILE_TOKENS, own * own, full / slots)
    known = (shape.copies, shape.slots, shape.shared_us, shape.alone_us**2, own)
    return tuple(float(f32(fact)) for fact in (*known, *squared, *shares, *costs))


LAUNCHER = Launcher(plan_kernel, PlanTensors, require_plan, derive, enable_fp_fusion=False)


def ladder(device: torch.device) -> torch.Tensor:
    """The fixed candidates that every launch reads: int32 on `device`."""
    return torch.tensor(LADDER, dtype=torch.int32).to(device)


def plan_fa2(tensors: PlanTensors, shape: PlanShape, *, seq_len_delta: int = 0) -> None:
    """Write the plan of `shape` for `seq_lens` [bs] int32 or int64 into `words` and `valid`.

    One launch, nothing is read back; capturable. Rows past `seq_lens` are empty. Lengths, delta
    added, count as at most `max_seq_len`. Raises ValueError or TypeError before the launch.
    """
    LAUNCHER.launch(tensors, (shape,), (seq_len_delta,))
