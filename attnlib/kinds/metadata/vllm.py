"""vLLM's copy of page numbers, where vLLM is installed: a rival of the page arrays.

vLLM 0.33.0 sums the pages on the host and copies the sums to the GPU (v1/attention/backends/
flashinfer.py:1519). One kernel, a program per request, then copies the numbers of a block table
(:2960): it alone is timed. Its block table has the rows that the pool's requests point to.
"""

from collections.abc import Callable
from functools import partial

import torch

from ...core.backends.table import installed_version

DISTRIBUTION = "vllm"
AT_ONCE = 1024
"""Pages that a program copies at once (flashinfer.py:1540)."""


def unavailable() -> str:
    """Why vLLM's kernel cannot be had here, or the empty string."""
    return "" if installed_version(DISTRIBUTION) else "vllm is not installed: pip install vllm"


def page_copy(
    inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], page_size: int
) -> Callable[[], object]:
    """The call that writes `kv_indices`; `kv_indptr` and `kv_last_page_len` are written here."""
    from vllm.v1.attention.backends.flashinfer import _copy_page_indices_kernel as kernel

    lens, slots = inputs["seq_lens"], inputs["req_to_token"][inputs["req_pool_indices"]]
    table = (slots[:, ::page_size] // page_size).contiguous()
    pages = -(-lens // page_size)
    outputs["kv_indptr"][0] = 0
    outputs["kv_indptr"][1:] = pages.cumsum(0)
    outputs["kv_last_page_len"].copy_(lens - (pages - 1) * page_size)
    arguments = outputs["kv_indices"], table, table.stride(0), outputs["kv_indptr"]
    return partial(kernel[(len(lens),)], *arguments, BLOCK_SIZE=AT_ONCE)
