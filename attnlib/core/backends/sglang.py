"""SGLang's kernels for decode on Hopper: its build of FlashAttention-3, and Triton for MLA.

Calls are those of SGLang 0.5.23 (flashattention_backend.py and triton_backend.py of
srt/layers/attention). FlashAttention-3 is told the query rows by prefix sums. Its schedule is made
once per step for one query token of grouped-query layers without a window. Window layers, MLA and
several query tokens prepare it in every layer, so there it is part of the call.

The cap of splits is the entry's (`schedule.caps`): SGLang passes 0, which is `default`. `upstream`
and `bounded` are computed by the model of the build, for releases of sglang-kernel that were read.
"""

import importlib
from abc import abstractmethod
from functools import partial
from typing import Any

import torch

from ..batch import DecodeBatch, PagedKV
from ..extend import ExtendBatch
from ..mla import MlaBatch, require_pages
from ..schedule import library
from ..schedule.caps import BOUNDED, UPSTREAM, num_splits
from ..schedule.facts import SchedulerFacts, latent_facts, layer_facts
from ..schedule.flash_attn3 import sm_count
from ..spec import LATENT_DIM, MLA_HEAD_DIM, AttnSpec, MlaSpec
from .base import Backend, Batch, Cache, Plan
from .flash_attn3 import require_layer
from .table import Entry

VERSION = 3
"""`ver` of the library's call: 4 would be FlashAttention-4."""
TRITON_LEAST_SPLITS = 8
"""SGLang's default of --triton-attention-num-kv-splits."""
TRITON_BLOCK_KV = 32
"""Tokens that a split of Triton's MLA kernel has at least (_MLA_DECODE_MIN_BLOCK_KV)."""
SCHEDULED_REQUESTS = 256
"""Requests that Triton's kernel of splits is compiled for, unless there are more."""


class _SglangFlashAttn3(Backend[Batch, Cache]):
    """What the modes share. A plan's state is the library's call, with all but query and cache."""

    source = library.SGLANG_FLASH_ATTN_3

    @abstractmethod
    def facts(self, batch: Batch) -> SchedulerFacts:
        """The call as the library's heuristic sees it, with no cap given."""

    @abstractmethod
    def tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The batch's tensors by the library's names; a replan overwrites them."""

    def prepare(self, batch: Batch, held: Any) -> "partial[torch.Tensor]":
        """Copy lengths and page table; the first time also settle the cap of splits."""
        given = self.tensors(batch)
        if held is not None:
            for name, tensor in given.items():
                held.keywords[name].copy_(tensor)
            return held
        facts = self.facts(batch)
        kept = {name: tensor.clone() for name, tensor in given.items()}
        return partial(
            library.import_library(self.source).flash_attn_with_kvcache,
            **kept,
            max_seqlen_q=facts.max_seqlen_q,
            softmax_scale=batch.spec.softmax_scale,
            causal=facts.causal,
            window_size=facts.window,
            num_splits=num_splits(facts, self.entry.cap),
            ver=VERSION,
        )

    def reported(self, state: Any) -> str:
        """The family, and who built it."""
        return f"{self.entry.family} ({library.SGLANG_KERNEL})"

    @classmethod
    def unavailable(cls, entry: Entry) -> str:
        """Why it cannot run here: also where its release has a cap of splits that was not read."""
        reason = super().unavailable(entry)
        is_modelled = entry.cap in (UPSTREAM, BOUNDED)
        if is_modelled:
            reason = reason or library.unread_release()
        return reason


class _OfLayers(_SglangFlashAttn3[Batch, PagedKV]):
    """The modes over a paged cache of keys and values."""

    def attend(
        self,
        q: torch.Tensor,
        cache: PagedKV,
        plan: Plan[Batch],
    ) -> torch.Tensor:
        """The library's call: like `q`."""
        cache.require_pages_of(plan.batch.spec)
        return plan.state(
            q=q,
            k_cache=cache.k_cache,
            v_cache=cache.v_cache,
        )

    @classmethod
    def unsupported(
        cls,
        entry: Entry,
        spec: AttnSpec,
        mask: str,
    ) -> str:
        """What FlashAttention-3 cannot run."""
        return require_layer(spec, mask)


