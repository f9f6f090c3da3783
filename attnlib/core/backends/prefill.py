"""FlashInfer's prefill wrappers: paged and ragged, one class for each backend they are asked for.

| backend | asked for | runs, bf16 on Hopper |
|---|---|---|
| flashinfer-prefill-fa2 | backend="fa2" | fa2 |
| flashinfer-prefill-fa3 | backend="fa3" | fa3; takes no custom mask |
| flashinfer-prefill-auto | backend="auto" | fa3, and fa2 under a custom mask |

A paged batch goes to BatchPrefillWithPagedKVCacheWrapper, a ragged one to
BatchPrefillWithRaggedKVCacheWrapper; the arguments are those that 0.6.3 to 0.7.2.post1 share.
`plan` copies prefix sums to the host and packs a custom mask into bits, so it synchronises and
cannot be captured; `run` can, and zeroes its paged output first, as the library does for engines.

Under CUDA graphs the first plan sets how many query rows there may be. fa2 cuts its tiles for the
case that one request has them all, and its workspace grows with rows x group size x num_qo_heads.

The verbs are those of `Backend`, with `plan(ExtendBatch)` and `unsupported(ExtendCase)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...kinds.extend.case import ExtendCase
from ..batch import PagedKV
from ..extend import ExtendBatch
from ..spec import CUSTOM_MASKS
from .base import Backend, Plan, missing, not_hopper

DISTRIBUTION = "flashinfer-python"
WORKSPACE_BYTES = 512 * 2**20
"""SGLang's for its larger models; 128 MiB do not hold fa2's partial outputs in a graph of 4096
rows, 32 query heads and group size 4."""
HEAD_DIMS = (64, 128, 256)
MASK_BITS = 8


@dataclass(frozen=True)
class _Step:
    """A wrapper, and how it wants the cache: its arguments after the query."""

    wrapper: Any
    cache_arguments: Callable[[PagedKV], tuple[Any, ...]]


class _FlashInferPrefill(Backend):
    """What the modes share; each class asks for one of the library's backends."""

    distribution = DISTRIBUTION
    requested: ClassVar[str]

    def plan(self, batch: ExtendBatch, out: Plan | None = None) -> Plan:
        """FlashInfer's own plan; with `out`, its wrapper replans in its fixed buffers.

        `out` must have as many requests, page-table columns and the same mask. Synchronises.
        """
        if out is not None:
            out.batch.require_alike(batch)
        step = self._step(batch) if out is None else out.state
        spec = batch.spec
        step.wrapper.plan(
            *(_ragged_lengths(batch) if batch.ragged else _paged_lengths(batch)),
            causal=batch.mask == "causal",
            custom_mask=batch.custom_mask,
            sm_scale=spec.softmax_scale,
            q_data_type=getattr(torch, spec.dtype),
            kv_data_type=getattr(torch, spec.kv_dtype),
        )
        wrapper = step.wrapper
        reported = getattr(wrapper, "resolved_backend", None) or wrapper._backend
        return Plan(batch, reported, step)

    def run(self, q: torch.Tensor, kv: PagedKV, plan: Plan) -> torch.Tensor:
        """FlashInfer's own run: [rows, num_qo_heads, head_dim]."""
        return plan.state.wrapper.run(q, *plan.state.cache_arguments(kv))

    def _step(self, batch: ExtendBatch) -> _Step:
        form = "Ragged" if batch.ragged else "Paged"
        cls = getattr(_import_flashinfer(), f"BatchPrefillWith{form}KVCacheWrapper")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        buffers = _graph_buffers(batch) if self.cuda_graph else {}
        wrapper = cls(
            workspace, "NHD", use_cuda_graph=self.cuda_graph, **buffers, backend=self.requested
        )
        return _Step(wrapper, _contiguous if batch.ragged else _paged)

    @classmethod
    def unavailable(cls) -> str:
        """FlashInfer missing, or no CUDA GPU."""
        return missing(DISTRIBUTION)

    @classmethod
    def unsupported(cls, case: ExtendCase) -> str:
        """Other head_dims than FlashInfer compiles; FP8 queries, whose scales are not passed."""
        if case.spec.head_dim not in HEAD_DIMS:
            return f"head_dim must be one of {HEAD_DIMS}, got {case.spec.head_dim}"
        if "float8" in case.spec.dtype:
            return f"dtype must be bfloat16 or float16, got {case.spec.dtype}"
        return ""


