"""FlashAttention-3 itself (`flash_attn_with_kvcache`), over pages.

flash-attn-3 and flash-attn-3-extend prepare a schedule in every call, by a kernel of its own;
flash-attn-3-precomputed does it once, in `plan`. Query and cache share a dtype; with FP8 the output
is bfloat16. FlashInfer's fa3 is another kernel: the trace calls this one flash-attn-3.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from ..batch import DecodeBatch, PagedKV
from ..extend import ExtendBatch
from ..schedule import library
from ..schedule.facts import FULL, SchedulerFacts
from ..schedule.flash_attn3 import SchedulerMetadata, current_stream, precompute, sm_count
from ..spec import CUSTOM_MASKS, AttnSpec
from .base import Backend, Batch, Plan, require_same_table
from .table import Entry

MAX_HEAD_DIM = 256


class _FlashAttention(Backend[Batch, PagedKV]):
    """What the modes share: where the library is, and what it takes."""

    source = library.FLASH_ATTN_3

    @staticmethod
    def reported() -> str:
        """What a plan reports: the kernel family, and the distribution that it came with."""
        return f"flash-attn-3 ({library.supplier()})"

    @classmethod
    def unsupported(cls, entry: Entry, spec: AttnSpec, mask: str) -> str:
        """Custom masks, two dtypes; head_dim above 256 or not in steps of 16 bytes."""
        if mask in CUSTOM_MASKS:
            return f"FlashAttention-3 takes no custom mask, got {mask}"
        if spec.dtype != spec.kv_dtype:
            return f"query and cache must share a dtype, got {spec.dtype}/{spec.kv_dtype}"
        step = 16 if spec.dtype.startswith("float8") else 8
        if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % step:
            return (
                f"head_dim must be a multiple of {step} up to {MAX_HEAD_DIM}, got {spec.head_dim}"
            )
        return ""


class Fa3(_FlashAttention[DecodeBatch]):
    """Every call prepares its own schedule. A plan's state is the batch with lengths and
    page table of its own, and the metadata or None."""

    takes_sinks = True
    precomputes: ClassVar[bool] = False
    most_splits: ClassVar[int] = 0

    def plan(self, batch: DecodeBatch, out: Plan[DecodeBatch] | None = None) -> Plan[DecodeBatch]:
        """Copy lengths, page table and sinks, and precompute the metadata where the mode does.

        `out` must have the same page-table shape: a graph holds its buffers.
        """
        if out is not None:
            own, metadata = out.state
            require_same_table((own.spec, own.page_table), (batch.spec, batch.page_table))
            own.page_table.copy_(batch.page_table)
            own.seq_lens.copy_(batch.seq_lens)
            if batch.sinks is not None:
                own.sinks.copy_(batch.sinks)
            if metadata is not None:
                metadata.renew(own.seq_lens, seq_lens_cpu=batch.seq_lens_cpu)
            return Plan(batch, self.reported(), out.state)
        lens, table = batch.seq_lens.clone(), batch.page_table.clone()
        sinks = None if batch.sinks is None else batch.sinks.clone()
        own = replace(batch, seq_lens=lens, page_table=table, sinks=sinks)
        metadata = None
        if self.precomputes:
            facts = facts_of(own, num_splits=self.most_splits)
            metadata = precompute(facts, own.seq_lens, seq_lens_cpu=batch.seq_lens_cpu)
        return Plan(batch, self.reported(), (own, metadata))

    def run(self, q: torch.Tensor, cache: PagedKV, plan: Plan[DecodeBatch]) -> torch.Tensor:
        """`attend` with the plan's buffers."""
        own, metadata = plan.state
        return attend(q, cache, own, num_splits=self.most_splits, metadata=metadata)


class Fa3Precomputed(Fa3):
    """Metadata once per step, whatever the number of layers."""

    precomputes = True

    def hand_over(self, plan: Plan[DecodeBatch]) -> None:
        """Let another stream run the plan; the caller has ordered its work after the last one's."""
        plan.state[1].hand_over()


class Fa3Capped(Fa3Precomputed):
    """The same with at most 32 splits of a request, as vLLM asks for in CUDA graphs.

    `flash_attn_max_num_splits_for_cuda_graph` (vLLM 0.33.0, v1/attention/backends/flash_attn.py).
    """

    most_splits = 32


class Fa3OneSplit(Fa3Precomputed):
    """The same with no request split, so that an output does not depend on its batch.

    `num_splits` of SGLang 0.5.11 with --enable-deterministic-inference
    (flashattention_backend.py).
    """

    most_splits = 1


class Fa3Extend(_FlashAttention[ExtendBatch]):
    """Several queries per request, as many as each has; no custom mask."""

    def plan(self, batch: ExtendBatch, out: Plan[ExtendBatch] | None = None) -> Plan[ExtendBatch]:
        """Copy lengths, prefix sums and page table; with `out` into its buffers, if they fit."""
        held = batch.cloned() if out is None else out.state
        if out is not None:
            held.overwrite(batch)
        return Plan(batch, self.reported(), held)

    def run(self, q: torch.Tensor, cache: PagedKV, plan: Plan[ExtendBatch]) -> torch.Tensor:
        """The library's call: over pages, or over K and V as they are."""
        cache.require_pages_of(plan.batch.spec)
        held, scale = plan.state, plan.batch.spec.softmax_scale
        options = {"causal": held.mask == "causal", "softmax_scale": scale}
        if held.ragged:
            longest = (held.max_q_len, held.max_q_len)
            tokens = (cache.k_cache[:, 0], cache.v_cache[:, 0])
            sums = (held.qo_indptr, held.paged.kv_indptr)
            return library.load().flash_attn_varlen_func(q, *tokens, *sums, *longest, **options)
        return library.load().flash_attn_with_kvcache(
            *(q, cache.k_cache, cache.v_cache),
            cache_seqlens=held.paged.seq_lens,
            page_table=held.paged.page_table,
            cu_seqlens_q=held.qo_indptr,
            max_seqlen_q=held.max_q_len,
            **options,
        )


