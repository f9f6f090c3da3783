"""Multi-head latent attention: FlashInfer's wrapper, FlashMLA's Hopper kernels, FlashAttention-3.

FlashInfer and FlashAttention-3 have no sparse decode: the chosen tokens are pages of one token. The
keys of FlashAttention-3 are the rotary part, its values the latent one, which is scored by `qv`.
FlashMLA's Hopper kernels are those behind `use_legacy=True`. Its sparse kernel has 64 or 128 heads
and takes top-k in multiples of 64, so `plan` pads and `run` copies the query, as an engine must. It
checks no index; `plan` does (`slots`). Over bfloat16 it is FlashMLA's sparse prefill kernel. Shapes
are in `attnlib.core.mla`.
"""

import importlib
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name
from torch import Tensor

from ..mla import NO_TOKEN, MlaBatch, attended_pages, require_pages
from ..schedule import library
from ..spec import LATENT_DIM, MLA_HEAD_DIM, MLA_SCALE, ROPE_DIM, AttnSpec, MlaSpec
from .base import Backend, Plan, installed_version
from .flashinfer import reported_backend
from .limits import why_not
from .table import Entry

WORKSPACE_BYTES = 128 * 2**20
DENSE_PAGE_SIZE = 64
"""FlashMLA's dense kernel: "Currently page_block_size must be 64"."""
SPARSE_HEADS = (64, 128)
SPARSE_BLOCK = 64
"""TOPK_BLOCK_SIZE of FlashMLA's sm90 sparse kernel; top-k must be a multiple."""


class FlashInferMla(Backend[MlaBatch, Tensor]):
    """BatchMLAPagedAttentionWrapper: fa2 for any GPU from Ampere on, fa3 for Hopper.

    A plan's state is the wrapper, and whether `run` takes structures.
    """

    def prepare(self, batch: MlaBatch, held: Any) -> tuple[Any, bool]:
        """FlashInfer's own plan, after chosen tokens were checked. Synchronises."""
        sums, pages, lens, page_size = attended_pages(batch)
        if held is None:
            wrapper = self._wrapper(batch)
        else:
            wrapper = held[0]
        lengths = {
            "qo_indptr": batch.paged.qo_indptr * batch.q_len,
            "kv_indptr": sums,
            "kv_indices": pages,
            "kv_len_arr": lens,
        }
        # From 0.7.1 on both calls take structures; tensors one by one are deprecated.
        structure = getattr(importlib.import_module("flashinfer.mla"), "MLAPlanMetadata", None)
        if structure:
            lengths = {
                "metadata": structure.csr(**lengths),
                "query_layout": "split",
                "kv_cache_layout": "split",
            }
        wrapper.plan(
            **lengths,
            num_heads=batch.spec.num_qo_heads,
            head_dim_ckv=LATENT_DIM,
            head_dim_kpe=ROPE_DIM,
            page_size=page_size,
            causal=batch.q_len > 1,
            sm_scale=batch.spec.softmax_scale,
            q_data_type=torch.bfloat16,
            kv_data_type=getattr(torch, _dtype(batch.spec)),
        )
        return wrapper, bool(structure)

    def reported(self, state: Any) -> str:
        """The wrapper's own report."""
        return reported_backend(state[0])

    def attend(self, q: Tensor, cache: Tensor, plan: Plan[MlaBatch]) -> Tensor:
        """FlashInfer's own run over views of `q` and `cache`: [bs * q_len, num_qo_heads, 512]."""
        wrapper, structured = plan.state
        require_pages(cache, plan.batch.highest_page)
        query = _latent_and_rope(q)
        kv_cache = _latent_and_rope(_pages(cache, plan.batch.spec))
        scales = {}
        if plan.batch.spec.kv_format == "fp8-576":
            scales = {"ckv_scale": MLA_SCALE, "kpe_scale": MLA_SCALE}
        if structured:
            return wrapper.run(query=query, kv_cache=kv_cache, **scales)
        return wrapper.run(
            q_nope=query[0],
            q_pe=query[1],
            ckv_cache=kv_cache[0],
            kpe_cache=kv_cache[1],
            **scales,
        )

    def _wrapper(self, batch: MlaBatch) -> Any:
        cls = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        if not self.cuda_graph:
            return cls(workspace, backend=self.entry.asks)
        if batch.chosen is None:
            indices = batch.paged.page_table
        else:
            indices = batch.chosen
        return cls(
            workspace,
            use_cuda_graph=True,
            qo_indptr=torch.zeros_like(batch.paged.kv_indptr),
            kv_indptr=torch.zeros_like(batch.paged.kv_indptr),
            kv_indices=torch.zeros_like(indices).flatten(),
            kv_len_arr=torch.zeros_like(batch.paged.seq_lens),
            backend=self.entry.asks,
        )

    @classmethod
    def unsupported(cls, entry: Entry, spec: MlaSpec, mask: str) -> str:
        """Another cache format than the kernels read, and the limits of the kernels."""
        layer = AttnSpec(
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=1,
            head_dim=MLA_HEAD_DIM,
            page_size=spec.page_size,
            kv_dtype=_dtype(spec),
        )
        release = installed_version(entry.distribution)
        limit = why_not(
            kernel=entry.asks,
            spec=layer,
            mode="mla",
            release=release,
        )
        return _other_format(spec, "bfloat16", "fp8-576") or limit


