"""A plan for FlashInfer's fa2 in one launch: the choice of `choice`, the words of `words`.

    chunk        = the candidate with the least predicted time, in whole numbers: that of the twin
    parts[i]     = ceil(len[i] / chunk), 0 of an empty request
    o_indptr     = 0 and running sums of parts * q_len
    merge_indptr = 0 and, per query row, running sums of parts
    block j      : request r where the blocks before r are at most j, its tile and part j is

Every program chooses for itself, since waiting for another would cost more, then writes its share
of the blocks: it counts the requests that end before each. All words are written in every launch.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from ..batch import require_tensor
from ..metadata.launch import Derived, Grid, Launcher
from ..metadata.require import EveryCall, require_one_device
from ..spec import INT32_MAX, require_int
from .choice import CHUNK_STEP, LADDER, MIN_CHUNK, PARTS, TILE_TOKENS, WHOLE, PlanShape, per_token
from .words import Layout

ROWS = 64
"""Requests that a program looks at at once, for all candidates."""
BLOCKS = 64
"""Blocks of the grid that a program writes."""
WARPS = 8

PlanTensors = namedtuple("PlanTensors", "seq_lens ladder table words valid")


@triton.jit
def counted_lengths(seq_lens_ptr, rows, batch, delta, most):
    """Tokens of requests `rows` that blocks look at, int32; 0 past the batch."""
    lens = tl.load(seq_lens_ptr + rows, mask=rows < batch, other=-delta).to(tl.int32) + delta
    return tl.minimum(tl.maximum(lens, 0), most)


@triton.jit
def parts_of(lens, chunks):
    """ceil(lens / chunks) exactly, for lengths below 2^24: a float's quotient is off by one."""
    quotient = (lens.to(tl.float32) / chunks.to(tl.float32)).to(tl.int32)
    rest = lens - quotient * chunks
    quotient = tl.where(rest < 0, quotient - 1, tl.where(rest >= chunks, quotient + 1, quotient))
    return quotient + (quotient * chunks < lens).to(tl.int32)