class FlashInferPrefillAuto(_FlashInferPrefill):
    """What an engine gets that lets the library choose."""

    name = "flashinfer-prefill-auto"
    requested = "auto"


class FlashInferPrefillFa2(_FlashInferPrefill):
    """Pinned to fa2: any mask, query heads packed by group, split-KV."""

    name = "flashinfer-prefill-fa2"
    requested = "fa2"
    pinned_family = "fa2"


class FlashInferPrefillFa3(_FlashInferPrefill):
    """Pinned to fa3, FlashInfer's Hopper kernel: no packing, no split-KV."""

    name = "flashinfer-prefill-fa3"
    requested = "fa3"
    pinned_family = "fa3"

    @classmethod
    def unavailable(cls) -> str:
        """As the others, and compute capability 9.x exactly (wgmma)."""
        return super().unavailable() or not_hopper()

    @classmethod
    def unsupported(cls, case: ExtendCase) -> str:
        """Custom masks, and a cache of another dtype than the query."""
        if case.mask in CUSTOM_MASKS:
            return f"fa3 takes no custom mask, got {case.mask}"
        if case.spec.dtype != case.spec.kv_dtype:
            return f"fa3 wants one dtype, got {case.spec.dtype}/{case.spec.kv_dtype}"
        return super().unsupported(case)


def _import_flashinfer() -> Any:
    return importlib.import_module("flashinfer")


def _paged_lengths(batch: ExtendBatch) -> tuple[Any, ...]:
    paged, spec = batch.paged, batch.spec
    lengths = (batch.qo_indptr, paged.kv_indptr, paged.kv_indices, paged.kv_last_page_len)
    return (*lengths, spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)


def _ragged_lengths(batch: ExtendBatch) -> tuple[Any, ...]:
    spec = batch.spec
    sizes = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim)
    return (batch.qo_indptr, batch.paged.kv_indptr, *sizes)


def _paged(kv: PagedKV) -> tuple[Any, ...]:
    return ((kv.k_cache, kv.v_cache),)


def _contiguous(kv: PagedKV) -> tuple[Any, ...]:
    return (kv.k_cache[:, 0], kv.v_cache[:, 0])


def _graph_buffers(batch: ExtendBatch) -> dict[str, torch.Tensor]:
    qo_indptr_buf = torch.zeros_like(batch.qo_indptr)
    kv_indptr_buf = torch.zeros_like(batch.paged.kv_indptr)
    if batch.ragged:
        return {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
    buffers = {
        "qo_indptr_buf": qo_indptr_buf,
        "paged_kv_indptr_buf": kv_indptr_buf,
        # Room for every page-table column, so that a replan with longer requests still fits.
        "paged_kv_indices_buf": torch.zeros_like(batch.paged.page_table).flatten(),
        "paged_kv_last_page_len_buf": torch.ones_like(batch.paged.kv_last_page_len),
    }
    # The library takes a buffer for a mask to mean that there is one.
    if batch.custom_mask is None:
        return buffers
    tokens = batch.paged.page_table.shape[1] * batch.spec.page_size
    packed = batch.paged.batch_size * -(-batch.max_q_len * tokens // MASK_BITS)
    mask = torch.zeros(packed, dtype=torch.uint8, device=batch.qo_indptr.device)
    return {**buffers, "custom_mask_buf": mask, "mask_indptr_buf": torch.zeros_like(qo_indptr_buf)}