class FlashMlaDense(Backend[MlaBatch, Tensor]):
    """All tokens of a bfloat16 cache. The first `run` of a plan makes its schedule, on the GPU.

    A plan's state is lengths, page table and FlashMLA's schedule.
    """

    source = library.FLASHMLA

    def prepare(self, batch: MlaBatch, held: Any) -> tuple[Tensor, Tensor, Any]:
        """Copy lengths and page table; of a held schedule, write the words anew."""
        paged = batch.paged
        flash_mla = library.import_library(library.FLASHMLA)
        if held is None:
            meta = flash_mla.get_mla_metadata()[0]
            return paged.seq_lens.clone(), paged.page_table.clone(), meta
        seq_lens, page_table, meta = held
        seq_lens.copy_(paged.seq_lens)
        page_table.copy_(paged.page_table)
        if meta.num_splits is not None:
            heads = batch.spec.num_qo_heads
            tiles, splits = flash_mla.get_mla_decoding_metadata(
                seqlens_k=seq_lens,
                num_q_tokens_per_head_k=heads * batch.q_len,
                h_k=1,
                h_q=heads,
                use_legacy=True,  # as the call
            )
            meta.tile_scheduler_metadata.copy_(tiles)
            meta.num_splits.copy_(splits)
        return seq_lens, page_table, meta

    def attend(self, q: Tensor, cache: Tensor, plan: Plan[MlaBatch]) -> Tensor:
        """One dense call: [bs * q_len, num_qo_heads, 512]."""
        seq_lens, page_table, meta = plan.state
        require_pages(cache, plan.batch.highest_page)
        q_len = plan.batch.q_len
        out, _ = library.import_library(library.FLASHMLA).flash_mla_with_kvcache(
            q=q.unflatten(0, (-1, q_len)),
            k_cache=cache[:, :, None],
            block_table=page_table,
            cache_seqlens=seq_lens,
            head_dim_v=LATENT_DIM,
            tile_scheduler_metadata=meta,  # filled by the first call
            softmax_scale=plan.batch.spec.softmax_scale,
            causal=q_len > 1,
            is_fp8_kvcache=False,
            use_legacy=True,  # the kernels for Hopper
        )
        return out.flatten(0, 1)

    @classmethod
    def unsupported(cls, entry: Entry, spec: MlaSpec, mask: str) -> str:
        """Chosen tokens, FP8 caches, and other page sizes than 64."""
        if spec.top_k:
            return f"the dense kernel attends to every token: top_k must be 0, got {spec.top_k}"
        if spec.page_size != DENSE_PAGE_SIZE:
            return f"page_size must be {DENSE_PAGE_SIZE}, got {spec.page_size}"
        return _other_format(spec, "bfloat16")


class FlashMlaSparse(Backend[MlaBatch, Tensor]):
    """Chosen tokens of a cache of 656-byte tokens.

    A plan's state is slots [bs, 1, padded top_k] int32, a query [bs, 1, padded heads, 576] or None
    where no head is padded, and FlashMLA's schedule, which depends on shapes only.
    """

    source = library.FLASHMLA
    kv_format = "fp8-656"
    block = SPARSE_BLOCK

    def prepare(self, batch: MlaBatch, held: Any) -> tuple[Any, ...]:
        """Check the chosen tokens and turn them into slots. Synchronises."""
        padding = (0, -batch.spec.top_k % self.block)
        indices = F.pad(batch.slots(), padding, value=NO_TOKEN)[:, None]
        if held is not None:
            held[0].copy_(indices)
            return held
        heads = next(count for count in SPARSE_HEADS if batch.spec.num_qo_heads <= count)
        q = None
        if heads > batch.spec.num_qo_heads:
            shape = (batch.batch_size, 1, heads, MLA_HEAD_DIM)
            q = torch.zeros(shape, dtype=torch.bfloat16, device=indices.device)
        return indices, q, library.import_library(library.FLASHMLA).get_mla_metadata()[0]

    def attend(self, q: Tensor, cache: Tensor, plan: Plan[MlaBatch]) -> Tensor:
        """Copy the query where heads are padded, then one sparse call: [bs, num_qo_heads, 512]."""
        _, padded, _ = plan.state
        heads = plan.batch.spec.num_qo_heads
        require_pages(cache, plan.batch.highest_page)
        if padded is not None:
            padded[:, 0, :heads].copy_(q)
            q = padded[:, 0]
        return self._attend(q, cache, plan)[:, :heads]

    def _attend(self, q: Tensor, cache: Tensor, plan: Plan[MlaBatch]) -> Tensor:
        indices, _, meta = plan.state
        out, _ = library.import_library(library.FLASHMLA).flash_mla_with_kvcache(
            q=q[:, None],
            k_cache=cache.view(torch.float8_e4m3fn)[:, :, None],
            block_table=None,
            cache_seqlens=None,
            head_dim_v=LATENT_DIM,
            tile_scheduler_metadata=meta,
            softmax_scale=plan.batch.spec.softmax_scale,
            is_fp8_kvcache=True,
            indices=indices,  # in place of pages and lengths
            use_legacy=True,
        )
        return out[:, 0]

    @classmethod
    def unsupported(cls, entry: Entry, spec: MlaSpec, mask: str) -> str:
        """Dense attention, other caches, and more than 128 heads."""
        if not spec.top_k:
            return "the sparse kernel attends to chosen tokens: top_k must be at least 1, got 0"
        if spec.num_qo_heads > SPARSE_HEADS[-1]:
            return f"num_qo_heads must be at most {SPARSE_HEADS[-1]}, got {spec.num_qo_heads}"
        return _other_format(spec, cls.kv_format)


