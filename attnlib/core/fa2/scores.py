"""The choice of `choice` on the GPU: every candidate's predicted time, and the chunk of the least.

Predicted times are float32 and equal the twin's to the bit: no multiply-add is fused, divisions and
square roots round to nearest, and sums are sums of integers.
"""

import triton
import triton.language as tl

ONE = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a float32 below 2^22 it rounds it to a whole number, in the lowest bits."""
ONE_BITS = tl.constexpr(0x4B400000)


@triton.jit
def counted_lengths(seq_lens_ptr, rows, batch, delta, most):
    """Tokens of requests `rows` that blocks look at, int32; 0 past the batch."""
    lens = tl.load(seq_lens_ptr + rows, mask=rows < batch, other=-delta).to(tl.int32) + delta
    return tl.minimum(tl.maximum(lens, 0), most)


@triton.jit
def cuts_of(lens, chunks, inverse):
    """max(ceil(lens / chunks) - 1, 0), given 1 / chunks. Half a token from the next whole number,
    a quotient of lengths up to 2^21 in float32 cannot reach it."""
    rounded = tl.fma(lens.to(tl.float32) + (chunks - 1).to(tl.float32) * 0.5, inverse, ONE)
    return tl.maximum(rounded.to(tl.int32, bitcast=True) - (ONE_BITS + 1), 0)


@triton.jit
def parts_of(lens, chunks, inverse):
    """ceil(lens / chunks)."""
    return cuts_of(lens, chunks, inverse) + (lens > 0).to(tl.int32)


@triton.jit
def us_per_token(blocks, slots, shared_us, alone):
    """Microseconds per token while so many blocks are in flight; `alone` is squared."""
    shared = tl.minimum(tl.maximum(blocks, 1.0), slots) * shared_us
    return tl.sqrt_rn(shared * shared + alone)


@triton.jit
def predicted_us(sums, live, cached, longest, chunks, FACTS: tl.constexpr, UNITS: tl.constexpr):
    """`choice.predicted_us`, of sums over the batch per candidate [64] int32."""
    TILE: tl.constexpr = 1 << UNITS[0]
    UNIT: tl.constexpr = 1 << UNITS[1]
    copies: tl.constexpr = FACTS[0]
    slots: tl.constexpr = FACTS[1]
    alone: tl.constexpr = FACTS[2]
    own: tl.constexpr = FACTS[3]
    shared_us = tl.where(cached, FACTS[16], FACTS[13])
    per_slot = tl.where(cached, FACTS[17], FACTS[14])
    at_first = tl.where(cached, FACTS[18], FACTS[15])
    n, ends, squares = sums
    n = n.to(tl.float32)
    ends = ends.to(tl.float32)
    some = live.to(tl.float32)
    chunk = ((chunks + (TILE - 1)) // TILE * TILE).to(tl.float32) + own
    whole = n - some
    rest = ends * TILE + some * own
    work = whole * chunk + rest
    power = squares.to(tl.float32) * (UNIT * UNIT) + ends * FACTS[4]
    power = whole * (chunk * chunk) + (power + some * FACTS[5])
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
    ending = tl.div_rn(work, tl.maximum(n, 1.0)) * (at_left - left * per_slot)
    ending = tl.where(left > 0, ending, 0.0)
    uneven = tl.div_rn(power, work) * FACTS[6] + longest_block * FACTS[7]
    uneven = uneven * at_first
    spread = tl.maximum(tl.div_rn(power * n, work * work) - 1.0, 0.0)
    weight = waves * FACTS[8] * spread
    drain = tl.div_rn(ending + weight * uneven, 1.0 + weight)
    many = tl.maximum(work * copies * per_slot + drain, longest_block * at_first)
    deepest = ((longest + chunks - 1) // chunks).to(tl.float32)
    cut = tl.where(deepest > 1, FACTS[11], 0.0)
    merge = whole * FACTS[9] + deepest * FACTS[10]
    return tl.where(blocks <= slots, one, many) + (merge + (cut + FACTS[12]))


@triton.jit
def add_scores(sums, lens, chunks, inverse, TILE_BITS: tl.constexpr, UNIT_BITS: tl.constexpr):
    """`sums` and what requests of `lens` [SPAN] add for each candidate [64]: further parts, tiles
    of last parts, and their squares."""
    cuts, ends, squares = sums
    more = cuts_of(lens[None, :], chunks[:, None], inverse[:, None])
    last = lens[None, :] - chunks[:, None] * more
    units = (last + ((1 << UNIT_BITS) - 1)) >> UNIT_BITS
    return (
        cuts + more,
        ends + ((last + ((1 << TILE_BITS) - 1)) >> TILE_BITS),
        squares + units * units,
    )


@triton.jit
def chosen_chunk(
    seq_lens_ptr,
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
    TILE_BITS: tl.constexpr = UNITS[0]
    UNIT_BITS: tl.constexpr = UNITS[1]
    STEP: tl.constexpr = UNITS[2]
    LEAST: tl.constexpr = UNITS[3]
    WHOLES: tl.constexpr = UNITS[4]
    FAR: tl.constexpr = SPANS[0]
    SPAN: tl.constexpr = SPANS[1]
    # The first requests are loaded once: small batches have no others.
    first = counted_lengths(seq_lens_ptr, tl.arange(0, SPAN), batch, delta, most)
    longest = tl.max(first, 0)
    CACHED: tl.constexpr = UNITS[5]
    tokens = tl.sum(tl.minimum(first, CACHED + 1), 0)
    live = tl.sum((first > 0).to(tl.int32), 0)
    for start in range(SPAN, batch, FAR):
        lens = counted_lengths(seq_lens_ptr, start + tl.arange(0, FAR), batch, delta, most)
        longest = tl.maximum(longest, tl.max(lens, 0))
        tokens += tl.sum(tl.minimum(lens, CACHED + 1), 0)
        live += tl.sum((lens > 0).to(tl.int32), 0)
    which = tl.arange(0, 2 * WHOLES)
    rung = tl.maximum(which - WHOLES, 0)
    fixed = ((4 + rung % 4) << (rung // 4)) * STEP
    equal = (tl.maximum(longest, 1) + which) // (which + 1)
    equal = (equal + STEP - 1) // STEP * STEP
    chunks = tl.maximum(tl.where(which < WHOLES, equal, fixed), LEAST)
    inverse = tl.div_rn(1.0, chunks.to(tl.float32))
    zero = tl.zeros((2 * WHOLES, SPAN), tl.int32)
    sums = add_scores((zero, zero, zero), first, chunks, inverse, TILE_BITS, UNIT_BITS)
    for start in range(SPAN, batch, SPAN):
        lens = counted_lengths(seq_lens_ptr, start + tl.arange(0, SPAN), batch, delta, most)
        sums = add_scores(sums, lens, chunks, inverse, TILE_BITS, UNIT_BITS)
    n = tl.sum(sums[0], 1) + live
    sums = (n, tl.sum(sums[1], 1), tl.sum(sums[2], 1))
    known = (tl.maximum(live, 1), tokens <= CACHED, longest, chunks)
    us = predicted_us(sums, *known, FACTS, UNITS)
    us = tl.where(n * Q_TILES <= max_blocks, us, float("inf"))
    fitting = tl.min(tl.where(n.to(tl.float32) * FACTS[0] <= FACTS[1], chunks, 0x7FFFFFFF), 0)
    us = tl.where(chunks == fitting, us * FACTS[19], us)
    # The least time, of those the first candidate, in one reduction: times are not negative.
    key = (us.to(tl.int32, bitcast=True).to(tl.int64) << 8) + which
    return (tl.min((key << 24) + chunks, 0) & 0xFFFFFF).to(tl.int32)
