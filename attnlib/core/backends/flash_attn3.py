"""The FlashAttention-3 library (`flash_attn_with_kvcache`), over pages.

flash-attn-3 and flash-attn-3-extend prepare a schedule in every call, by a kernel of its own;
flash-attn-3-precomputed does it once, in `plan`. Query and cache share a dtype; with FP8 the output
is bfloat16. FlashInfer's fa3 is another kernel.
"""

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..batch import DecodeBatch, PagedKV
from ..extend import ExtendBatch
from ..schedule import library
from ..schedule.facts import SchedulerFacts, layer_facts
from ..schedule.flash_attn3 import SchedulerMetadata, precompute, sm_count
from ..spec import CUSTOM_MASKS, AttnSpec
from .base import Backend, Batch, Plan
from .table import Entry

MAX_HEAD_DIM = 256


class _FlashAttention(Backend[Batch, PagedKV]):
    """What the modes share: where the library is, and what it takes."""

    source = library.FLASH_ATTN_3

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """What the library cannot run."""
        return require_layer(spec, mask)


class FlashAttn3(_FlashAttention[DecodeBatch]):
    """Every call prepares its own schedule.

    A plan's state is the batch with its own lengths and page table, and the metadata if any.
    """

    precomputes: ClassVar[bool] = False

    def prepare(self, batch: DecodeBatch, held: Any) -> tuple[DecodeBatch, Any]:
        """Copy lengths and page table, and precompute the metadata where the mode does."""
        if held is None:
            copy = batch.cloned()
            metadata = None
            if self.precomputes:
                metadata = precompute(facts_of(copy), copy.seq_lens)
            return copy, metadata
        copy, metadata = held
        copy.overwrite(batch)
        if metadata is not None:
            metadata.renew(copy.seq_lens)
        return held

    def attend(self, q: Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> Tensor:
        """`attend` with the plan's buffers."""
        held, metadata = plan.state
        return attend(q, cache, held, metadata=metadata)


class FlashAttn3Precomputed(FlashAttn3):
    """Metadata once per step, whatever the number of layers."""

    precomputes = True


class FlashAttn3Extend(_FlashAttention[ExtendBatch]):
    """Several queries per request, any number for each; no custom mask."""

    def prepare(self, batch: ExtendBatch, held: Any) -> ExtendBatch:
        """Copy lengths, prefix sums and page table; `held` must have as many queries a request."""
        if held is None:
            return batch.cloned()
        held.overwrite(batch)
        return held

    def attend(self, q: Tensor, cache: PagedKV, plan: Plan[ExtendBatch]) -> Tensor:
        """The library's call: over pages, or over contiguous K and V."""
        cache.require_pages_of(plan.batch.spec)
        held = plan.state
        scale = plan.batch.spec.softmax_scale
        causal = held.mask == "causal"
        if held.ragged:
            return library.import_library().flash_attn_varlen_func(
                q=q,
                k=cache.k_cache[:, 0],
                v=cache.v_cache[:, 0],
                cu_seqlens_q=held.qo_indptr,
                cu_seqlens_k=held.paged.kv_indptr,
                max_seqlen_q=held.max_q_len,
                max_seqlen_k=held.max_q_len,
                causal=causal,
                softmax_scale=scale,
            )
        return library.import_library().flash_attn_with_kvcache(
            q=q,
            k_cache=cache.k_cache,
            v_cache=cache.v_cache,
            cache_seqlens=held.paged.seq_lens,
            page_table=held.paged.page_table,
            cu_seqlens_q=held.qo_indptr,
            max_seqlen_q=held.max_q_len,
            causal=causal,
            softmax_scale=scale,
        )


def require_layer(spec: AttnSpec, mask: str) -> str:
    """Why no build runs the layer: custom masks, two dtypes, head_dim above 256 or not in steps of
    16 bytes; the empty string if one does."""
    if mask in CUSTOM_MASKS:
        return f"FlashAttention-3 takes no custom mask, got {mask}"
    if spec.dtype != spec.kv_dtype:
        return f"query and cache must share a dtype, got {spec.dtype}/{spec.kv_dtype}"
    step = 16 if spec.dtype.startswith("float8") else 8
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % step:
        return f"head_dim must be a multiple of {step} up to {MAX_HEAD_DIM}, got {spec.head_dim}"
    return ""


def attend(
    q: Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    *,
    metadata: SchedulerMetadata | None = None,
    **options: Any,
) -> Tensor:
    """Attention of `q` [bs * q_len, num_qo_heads, head_dim] over `batch`'s pages, like `q`.

    `options` are those of `facts_of`. With `metadata` the call is refused (ValueError, nothing
    launched) unless it fits; it then has the metadata's cap. ValueError if query or cache are not
    those of the batch's layer. The output has the query's dtype, bfloat16 for FP8.
    """
    facts = facts_of(batch, **options)
    _require_tensors(q, kv, batch, facts.max_seqlen_q)
    if metadata is None:
        return launch(q, kv, batch, facts)
    metadata.require_fits(facts, device=q.device)
    capped = facts_of(batch, **options | {"num_splits": metadata.facts.num_splits})
    out = launch(
        q=q,
        kv=kv,
        batch=batch,
        facts=capped,
        words=metadata.words,
    )
    metadata.mark_used()
    return out


def launch(
    q: Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    facts: SchedulerFacts,
    *,
    words: Tensor | None = None,
) -> Tensor:
    """The library's call without a check that `words` fit. `attend` is the safe one."""
    out = library.import_library().flash_attn_with_kvcache(
        q=q.view(facts.batch_size, facts.max_seqlen_q, *q.shape[1:]),
        k_cache=kv.k_cache,
        v_cache=kv.v_cache,
        cache_seqlens=batch.seq_lens,
        page_table=batch.page_table,
        softmax_scale=batch.spec.softmax_scale,
        causal=facts.causal,
        window_size=facts.window,
        scheduler_metadata=words,  # None: a prepare kernel in this call
        num_splits=facts.num_splits,
    )
    return out.view(q.shape)


def facts_of(
    batch: DecodeBatch,
    *,
    q_len: int = 1,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    num_splits: int = 0,
) -> SchedulerFacts:
    """The facts of `attend` over `batch`, for `precompute`.

    The queries of a request are the last `q_len` of its tokens; the mask is aligned to them.
    `window` is (left, right) tokens, -1 for no end; by default the layer's. `num_splits` caps the
    splits, 0 leaves the number to the library.
    """
    return _facts(
        batch.spec,
        batch_size=batch.batch_size,
        columns=batch.page_table.shape[1],
        device=batch.page_table.device,
        max_seqlen_q=q_len,
        causal=causal,
        window=window,
        num_splits=num_splits,
    )


def _require_tensors(q: Tensor, kv: PagedKV, batch: DecodeBatch, q_len: int) -> None:
    """ValueError unless query and cache are those of the batch's layer."""
    spec = batch.spec
    kv.require_pages_of(spec)
    shape = (batch.batch_size * q_len, spec.num_qo_heads, spec.head_dim)
    dtypes = (q.dtype, kv.k_cache.dtype, kv.v_cache.dtype)
    wanted = getattr(torch, spec.dtype)
    if q.shape != shape or {*dtypes} != {wanted}:
        raise ValueError(
            f"q must be {list(shape)} for {batch.batch_size} requests of q_len {q_len}, and q, "
            f"k_cache and v_cache {spec.dtype}, got {list(q.shape)} and "
            f"{', '.join(map(str, dtypes))}"
        )


# Cached because every layer needs them: a decode step of one shape costs one dictionary look-up.
@lru_cache(maxsize=256)
def _facts(
    spec: AttnSpec,
    *,
    device: torch.device,
    **options: Any,
) -> SchedulerFacts:
    return layer_facts(
        spec,
        num_sms=sm_count(device),
        hdim96=library.has_hdim96(),
        build=library.build(),
        **options,
    )
