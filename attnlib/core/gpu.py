"""What the code believes of a GPU that it cannot ask it, each with its record or its source.

What CUDA reports (SMs, L2, memory) is asked for, and stands in every record.
"""

from dataclasses import dataclass

REFERENCE = "sm90"
"""Architecture of the published records, as `select` spells it: they are of an H200."""
HOPPER = 9
"""Major compute capability that has wgmma: fa3, FlashAttention-3 and FlashMLA need it."""
SLOW_MHZ = 1900
"""SM clocks below this are a step down from the 1965 to 1980 MHz that an idle-cool H200 holds:
records of `fa3_decode_regression`."""

SM_SHARED_BYTES = 227 * 2**10
"""Shared memory that the blocks of an SM may have: CUDA's table of compute capabilities, 9.0."""
FA2_CTAS = 2
"""Blocks per SM that fa2's plan and its kernels for 16 query rows both count on."""
CUDA_CORE_CTAS = {
    (128, 2): {1: (6, 6), 2: (9, 9), 3: (9, 12), 4: (8, 8), 6: (8, 10), 8: (9, 9), 16: (3, 3)},
    (64, 2): {1: (6, 6), 2: (9, 9), 3: (9, 9), 4: (9, 9), 6: (9, 12), 8: (9, 9), 16: (7, 7)},
    (256, 2): {1: (6, 6), 2: (9, 9), 3: (10, 13), 4: (9, 9), 6: (6, 6), 8: (4, 4), 16: (2, 2)},
    (128, 1): {1: (6, 6), 2: (7, 7), 3: (7, 7), 4: (7, 7), 6: (6, 8), 8: (7, 7), 16: (5, 5)},
}
"""head_dim and bytes of a KV element -> group size -> blocks per SM that the CUDA cores' plan
counts on, and that fit: from registers and shared memory of FlashInfer's kernels, built for sm_90a
(cuobjdump --dump-resource-usage), of 0.6.4 for groups to 8 in the first row, of 0.7.2 else; those
of 0.7.2 differ in one place, (128, 2) and 4: (9, 9). The plan counts 128 threads where a block has
96."""

L2_SHARE, L2_SLOPE = 0.8, 24
"""Share of the L2 at which half of a cache's bytes come from memory, and how sharply that grows: an
H200 (60 MiB) misses 0.2 of 46 MB and all of 54 MB in back-to-back replays (LOG.md, 2026-11-21)."""
SECTOR_BYTES = 32
"""The least that the L2 cache hands out."""
FETCH_BYTES = 64
"""The least that it reads from memory: cudaLimitMaxL2FetchGranularity, and what an H200 takes."""


@dataclass(frozen=True)
class Fa2Rates:
    """What blocks of fa2 take, for `core.fa2.choice`.

    `memory_gbps` is what all blocks together reach, `cached_times` as much where K and V fit the
    `cached_mib` of the L2, `block_gbps` one alone; `block_tokens` is what starting a block costs.
    Microseconds: `start_us`, `merge_us` per partial row and query head, `deep_us` per part of the
    longest request, `cut_us` of any cut. The shares and `mixing` say how the last blocks end.
    """

    memory_gbps: float
    block_gbps: float
    block_tokens: float
    merge_us: float
    cut_us: float
    start_us: float
    deep_us: float
    mean_share: float
    longest_share: float
    mixing: float
    cached_times: float
    cached_mib: float


FA2_RATES: dict[int | tuple[int, int, int], Fa2Rates] = {
    16: Fa2Rates(4950, 35.7, 48.5, 7.09e-4, 1.33, 8.6, 0.0287, 0.134, 0.145, 90.4, 1.62, 50),
    64: Fa2Rates(6360, 16.3, 36.5, 2.76e-4, 1.42, 8.6, 0.0287, 0.134, 0.145, 90.4, 1.62, 50),
    128: Fa2Rates(7340, 9.45, 25, 1.31e-4, 1.46, 8.6, 0.0287, 0.134, 0.145, 90.4, 1.62, 50),
    (16, 64, 2): Fa2Rates(7770, 19, 50, 7.9e-4, 1.57, 8.6, 0.0287, 0.134, 0.145, 90.4, 1.62, 50),
    (16, 256, 2): Fa2Rates(
        *(5090, 34.5, 39.7, 6.17e-4, 1.4, 8.6, 0.0287, 0.134, 0.145, 90.4, 1.62, 50)
    ),
    (16, 128, 1): Fa2Rates(
        *(3420, 12.4, 74.6, 7.36e-4, 1.48, 8.6, 0.0287, 0.134, 0.145, 90.4, 1.62, 50)
    ),
}
"""Query rows of a block, or (rows, head_dim, bytes of a KV element) -> rates on `FA2_RATES_OF`,
fitted to chunk sweeps there. Elsewhere a guess: `python -m attnlib rates` learns them anew."""
FA2_RATES_OF = "NVIDIA H200"
