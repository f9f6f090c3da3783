"""What the code assumes of a GPU that it cannot ask it. SMs, L2 and memory are asked for."""

HOPPER = 9
"""Major compute capability that has wgmma: fa3, FlashAttention-3 and FlashMLA need it."""
HOPPER_SMS = 132
"""Multiprocessors of an H100 or H200 (SXM), for models of a call that run without one."""
FA2_CTAS = 2
"""Blocks per SM that fa2's plan and its kernels for 16 query rows both count on."""
FA2_MEASURED = ("H100", "H200")
"""GPUs by whose times fa2's plan was chosen (H200) and judged (H100): `core.fa2.choice`."""
FETCH_BYTES = 64
"""The least read from memory: cudaLimitMaxL2FetchGranularity; an H200 uses it."""