@triton.jit
def chosen_chunk(
    seq_lens_ptr,
    ladder_ptr,
    table_ptr,
    batch,
    delta,
    most,
    max_blocks,
    COPIES: tl.constexpr,
    Q_TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    RATES: tl.constexpr,
    SIZES: tl.constexpr,
):
    """`choice.choose(...).chunk` as a scalar; RATES and SIZES are those of `constants_of`."""
    OWN: tl.constexpr = RATES[0]
    MERGE: tl.constexpr = RATES[1]
    DEEP: tl.constexpr = RATES[2]
    CUT: tl.constexpr = RATES[3]
    MEAN: tl.constexpr = RATES[4]
    LONGEST: tl.constexpr = RATES[5]
    MIXING: tl.constexpr = RATES[6]
    WHOLES: tl.constexpr = SIZES[0]
    STEP: tl.constexpr = SIZES[1]
    LEAST: tl.constexpr = SIZES[2]
    TILE: tl.constexpr = SIZES[3]
    SHARE: tl.constexpr = SIZES[4]
    SPAN: tl.constexpr = SIZES[5]

    longest = 0
    for start in range(0, batch, SPAN):
        lens = counted_lengths(seq_lens_ptr, start + tl.arange(0, SPAN), batch, delta, most)
        longest = tl.maximum(longest, tl.max(lens, 0))
    which = tl.arange(0, 2 * WHOLES)
    equal = (tl.maximum(longest, 1) + which) // (which + 1)
    equal = (equal + STEP - 1) // STEP * STEP
    fixed = tl.load(ladder_ptr + which - WHOLES, mask=which >= WHOLES, other=0)
    chunks = tl.maximum(tl.where(which < WHOLES, equal, fixed), LEAST)

    n32 = tl.zeros((2 * WHOLES, SPAN), tl.int32)
    uncut32 = tl.zeros((2 * WHOLES, SPAN), tl.int32)
    ends32 = tl.zeros((2 * WHOLES, SPAN), tl.int32)
    squares64 = tl.zeros((2 * WHOLES, SPAN), tl.int64)
    live = 0
    for start in range(0, batch, SPAN):
        lens = counted_lengths(seq_lens_ptr, start + tl.arange(0, SPAN), batch, delta, most)
        live += tl.sum((lens > 0).to(tl.int32), 0)
        parts = parts_of(lens[None, :], chunks[:, None])
        last = lens[None, :] - (parts - 1) * chunks[:, None]
        tiles = tl.where(lens[None, :] > 0, (last + TILE - 1) // TILE, 0)
        n32 += parts
        uncut32 += (parts == 1).to(tl.int32)
        ends32 += tiles
        squares64 += (tiles * tiles).to(tl.int64)
    n = tl.sum(n32, 1).to(tl.int64)
    uncut = tl.sum(uncut32, 1).to(tl.int64)
    ends = tl.sum(ends32, 1).to(tl.int64)
    squares = tl.sum(squares64, 1)
    live = tl.maximum(live, 1).to(tl.int64)

    chunk = ((chunks + TILE - 1) // TILE * TILE + OWN).to(tl.int64)
    whole = n - live
    rest = ends * TILE + OWN * live
    work = tl.maximum(whole * chunk + rest, 1)
    power = whole * chunk * chunk + squares * (TILE * TILE)
    power = power + 2 * OWN * TILE * ends + OWN * OWN * live
    longest_block = tl.minimum(chunks, longest)
    longest_block = ((longest_block + TILE - 1) // TILE * TILE + OWN).to(tl.int64)
    blocks = n * COPIES
    mean = rest // live
    short = tl.minimum(mean, chunk)
    at_all = tl.load(table_ptr + tl.minimum(tl.maximum(blocks, 1), SLOTS)).to(tl.int64)
    at_half = tl.load(table_ptr + tl.minimum(tl.maximum(blocks // 2, 1), SLOTS)).to(tl.int64)
    at_whole = tl.load(table_ptr + tl.minimum(tl.maximum(whole * COPIES, 1), SLOTS)).to(tl.int64)
    full_rate = tl.load(table_ptr + SLOTS).to(tl.int64)
    one_rate = tl.load(table_ptr + 1).to(tl.int64)
    one = short * at_all + (chunk - short) * at_whole
    one = tl.where(whole > 0, one, mean * at_all + (longest_block - mean) * at_half)
    waves = blocks // SLOTS
    left = blocks % SLOTS
    at_left = tl.load(table_ptr + tl.maximum(left, 1)).to(tl.int64)
    full = work * COPIES * full_rate // SLOTS
    partial = work // tl.maximum(n, 1) * (at_left - left * full_rate // SLOTS)
    partial = tl.where(left > 0, partial, 0)
    uneven = (MEAN * (power // work) + LONGEST * longest_block) * one_rate // SHARE
    spread = tl.maximum(power * n - work * work, 0) // (work * work // SHARE + 1)
    weight = tl.minimum(MIXING * waves * spread, 1048576)
    drain = (partial * SHARE + weight * uneven) // (SHARE + weight)
    deepest = (longest + chunks - 1) // chunks
    ps = tl.where(blocks <= SLOTS, one, full + drain) + (n - uncut) * MERGE
    ps = ps + deepest.to(tl.int64) * DEEP + tl.where(deepest > 1, CUT, 0)
    ps = tl.where(n * Q_TILES <= max_blocks, ps, 9223372036854775807)
    best = tl.argmin(ps, 0)
    return tl.sum(tl.where(which == best, chunks, 0), 0)


@triton.jit(do_not_specialize=["batch", "delta", "most", "max_blocks", "max_batch"])
def plan_kernel(
    # inputs
    seq_lens_ptr,  # [batch] int32 or int64
    ladder_ptr,  # [WHOLE] int32, candidates
    table_ptr,  # [slots + 1] int32, ps per token
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
    COPIES: tl.constexpr,
    Q_LEN: tl.constexpr,
    Q_TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    RATES: tl.constexpr,
    SIZES: tl.constexpr,
    OFFSETS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """See `plan_fa2`; OFFSETS are those of `Layout`."""
    # The kernel after us may read the words before it waits: it must not start early.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    SPAN: tl.constexpr = SIZES[5]
    BLOCKS_HERE: tl.constexpr = SIZES[6]
    Q_SPAN: tl.constexpr = SIZES[7]
    here = tl.program_id(0)
    chunk = chosen_chunk(
        *(seq_lens_ptr, ladder_ptr, table_ptr, batch, delta, most, max_blocks),
        *(COPIES, Q_TILES, SLOTS, RATES, SIZES),
    )
    block = here * BLOCKS_HERE + tl.arange(0, BLOCKS_HERE)
    request = tl.zeros((BLOCKS_HERE,), tl.int32)
    begin = tl.zeros((BLOCKS_HERE,), tl.int32)
    end = tl.full((BLOCKS_HERE,), 2147483647, tl.int32)
    total = 0
    o_indptr, merge_indptr = words_ptr + OFFSETS[3], words_ptr + OFFSETS[4]
    for start in range(0, max_batch, SPAN):
        rows = start + tl.arange(0, SPAN)
        parts = parts_of(counted_lengths(seq_lens_ptr, rows, batch, delta, most), chunk)
        ends = total + tl.cumsum(parts, 0)
        if start // SPAN % tl.num_programs(0) == here:
            live = rows < max_batch
            tl.store(o_indptr + 1 + rows, ends * Q_LEN, mask=live)
            query = tl.arange(0, Q_SPAN)
            before = (ends - parts)[:, None] * Q_LEN + (query[None, :] + 1) * parts[:, None]
            target = merge_indptr + 1 + rows[:, None] * Q_LEN + query[None, :]
            tl.store(target, before, mask=live[:, None] & (query[None, :] < Q_LEN))
        ended = ends[None, :] * Q_TILES
        passed = ended <= block[:, None]
        request += tl.sum(passed.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(passed, ended, 0), 1))
        end = tl.minimum(end, tl.min(tl.where(passed, 2147483647, ended), 1))
        total += tl.sum(parts, 0)
    used = block < total * Q_TILES
    own = tl.where(used, (end - begin) // Q_TILES, 1)
    within = tl.where(used, block - begin, 0)
    inside = block < max_blocks
    tl.store(words_ptr + OFFSETS[0] + block, tl.where(used, request, 0), mask=inside)
    tl.store(words_ptr + OFFSETS[1] + block, within // own, mask=inside)
    tl.store(words_ptr + OFFSETS[2] + block, within % own, mask=inside)
    tl.store(valid_ptr + block, used.to(tl.uint8), mask=inside)
    if here == 0:
        tl.store(o_indptr, 0)
        tl.store(merge_indptr, 0)
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
    require_tensor("table", t.table, (shape.slots + 1,), "int32", contiguous=True)
    require_one_device(t._asdict())
    return EveryCall(((0, INT32_MAX),), ())


def derive(t: PlanTensors, shape: PlanShape) -> Derived:
    """The launch: a program per BLOCKS blocks of the grid."""
    rates, layout = shape.rates, Layout.of(shape)
    own = (rates.block_tokens, rates.merge_ps * shape.q_len * shape.num_qo_heads, rates.deep_ps)
    shares = (rates.cut_ps, rates.mean_share, rates.longest_share, rates.mixing)
    sizes = (WHOLE, CHUNK_STEP, MIN_CHUNK, TILE_TOKENS, PARTS, ROWS, BLOCKS)
    offsets = (layout.request, layout.q_tile, layout.kv_tile, layout.o_indptr)
    constants = (
        *(shape.num_kv_heads * shape.q_tiles, shape.q_len, shape.q_tiles, shape.slots),
        (*own, *shares),
        (*sizes, triton.next_power_of_2(shape.q_len)),
        (*offsets, layout.merge_indptr, layout.chunk, layout.rows),
    )
    grid = (-(-shape.max_blocks // BLOCKS), 1)

    def cut(seq_len_delta: int) -> tuple[Grid, tuple[object, ...], int]:
        return grid, constants, WARPS

    most = min(shape.max_seq_len, shape.seen)
    return Derived(len(t.seq_lens), (most, shape.max_blocks, shape.max_batch_size), cut)


LAUNCHER = Launcher(plan_kernel, PlanTensors, require_plan, derive)


def tables(shape: PlanShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The ladder and the table of rates that every launch reads: int32 on `device`."""
    made = [torch.tensor(list(v), dtype=torch.int32) for v in (LADDER, per_token(shape))]
    return made[0].to(device), made[1].to(device)


def plan_fa2(tensors: PlanTensors, shape: PlanShape, *, seq_len_delta: int = 0) -> None:
    """Write the plan of `shape` for `seq_lens` [bs] int32 or int64 into `words` and `valid`.

    One launch, nothing is read back; capturable. Rows past `seq_lens` are empty. Lengths, delta
    added, count as at most `max_seq_len`. Raises ValueError or TypeError before the launch.
    """
    LAUNCHER.launch(tensors, (shape,), (seq_len_delta,))
