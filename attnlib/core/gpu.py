"""What the code believes of a GPU that it cannot ask it, each with its record or its source.

What CUDA reports (SMs, L2, memory) is asked for, and stands in every record.
"""

REFERENCE = "sm90"
"""Architecture of the published records, as `select` spells it: they are of an H200."""
HOPPER = 9
"""Major compute capability that has wgmma: fa3, FlashAttention-3 and FlashMLA need it."""
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