def attend(
    q: torch.Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    *,
    q_len: int = 1,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    num_splits: int = 0,
    metadata: SchedulerMetadata | None = None,
) -> torch.Tensor:
    """Attention of `q` [bs * q_len, num_qo_heads, head_dim] over `batch`'s pages, like `q`.

    The queries of a request are the last `q_len` of its tokens; the mask is aligned to them.
    `window` is (left, right) tokens, -1 for no end; by default the layer's. `num_splits` caps the
    splits, 0 leaves it to the library. With `metadata` the call is refused (ValueError, nothing
    launched) unless it fits, and takes the metadata's cap. ValueError, too, for other pages than
    the batch's layer has. Output dtype is the query's, bfloat16 for FP8.
    """
    kv.require_pages_of(batch.spec)
    facts = _facts_of_call(
        tuple(q.shape),
        tuple(kv.k_cache.shape),
        tuple(batch.page_table.shape),
        (q.dtype, kv.k_cache.dtype, kv.v_cache.dtype),
        q.device,
        (q_len, causal, window or _window(batch), num_splits),
    )
    if metadata is None:
        return launch(q, kv, batch, facts)
    metadata.require_fits(facts, device=q.device, stream=current_stream(q.device))
    pinned = _with_cap(facts, metadata.facts.num_splits)
    out = launch(q, kv, batch, pinned, words=metadata.words)
    metadata.mark_used()
    return out


def launch(
    q: torch.Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    facts: SchedulerFacts,
    *,
    words: torch.Tensor | None = None,
) -> torch.Tensor:
    """The library's call as it is: nothing checks that `words` fit. `attend` is the safe one."""
    out = library.load().flash_attn_with_kvcache(
        q.view(facts.batch_size, facts.max_seqlen_q, facts.num_qo_heads, facts.head_dim),
        kv.k_cache,
        kv.v_cache,
        cache_seqlens=batch.seq_lens,
        page_table=batch.page_table,
        softmax_scale=batch.spec.softmax_scale,
        causal=facts.causal,
        window_size=facts.window,
        scheduler_metadata=words,
        num_splits=facts.num_splits,
        **({} if batch.sinks is None else {"sinks": batch.sinks}),
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
    """The facts of `attend` over `batch`, for `precompute`; arguments as there."""
    s = batch.spec
    dtype, kv_dtype = getattr(torch, s.dtype), getattr(torch, s.kv_dtype)
    return _facts_of_call(
        (batch.batch_size * q_len, s.num_qo_heads, s.head_dim),
        (0, s.page_size, s.num_kv_heads, s.head_dim),
        tuple(batch.page_table.shape),
        (dtype, kv_dtype, kv_dtype),
        batch.page_table.device,
        (q_len, causal, window or _window(batch), num_splits),
    )


def _window(batch: DecodeBatch) -> tuple[int, int]:
    """FlashAttention-3's window_size of the batch's layer."""
    return (batch.spec.window - 1, 0) if batch.spec.window else FULL


# Cached, because every layer asks: a decode step of one shape costs one dictionary look-up.
@lru_cache(maxsize=256)
def _facts_of_call(*call: Any) -> SchedulerFacts:
    """Facts from shapes of q, k_cache and page_table, dtypes, device, and the options."""
    q_shape, k_shape, table_shape, dtypes, device, (q_len, causal, window, num_splits) = call
    rows = table_shape[0] * q_len
    if len(q_shape) != 3 or q_shape[0] != rows:
        raise ValueError(
            f"q must be [{rows}, num_qo_heads, head_dim] for {table_shape[0]} requests of q_len "
            f"{q_len}, got {list(q_shape)}"
        )
    if k_shape[3] != q_shape[2] or len(set(dtypes)) > 1:
        raise ValueError(
            f"q, k_cache and v_cache must share head_dim and dtype, got head_dim {q_shape[2]} and "
            f"{k_shape[3]}, dtypes {', '.join(map(str, dtypes))}"
        )
    return SchedulerFacts(
        batch_size=table_shape[0],
        num_qo_heads=q_shape[1],
        num_kv_heads=k_shape[2],
        head_dim=q_shape[2],
        max_seqlen_q=q_len,
        max_seqlen_k=table_shape[1] * k_shape[1],
        num_sms=sm_count(device),
        page_size=k_shape[1],
        dtype=str(dtypes[0]).removeprefix("torch."),
        causal=causal,
        window=window,
        num_splits=num_splits,
        hdim96=library.has_hdim96(),
    )


@lru_cache(maxsize=256)
def _with_cap(facts: SchedulerFacts, num_splits: int) -> SchedulerFacts:
    return replace(facts, num_splits=num_splits)
