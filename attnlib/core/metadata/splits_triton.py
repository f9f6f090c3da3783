"""`splits` once more, in Triton: the schedule that FlashAttention-3 would write, word for word.

The library sorts its requests. Here a request's place is the number of those ahead of it, counted:
programs of a few requests need nothing from each other that way, equal requests keep their order,
and each program sums the batch's blocks for itself. For one query token a request, where every
request has as many query tiles: then KV blocks of a split decide the order, causal or not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..schedule.splits import BATCHES_PER_CTA

CTA = tl.constexpr(BATCHES_PER_CTA)
ROWS = tl.constexpr(8)
"""Requests that one program schedules: it compares each with all others at once, in registers that
the copying programs must not pay for. A block lies in one CTA's share of the library's order."""


@triton.jit
def kv_blocks(seq_lens, rows, inside, delta, block_n):
    """Blocks of `block_n` tokens that each of `rows` has; 0 outside."""
    lens = tl.load(seq_lens + rows, mask=inside, other=-delta).to(tl.int32) + delta
    return (lens + block_n - 1) // block_n


@triton.jit
def write_schedule(
    block,
    seq_lens,
    words,
    batch,
    delta,
    split_cap,
    m_blocks,
    block_n,
    heads,
    sms,
    l2_blocks,
    unpacked,
    SORTS: tl.constexpr,
    SWIZZLES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The words of requests `block` * ROWS and up; SPAN holds all that they are ordered among."""
    rows = block * ROWS + tl.arange(0, ROWS)
    first = block * ROWS // CTA * CTA
    others = first + tl.arange(0, SPAN)
    inside = (others < batch) & (others < first + CTA)
    blocks = kv_blocks(seq_lens, rows, rows < batch, delta, block_n)
    others_blocks = kv_blocks(seq_lens, others, inside, delta, block_n)
    # In float32 and in this order: the library rounds after each step.
    work = (tl.sum(others_blocks, 0) * m_blocks).to(tl.float32) * 1.1 * heads.to(tl.float32)
    share = tl.ceil(tl.div_rn(work, sms.to(tl.float32))).to(tl.int32)
    share = tl.maximum(share, 1)
    splits = tl.maximum(tl.minimum((blocks + share - 1) // share, split_cap), 1)
    each = (blocks + splits - 1) // splits
    places = rows
    if SORTS:
        others_splits = tl.minimum((others_blocks + share - 1) // share, split_cap)
        others_splits = tl.maximum(others_splits, 1)
        others_each = (others_blocks + others_splits - 1) // others_splits
        others_each = tl.where(inside, others_each, -1)
        earlier = others[None, :] < rows[:, None]
        ahead = others_each[None, :] > each[:, None]
        ahead |= (others_each[None, :] == each[:, None]) & earlier
        places = tl.where(rows < batch, first + tl.sum(ahead.to(tl.int32), 1), rows)
    padded = (batch + 3) // 4 * 4
    live, room = rows < batch, rows < padded
    tl.store(words + places, tl.where(live, splits, 0), mask=room)
    tl.store(words + padded + places, tl.where(live, m_blocks, 0), mask=room)
    end = 2 * padded
    if SORTS:
        tl.store(words + end + places, tl.where(live, rows, 0), mask=room)
        end += padded
    if SWIZZLES:
        fit = l2_blocks // tl.maximum(each, 1)
        in_l2 = tl.where(fit >= 4, 4, tl.where(fit >= 2, 2, 1))
        in_l2 = tl.where(fit >= 16, 16, tl.where(fit >= 8, 8, in_l2))
        in_l2 = tl.minimum(in_l2 * unpacked, heads)
        tl.store(words + end + places, tl.where(live, in_l2, 0), mask=room)
        end += padded
    if block == 0:
        tl.store(words + end, 0)