class SglangDecode(_OfLayers[DecodeBatch]):
    """One query per request. `plan` makes the schedule of a layer without a window, as SGLang does
    once per step."""

    def facts(self, batch: DecodeBatch) -> SchedulerFacts:
        """One query token, over the whole page table."""
        return facts_of_layer(batch, max_seqlen_q=1)

    def tensors(self, batch: DecodeBatch) -> dict[str, torch.Tensor]:
        """Lengths, pages, and one query row per request."""
        return {
            "cache_seqlens": batch.seq_lens,
            "page_table": batch.page_table,
            "cu_seqlens_q": batch.qo_indptr,
        }

    def prepare(self, batch: DecodeBatch, held: Any) -> "partial[torch.Tensor]":
        """The call, with the schedule of these lengths unless the layer has a window."""
        call = super().prepare(batch, held)
        if batch.spec.window:
            return call
        words = self._schedule(batch, call)
        if held is None:
            return partial(call, scheduler_metadata=words)
        held.keywords["scheduler_metadata"].copy_(words)
        return held

    def _schedule(self, batch: DecodeBatch, call: "partial[torch.Tensor]") -> torch.Tensor:
        """The schedule by the cap of the call; SGLang takes the longest request for the width."""
        spec = batch.spec
        return library.import_library(self.source).get_scheduler_metadata(
            batch_size=batch.batch_size,
            max_seqlen_q=1,
            max_seqlen_k=int(batch.seq_lens_cpu.max()),
            num_heads=spec.num_qo_heads,
            num_heads_k=spec.num_kv_heads,
            headdim=spec.head_dim,
            cache_seqlens=call.keywords["cache_seqlens"],
            qkv_dtype=getattr(torch, spec.dtype),
            cu_seqlens_q=call.keywords["cu_seqlens_q"],
            page_size=spec.page_size,
            causal=True,
            num_splits=call.keywords["num_splits"],
        )


class SglangExtend(_OfLayers[ExtendBatch]):
    """Several queries per request, any number for each: verification of drafts, or a prefill."""

    def facts(self, batch: ExtendBatch) -> SchedulerFacts:
        """The most query tokens of a request, over the whole page table."""
        causal = batch.mask == "causal"
        return facts_of_layer(batch.paged, max_seqlen_q=batch.max_q_len, causal=causal)

    def tensors(self, batch: ExtendBatch) -> dict[str, torch.Tensor]:
        """Lengths, pages, and prefix sums of the queries."""
        return {
            "cache_seqlens": batch.paged.seq_lens,
            "page_table": batch.paged.page_table,
            "cu_seqlens_q": batch.qo_indptr,
        }

    def prepare(self, batch: ExtendBatch, held: Any) -> "partial[torch.Tensor]":
        """The call; ValueError for contiguous K and V, which SGLang gives another function."""
        if batch.ragged:
            raise ValueError(f"{self.entry.name} must have a paged cache, got contiguous K and V")
        if held is not None:
            most = held.keywords["max_seqlen_q"]
            if batch.max_q_len > most:
                raise ValueError(f"q_lens must be at most {most}, as first planned, got more")
        return super().prepare(batch, held)


class SglangMla(_SglangFlashAttn3[MlaBatch, torch.Tensor]):
    """Latent attention over all tokens of a bfloat16 cache, one query token or several.

    Keys are the rotary part; values are the latent part, which is scored by `qv`.
    """

    def facts(self, batch: MlaBatch) -> SchedulerFacts:
        """One latent KV head, with keys of 64 and values of 512 dims."""
        table = batch.paged.page_table
        return latent_facts(
            batch.spec,
            columns=table.shape[1],
            batch_size=batch.batch_size,
            max_seqlen_q=batch.q_len,
            num_sms=sm_count(table.device),
            causal=True,
            varlen_q=True,
            build=library.sglang_build(),
        )

    def tensors(self, batch: MlaBatch) -> dict[str, torch.Tensor]:
        """Lengths, pages, and `q_len` query rows per request."""
        return {
            "cache_seqlens": batch.paged.seq_lens,
            "page_table": batch.paged.page_table,
            "cu_seqlens_q": batch.paged.qo_indptr * batch.q_len,
        }

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        plan: Plan[MlaBatch],
    ) -> torch.Tensor:
        """The library's call: [bs * q_len, num_qo_heads, 512]."""
        require_pages(cache, plan.batch.highest_page)
        pages = cache[:, :, None]
        return plan.state(
            q=q[..., LATENT_DIM:],
            qv=q[..., :LATENT_DIM],
            k_cache=pages[..., LATENT_DIM:],
            v_cache=pages[..., :LATENT_DIM],
        )

    @classmethod
    def unsupported(
        cls,
        entry: Entry,
        spec: MlaSpec,
        mask: str,
    ) -> str:
        """Chosen tokens and FP8 caches."""
        return _only_dense(spec)


