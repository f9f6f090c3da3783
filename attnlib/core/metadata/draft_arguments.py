"""What the builders of drafts and of their verification accept; errors as in `arguments`."""

from __future__ import annotations

import torch

from .require import (
    INT32,
    INTEGERS,
    MAX_INT32,
    require_apart,
    require_int,
    require_one_device,
    require_page_size,
    require_tensor,
)


def require_draft(
    *,
    cache_loc: torch.Tensor,
    last_page_lens: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    decode_length: int,
    topk: int,
    page_size: int,
) -> int:
    """Raise ValueError or TypeError unless these are arguments of `build_draft_metadata`.

    Returns the largest `decode_length` that these tensors have room for.
    """
    require_tensor("last_page_lens", last_page_lens, (None,), INTEGERS)
    require_int("topk", topk, 1)
    rows = last_page_lens.shape[0] * topk
    require_tensor("cache_loc", cache_loc, (rows, None), INTEGERS)
    require_tensor("cache_seqlens", cache_seqlens, (rows,), INT32)
    require_tensor("page_table", page_table, (rows, None), INT32)
    require_page_size(page_size)
    require_int("decode_length", decode_length, 0)
    slots, columns = cache_loc.shape[1], page_table.shape[1]
    reachable = min(slots, columns)
    if decode_length > reachable:
        raise ValueError(
            f"decode_length must be <= {reachable} (cache_loc has {slots} columns, page_table "
            f"{columns}, and each token may start a page), got {decode_length}"
        )
    require_one_device(
        {
            "cache_loc": cache_loc,
            "last_page_lens": last_page_lens,
            "cache_seqlens": cache_seqlens,
            "page_table": page_table,
        }
    )
    require_apart("cache_loc", cache_loc, "page_table", page_table)
    require_apart("last_page_lens", last_page_lens, "cache_seqlens", cache_seqlens)
    return reachable


def require_verify(
    *,
    seq_lens: torch.Tensor,
    num_draft_tokens: int,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> int:
    """Raise ValueError or TypeError unless these are arguments of `build_verify_metadata`.

    Returns the largest `num_draft_tokens` whose sum over the batch is an int32.
    """
    require_tensor("seq_lens", seq_lens, (None,), INTEGERS)
    batch = seq_lens.shape[0]
    require_tensor("cache_seqlens", cache_seqlens, (batch,), INT32)
    require_tensor("cu_seqlens_q", cu_seqlens_q, (batch + 1,), INT32)
    require_tensor("cu_seqlens_k", cu_seqlens_k, (batch + 1,), INT32)
    countable = MAX_INT32 // max(1, batch)
    require_int("num_draft_tokens", num_draft_tokens, 1, countable)
    require_one_device(
        {
            "seq_lens": seq_lens,
            "cache_seqlens": cache_seqlens,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
        }
    )
    require_apart("seq_lens", seq_lens, "cache_seqlens", cache_seqlens)
    return countable
