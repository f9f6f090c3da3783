"""vLLM's decode kernels, out of its wheel: Triton's unified attention, and its FlashAttention-3.

Calls and sizes are those of vLLM 0.33.0 in full CUDA graphs (v1/attention/backends/triton_attn.py
and flash_attn.py): Triton splits requests into 16 parts while requests x KV heads are few, and the
schedule of FlashAttention-3, whose tiles have 64 query rows, is made once per step. vLLM's pages
hold 16 tokens or a multiple.
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batch import DecodeBatch, PagedKV
from ..spec import AttnSpec
from .base import Backend, Plan
from .table import Entry

PAGE_STEP = 16
SMALL_BATCHES = range(8, 256, 8)
LARGE_BATCHES = range(256, 513, 16)
CAPTURED = (1, 2, 4, *SMALL_BATCHES, *LARGE_BATCHES)
"""vLLM's batch sizes with a CUDA graph, by default (config/vllm.py)."""
BLOCKS_2D = 128
"""Requests x KV heads from which Triton's kernel does not split KV."""
SEGMENTS = 16
"""Splits of a request below that."""
MOST_SPLITS = 32
"""Splits of FlashAttention-3 in a CUDA graph (flash_attn_max_num_splits_for_cuda_graph)."""


class _Vllm(Backend[DecodeBatch, PagedKV]):
    """One query per request, over a 16-bit cache. A plan's state is the library's call, with all
    but query, cache and output."""

    def options(self, batch: DecodeBatch) -> dict[str, Any]:
        """Arguments of both kernels, with copies of the batch's lengths and page table."""
        spec = batch.spec
        return {
            "cu_seqlens_q": batch.qo_indptr,
            "max_seqlen_q": 1,
            "seqused_k": batch.seq_lens.clone(),
            "max_seqlen_k": batch.page_table.shape[1] * spec.page_size,
            "softmax_scale": spec.softmax_scale,
            "causal": True,
            "window_size": (spec.window - 1, 0) if spec.window else (-1, -1),
            "block_table": batch.page_table.clone(),
        }

    def overwrite(self, held: "partial[object]", batch: DecodeBatch) -> None:
        """Copy lengths and page table into what a call holds."""
        held.keywords["seqused_k"].copy_(batch.seq_lens)
        held.keywords["block_table"].copy_(batch.page_table)

    def attend(self, q: Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> Tensor:
        """The library's call."""
        cache.require_pages_of(plan.batch.spec)
        out = torch.empty_like(q)
        plan.state(
            q=q,
            k=cache.k_cache,
            v=cache.v_cache,
            out=out,
        )
        return out

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """Pages that vLLM does not make; FP8."""
        if spec.page_size % PAGE_STEP:
            return f"page_size must be a multiple of {PAGE_STEP}, as vLLM's, got {spec.page_size}"
        if "float8" in spec.dtypes:
            return f"dtype and kv_dtype must have 16 bits, got {spec.dtypes}"
        return ""


class VllmTriton(_Vllm):
    """Triton's unified attention, which plans nothing."""

    def prepare(self, batch: DecodeBatch, held: Any) -> "partial[object]":
        """Copy lengths and page table; the first time also reserve memory for partial outputs."""
        if held is not None:
            self.overwrite(held, batch)
            return held
        spec = batch.spec
        most = min(CAPTURED, key=lambda size: abs(size - BLOCKS_2D // spec.num_kv_heads))
        parts = (most, spec.num_qo_heads, SEGMENTS)
        padded = 1 << (spec.head_dim - 1).bit_length()  # the next power of two
        empty = partial(torch.empty, dtype=torch.float32, device=self.device)
        ops = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
        return partial(
            ops.unified_attention,
            **self.options(batch),
            q_descale=None,
            k_descale=None,
            v_descale=None,
            softcap=0.0,
            seq_threshold_3D=most,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=empty((*parts, padded)),
            softmax_segm_max=empty(parts),
            softmax_segm_expsum=empty(parts),
        )


class VllmFlashAttn3(_Vllm):
    """vLLM's build of FlashAttention-3. A plan makes the schedule, as vLLM does once per step."""

    def prepare(self, batch: DecodeBatch, held: Any) -> "partial[object]":
        """Copy lengths and page table, make the schedule; a replan overwrites its words."""
        library = importlib.import_module("vllm.vllm_flash_attn")
        spec = batch.spec
        if held is None:
            options = self.options(batch)
        else:
            options = held.keywords
        words = library.get_scheduler_metadata(
            batch_size=batch.batch_size,
            max_seqlen_q=1,
            max_seqlen_k=options["max_seqlen_k"],
            num_heads_q=spec.num_qo_heads,
            num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_dim,
            cache_seqlens=batch.seq_lens,
            qkv_dtype=getattr(torch, spec.dtype),
            cu_seqlens_q=options["cu_seqlens_q"],
            page_size=spec.page_size,
            causal=True,
            window_size=options["window_size"],
            num_splits=MOST_SPLITS,
        )
        if held is not None:
            self.overwrite(held, batch)
            options["scheduler_metadata"].copy_(words)
            return held
        return partial(
            library.flash_attn_varlen_func,
            **options,
            scheduler_metadata=words,
            num_splits=MOST_SPLITS,
            fa_version=3,
        )