class SglangTritonMla(Backend[MlaBatch, torch.Tensor]):
    """SGLang's Triton kernels, one query token a request, over a bfloat16 cache.

    A plan's state is the library's call with page arrays and splits, but query, cache and output.
    """

    def prepare(self, batch: MlaBatch, held: Any) -> "partial[None]":
        """Page arrays, and the splits of each request, which a kernel of SGLang's chooses."""
        if batch.q_len > 1:
            raise ValueError(f"q_len must be 1 for {self.entry.name}, got {batch.q_len}")
        call = self._call(batch) if held is None else held
        arrays = call.keywords
        arrays["kv_indptr"].copy_(batch.paged.kv_indptr)
        pages = batch.paged.kv_indices
        arrays["kv_indices"][: len(pages)].copy_(pages)
        self._choose_splits(batch, arrays)
        return call

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        plan: Plan[MlaBatch],
    ) -> torch.Tensor:
        """The library's call: [bs, num_qo_heads, 512]."""
        require_pages(cache, plan.batch.highest_page)
        tokens = cache.view(-1, 1, MLA_HEAD_DIM)
        out = q.new_empty((*q.shape[:2], LATENT_DIM))
        plan.state(
            q=q,
            k_buffer=tokens,
            v_buffer=tokens[..., :LATENT_DIM],
            o=out,
        )
        return out

    def _call(self, batch: MlaBatch) -> "partial[None]":
        module = importlib.import_module("sglang.kernels.ops.attention.decode_attention")
        table = batch.paged.page_table
        splits = self._most_splits(table.shape[1])
        parts = (batch.batch_size, batch.spec.num_qo_heads, splits)
        floats = partial(
            torch.empty,
            dtype=torch.float32,
            device=self.device,
        )
        int32s = partial(
            torch.empty,
            dtype=torch.int32,
            device=self.device,
        )
        int64s = partial(
            torch.zeros,
            dtype=torch.int64,
            device=self.device,
        )
        return partial(
            module.decode_attention_fwd,
            kv_indptr=torch.zeros_like(batch.paged.kv_indptr),
            kv_indices=int64s(table.numel()),
            attn_logits=floats((*parts, LATENT_DIM)),
            attn_lse=floats(parts),
            num_kv_splits=int32s(batch.batch_size),
            max_kv_splits=splits,
            sm_scale=batch.spec.softmax_scale,
            k_scale=1.0,
            v_scale=1.0,
            has_mla=True,
            page_size=1,
        )

    def _most_splits(self, context: int) -> int:
        """As many as SMs or as blocks of the context, rounded up to a power of two."""
        by_sms = _power_of_two(sm_count(self.device))
        by_context = _power_of_two(-(-context // TRITON_BLOCK_KV))
        return max(TRITON_LEAST_SPLITS, min(by_sms, by_context))

    def _choose_splits(self, batch: MlaBatch, arrays: dict[str, Any]) -> None:
        metadata = importlib.import_module("sglang.kernels.ops.attention.metadata")
        compiled_for = max(SCHEDULED_REQUESTS, _power_of_two(batch.batch_size))
        metadata.get_num_kv_splits_triton[(1,)](
            arrays["num_kv_splits"],
            batch.paged.seq_lens,
            batch.batch_size,
            1,
            batch.spec.num_qo_heads,
            1,
            arrays["max_kv_splits"],
            sm_count(self.device),
            MAX_NUM_SEQ=compiled_for,
        )

    @classmethod
    def unsupported(
        cls,
        entry: Entry,
        spec: MlaSpec,
        mask: str,
    ) -> str:
        """Chosen tokens, FP8 caches, and pages of several tokens."""
        if spec.page_size != 1:
            return f"page_size must be 1, got {spec.page_size}"
        return _only_dense(spec)


def facts_of_layer(
    batch: DecodeBatch,
    *,
    max_seqlen_q: int,
    causal: bool = True,
) -> SchedulerFacts:
    """A call over `batch`'s page table with up to `max_seqlen_q` query tokens a request."""
    return layer_facts(
        batch.spec,
        columns=batch.page_table.shape[1],
        batch_size=batch.batch_size,
        max_seqlen_q=max_seqlen_q,
        num_sms=sm_count(batch.page_table.device),
        causal=causal,
        varlen_q=True,
        build=library.sglang_build(),
    )


def _only_dense(spec: MlaSpec) -> str:
    if spec.top_k:
        return f"the kernel attends to every token: top_k must be 0, got {spec.top_k}"
    if spec.kv_format != "bfloat16":
        return f"kv_format must be bfloat16, got {spec.kv_format}"
    return ""


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
