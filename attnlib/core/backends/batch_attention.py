"""FlashInfer's BatchAttention: one persistent launch for decode and prefill, planned on the host.

Its plan cuts requests by length and deals the parts to blocks (TwoStageHolisticPlan of
scheduler.cuh): the strongest rival of our plan of fa2 where lengths differ. `plan` synchronises; a
replan writes into the workspace that a captured `run` reads. No engine decodes with it. Sources:
attention/_core.py of 0.6.13 and 0.7.2.post1.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from ..batch import DecodeBatch, PagedKV
from ..extend import ExtendBatch
from ..spec import CUSTOM_MASKS, AttnSpec
from .base import Backend, Plan
from .flashinfer import plan_options
from .table import Entry

Batches = DecodeBatch | ExtendBatch
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 2**31
"""The library's own 384 MiB hold no plan of many query heads: 50 of 200 random batches failed."""


class BatchAttention(Backend[Batches, PagedKV]):
    """One query per request, or any number: up to 16 rows of a KV head are one tile, more are tiles
    of 128.

    A plan's state is the library's object and a page array, large enough for longer requests.
    """

    def prepare(self, batch: Batches, held: Any) -> tuple[Any, Tensor]:
        """The library's plan, into the workspace and page array that are held. Synchronises."""
        if isinstance(batch, ExtendBatch):
            paged = batch.paged
            rows = batch.qo_indptr
            causal = batch.mask == "causal"
        else:
            paged = batch
            causal = False
            rows = batch.qo_indptr
        if held is None:
            flashinfer = importlib.import_module("flashinfer")
            wrapper = flashinfer.BatchAttention(kv_layout="NHD", device=str(self.device))
            wrapper.float_workspace_buffer = torch.empty(
                WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
            )
            held = (wrapper, torch.zeros_like(paged.page_table).flatten())
        wrapper, kv_indices = held
        kv_indices[: len(paged.kv_indices)].copy_(paged.kv_indices)
        spec = paged.spec
        wrapper.plan(
            qo_indptr=rows,
            kv_indptr=paged.kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=paged.seq_lens,
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.head_dim,
            head_dim_vo=spec.head_dim,
            page_size=spec.page_size,
            causal=causal,
            **plan_options(spec),
        )
        return wrapper, kv_indices

    def attend(self, q: Tensor, cache: PagedKV, plan: Plan[Any]) -> Tensor:
        """The library's run, without its log-sum-exp."""
        cache.require_pages_of(plan.batch.spec)
        wrapper = plan.state[0]
        out, _ = wrapper.run(q=q, kv_cache=(cache.k_cache, cache.v_cache))
        return out

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """No window, no custom mask, no FP8 query (its output would be FP8, too)."""
        if spec.window:
            return f"window must be 0, got {spec.window}"
        if mask in CUSTOM_MASKS:
            return f"takes no custom mask, got {mask}"
        if "float8" in spec.dtype:
            return f"dtype must be bfloat16 or float16, got {spec.dtype}"
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim must be 64, 128 or 256, got {spec.head_dim}"
        return ""
