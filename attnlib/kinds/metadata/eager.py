"""Metadata op by op, as engines had it before they fused it: the baselines, one launch an op.

None waits for the GPU, so all can be captured. SGLang's `normal_decode_set_metadata` up to 0.5.9 is
the first: lengths, prefix sum, gather of token slots, division by the page size, and for a sliding
window a translation before the division.
"""

from __future__ import annotations

import torch

from ...core.metadata.draft_arguments import require_draft, require_verify
from ...core.metadata.require import require_decode_once, require_kv_indices


def build_decode_metadata(
    *,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
    swa_slot_map: torch.Tensor | None = None,
    swa_page_table: torch.Tensor | None = None,
) -> None:
    """As `attnlib.core.metadata.decode.build_decode_metadata`, and fills all `max_pages` columns.

    Columns past a row's live pages get whatever `req_to_token` holds there. Slot -1 indexes
    `swa_slot_map` from its end, as in the engines, which keep -1 in the map's last entry.
    """
    require_decode_once(
        seq_lens=seq_lens,
        req_pool_indices=req_pool_indices,
        req_to_token=req_to_token,
        cache_seqlens=cache_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        page_table=page_table,
        page_size=page_size,
        max_pages=max_pages,
        seq_len_delta=seq_len_delta,
        swa_slot_map=swa_slot_map,
        swa_page_table=swa_page_table,
    )
    cache_seqlens.copy_(seq_lens + seq_len_delta)
    cu_seqlens_k[:1].zero_()
    cu_seqlens_k[1:].copy_(torch.cumsum(cache_seqlens, dim=0, dtype=torch.int32))
    first_tokens = _first_tokens(seq_lens.device, max_pages, page_size)
    slots = req_to_token[req_pool_indices[:, None], first_tokens[None, :]]
    page_table[:, :max_pages].copy_(slots // page_size)
    if swa_slot_map is not None:
        swa_page_table[:, :max_pages].copy_(swa_slot_map[slots.long()] // page_size)


_FIRST_TOKENS: dict[tuple[torch.device, int, int], torch.Tensor] = {}


def _first_tokens(device: torch.device, max_pages: int, page_size: int) -> torch.Tensor:
    """Token offsets of the pages, made once and kept, as engines do when they start."""
    key = (device, max_pages, page_size)
    if key not in _FIRST_TOKENS:
        offsets = torch.arange(0, max_pages * page_size, page_size, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # It would be the graph's memory, and empty until the graph is replayed.
            return offsets
        _FIRST_TOKENS[key] = offsets
    return _FIRST_TOKENS[key]


def build_kv_indices(
    *,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
) -> None:
    """As `attnlib.core.metadata.kv_indices.build_kv_indices`, word for word.

    The shortest form, a page table indexed by the mask of its live columns (vLLM's builders before
    `_copy_page_indices_kernel`), makes the host wait for the size of the result. This one looks up
    each word's request in `kv_indptr` instead, for the first bs * max_pages words. A pool row out
    of range is an error of the indexing.
    """
    require_kv_indices(
        seq_lens=seq_lens,
        req_pool_indices=req_pool_indices,
        req_to_token=req_to_token,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=kv_last_page_len,
        page_size=page_size,
        max_pages=max_pages,
        seq_len_delta=seq_len_delta,
    )
    tokens = (seq_lens + seq_len_delta).clamp_(0, max_pages * page_size)
    pages = (tokens + page_size - 1) // page_size
    kv_last_page_len.copy_(tokens - (pages - 1).clamp_(min=0) * page_size)
    kv_indptr[:1].zero_()
    torch.cumsum(pages, dim=0, dtype=torch.int32, out=kv_indptr[1:])
    reach = min(len(seq_lens) * max_pages, len(kv_indices))
    if reach == 0:
        return
    words = torch.arange(reach, device=seq_lens.device, dtype=torch.int32)
    rows = torch.searchsorted(kv_indptr[1:-1], words, right=True)
    cols = (words - kv_indptr[rows]).clamp_(max=max_pages - 1)
    found = req_to_token[req_pool_indices[rows], cols * page_size] // page_size
    kv_indices[:reach].copy_(torch.where(words < kv_indptr[-1], found, kv_indices[:reach]))


def build_draft_metadata(
    *,
    cache_loc: torch.Tensor,
    last_page_lens: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    decode_length: int,
    topk: int,
    page_size: int,
) -> None:
    """As `attnlib.core.metadata.draft.build_draft_metadata`, word for word.

    SGLang's `draft_decode_set_expand_metadata` without its `torch.compile`.
    """
    require_draft(
        cache_loc=cache_loc,
        last_page_lens=last_page_lens,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        decode_length=decode_length,
        topk=topk,
        page_size=page_size,
    )
    cache_seqlens.copy_(decode_length + last_page_lens.repeat_interleave(topk))
    pages = (cache_loc[:, :decode_length] // page_size).to(torch.int32)
    is_new = torch.ones_like(pages, dtype=torch.bool)
    is_new[:, 1:] = pages[:, 1:] != pages[:, :-1]
    page_table.scatter_(1, is_new.cumsum(dim=1) - 1, pages)


def build_verify_metadata(
    *,
    seq_lens: torch.Tensor,
    num_draft_tokens: int,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> None:
    """As `attnlib.core.metadata.draft.build_verify_metadata`, word for word."""
    require_verify(
        seq_lens=seq_lens,
        num_draft_tokens=num_draft_tokens,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    cache_seqlens.copy_(seq_lens + num_draft_tokens)
    last = len(seq_lens) * num_draft_tokens
    torch.arange(0, last + 1, num_draft_tokens, out=cu_seqlens_q)
    cu_seqlens_k[:1].zero_()
    cu_seqlens_k[1:].copy_(torch.cumsum(cache_seqlens, dim=0, dtype=torch.int32))
