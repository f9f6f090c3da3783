"""Lengths and their prefix sum on the GPU: device functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_SCAN = 4096
"""Lengths scanned at once; a larger batch takes several turns."""


def scan_width(batch: int) -> int:
    """Lengths a turn for a batch: a power of two in 32..MAX_SCAN."""
    return min(MAX_SCAN, max(32, triton.next_power_of_2(batch)))


@triton.jit
def load_lengths(seq_lens, rows, end, delta):
    """Lengths + delta of `rows`, int32; 0 from row `end` on, where nothing is read."""
    return tl.load(seq_lens + rows, mask=rows < end, other=-delta).to(tl.int32) + delta


@triton.jit
def write_lengths(seq_lens, cache_seqlens, cu_seqlens_k, batch, delta, SCAN: tl.constexpr):
    """`cache_seqlens` = lengths + delta, `cu_seqlens_k` = 0 and their running sums; int32."""
    tl.store(cu_seqlens_k, 0)
    total = 0
    for start in range(0, batch, SCAN):
        rows = start + tl.arange(0, SCAN)
        lens = load_lengths(seq_lens, rows, batch, delta)
        tl.store(cache_seqlens + rows, lens, mask=rows < batch)
        tl.store(cu_seqlens_k + 1 + rows, total + tl.cumsum(lens, 0), mask=rows < batch)
        total += tl.sum(lens, 0)
