"""XQA, TensorRT-LLM's decode kernel, as FlashInfer brings it.

The call is vLLM's, which decodes with it on Hopper since 0.25.0 (#43232), 16-bit caches too:
`trtllm_batch_decode_with_kv_cache` with backend "xqa" (vllm/v1/attention/backends/flashinfer.py).
Rules of the releases read in their xqa.py, jit/xqa.py and decode.py, 0.5.3 to 0.7.2.post1. Nothing
is planned: a block's part of a request follows from the batch size and the page table's width.
vLLM's cache is HND, ours NHD: the kernels take strides of pages, tokens and heads.

Over an FP8 cache Hopper's kernel, of head_dim up to 256, rounds the query to FP8 without a scale,
and the probabilities (xqa/mha_sm90.cu, F16QToF8Converter). The oracle's query has 16 bits: refused.
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batch import DecodeBatch, PagedKV
from ..spec import AttnSpec
from .base import Backend, Plan, installed_version
from .limits import why_not
from .table import Entry

WORKSPACE_BYTES = 2**27
"""8 MiB of semaphores, then partial outputs of a block per SM. Must be zero at first use."""


class Xqa(Backend[DecodeBatch, PagedKV]):
    """One query per request. A plan's state is the library's call, with all but query and cache."""

    def prepare(self, batch: DecodeBatch, held: Any) -> partial[Tensor]:
        """Copy lengths and page table."""
        if held is not None:
            held.keywords["block_tables"].copy_(batch.page_table)
            held.keywords["seq_lens"].copy_(batch.seq_lens)
            return held
        spec = batch.spec
        decode = importlib.import_module("flashinfer.decode")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        return partial(
            decode.trtllm_batch_decode_with_kv_cache,
            workspace_buffer=workspace,
            block_tables=batch.page_table.clone(memory_format=torch.contiguous_format),
            seq_lens=batch.seq_lens.clone(),
            max_seq_len=batch.page_table.shape[1] * spec.page_size,
            bmm1_scale=spec.softmax_scale,
            window_left=spec.window - 1,
            kv_layout="NHD",
            backend=self.entry.asks,  # "xqa"; by default the library picks by GPU
        )

    def attend(self, q: Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> Tensor:
        """The library's call, which takes any query for contiguous."""
        cache.require_pages_of(plan.batch.spec)
        kv_cache = (cache.k_cache, cache.v_cache)
        return plan.state(query=q.contiguous(), kv_cache=kv_cache)

    @classmethod
    def unavailable(cls, entry: Entry) -> str:
        """As any backend, and on a GPU that the library has no XQA for."""
        if reason := super().unavailable(entry):
            return reason
        major, minor = torch.cuda.get_device_capability()
        if major in (9, 10, 12):
            return ""
        return f"needs compute capability 9.x, 10.x or 12.x, got {major}.{minor}"

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """The limits of the kernel, and FP8 caches."""
        release = installed_version(entry.distribution)
        limit = why_not(
            kernel=entry.asks,
            spec=spec,
            mode="decode",
            release=release,
        )
        if limit or "float8" not in spec.kv_dtype:
            return limit
        why = "up to head_dim 256 Hopper's kernel rounds the query to FP8 over an FP8 cache"
        return f"{why}, got {spec.dtypes}"