class FlashMlaSparseBf16(FlashMlaSparse):
    """Chosen tokens of a bfloat16 cache: each request is a query of the sparse prefill kernel."""

    kv_format = "bfloat16"
    block = 2 * SPARSE_BLOCK

    def _attend(self, q: Tensor, cache: Tensor, plan: Plan[MlaBatch]) -> Tensor:
        indices, *_ = plan.state
        out, *_ = library.import_library(library.FLASHMLA).flash_mla_sparse_fwd(
            q=q,
            kv=cache.view(-1, 1, MLA_HEAD_DIM),
            indices=indices,
            sm_scale=plan.batch.spec.softmax_scale,
            use_legacy=True,
        )
        return out


class FlashAttn3Mla(Backend[MlaBatch, Tensor]):
    """FlashAttention-3 over a bfloat16 cache. `plan` makes its schedule once.

    A plan's state is lengths, page table and the schedule's words.
    """

    source = library.FLASH_ATTN_3

    def prepare(self, batch: MlaBatch, held: Any) -> tuple[Tensor, ...]:
        """Copy lengths and pages, chosen tokens as pages of one."""
        lens = batch.paged.seq_lens
        table = batch.paged.page_table
        page_size = batch.spec.page_size
        if batch.chosen is not None:
            slots = batch.slots()
            page_size = 1
            is_none = slots == NO_TOKEN
            order = is_none.int().argsort(stable=True)  # chosen tokens first
            table = slots.gather(1, order).clamp(min=0)
            lens = (~is_none).sum(1).int()
        words = library.import_library().get_scheduler_metadata(
            # Builds agree in the order of these, not in their names.
            batch.batch_size,
            batch.q_len,
            table.shape[1] * page_size,  # max_seqlen_k
            batch.spec.num_qo_heads,
            1,  # KV heads
            ROPE_DIM,
            cache_seqlens=lens,
            headdim_v=LATENT_DIM,
            page_size=page_size,
            causal=True,
        )
        if held is None:
            return lens.clone(), table.clone(), words
        for tensor, new in zip(held, (lens, table, words), strict=True):
            tensor.copy_(new)
        return held

    def attend(self, q: Tensor, cache: Tensor, plan: Plan[MlaBatch]) -> Tensor:
        """One call: [bs * q_len, num_qo_heads, 512]."""
        lens, table, words = plan.state
        require_pages(cache, plan.batch.highest_page)
        pages = _pages(cache, plan.batch.spec)
        latent, rope = _latent_and_rope(pages[:, :, None])
        latent_q, rope_q = _latent_and_rope(q.unflatten(0, (-1, plan.batch.q_len)))
        out = library.import_library().flash_attn_with_kvcache(
            q=rope_q,
            k_cache=rope,
            v_cache=latent,
            qv=latent_q,  # scores the values
            cache_seqlens=lens,
            page_table=table,
            softmax_scale=plan.batch.spec.softmax_scale,
            causal=True,
            scheduler_metadata=words,
        )
        return out.flatten(0, 1)

    @classmethod
    def unsupported(cls, entry: Entry, spec: MlaSpec, mask: str) -> str:
        """FP8 caches, and a build whose flags exclude the kernel. A build that lacks it without a
        flag gives wrong output, which the oracle shows."""
        if not library.has_latent():
            build = library.supplier()
            return (
                f"the FlashAttention-3 of {build} was built without keys of 64 and values of 512 "
                f"dims: pip uninstall {build}, then pip install sglang-kernel"
            )
        return _other_format(spec, "bfloat16")


def _pages(cache: Tensor, spec: MlaSpec) -> Tensor:
    """The cache as a call reads it: chosen tokens are pages of one token."""
    if spec.top_k:
        return cache.view(-1, 1, MLA_HEAD_DIM)
    return cache


def _latent_and_rope(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[..., :LATENT_DIM], tokens[..., LATENT_DIM:]


def _dtype(spec: MlaSpec) -> str:
    return "float8_e4m3fn" if spec.kv_format == "fp8-576" else "bfloat16"


def _other_format(spec: MlaSpec, *formats: str) -> str:
    """Why a cache of another format than `formats` cannot be read, or the empty string."""
    if spec.kv_format in formats:
        return ""
    return f"kv_format must be {' or '.join(formats)}, got {spec.kv_format}"
