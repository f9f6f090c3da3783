"""vLLM's copy of page numbers, where vLLM is installed: a rival of the page arrays.

vLLM 0.33.0 sums the pages on the host and copies the sums to the GPU (v1/attention/backends/
flashinfer.py:1519). One kernel, a program per request, then copies the numbers of a block table
(:2960): it alone is timed. Its block table has the rows that the pool's requests point to.
"""

import torch
from packaging.version import Version

from ...core.backends.table import LIBRARIES, installed_version

AT_ONCE = 1024
"""Pages that a program copies at once (flashinfer.py:1540)."""


def unavailable() -> str:
    """Why vLLM's kernel cannot be had here (and what to install), or the empty string."""
    least, release = LIBRARIES["vllm"].since, installed_version("vllm")
    if release and Version(release) >= Version(least):
        return ""
    return f"vllm must be {least} or later, got {release or 'none'}: pip install vllm"


def of_the_host(
    inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], page_size: int
) -> dict[str, torch.Tensor]:
    """What vLLM has before its kernel runs: a `block_table` [bs, pages] int32.

    The sums `kv_indptr` and `kv_last_page_len` are written into `outputs` here.
    """
    lens, slots = inputs["seq_lens"], inputs["req_to_token"][inputs["req_pool_indices"]]
    pages = -(-lens // page_size)
    outputs["kv_indptr"][0] = 0
    outputs["kv_indptr"][1:] = pages.cumsum(0)
    outputs["kv_last_page_len"].copy_(lens - (pages - 1) * page_size)
    return {"block_table": (slots[:, ::page_size] // page_size).contiguous()}


def build_kv_indices(
    *, block_table: torch.Tensor, seq_len_delta: int = 0, **call: torch.Tensor | int
) -> None:
    """`kv_indices` of the rows of `block_table`, by vLLM's kernel."""
    if seq_len_delta:
        raise ValueError(f"seq_len_delta must be 0 for vLLM's kernel, got {seq_len_delta}")
    from vllm.v1.attention.backends.flashinfer import _copy_page_indices_kernel as kernel

    arguments = call["kv_indices"], block_table, block_table.stride(0), call["kv_indptr"]
    kernel[(len(block_table),)](*arguments, BLOCK_SIZE=AT_ONCE)
