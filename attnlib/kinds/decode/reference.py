"""The oracle: decode attention over pages, one request at a time, in float64.

For request i with pages p_0..p_m and length n, K and V are the first n tokens of the gathered
pages; for query head h, with its KV head h // group_size:

    out[i, h] = softmax(softmax_scale * q[i, h] K^T) V

No batching, no splitting, no online softmax: nothing in common with the kernels it judges.
"""

from __future__ import annotations

import torch

from ...core.batch import DecodeBatch, PagedKV


def attend(
    q: torch.Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    *,
    probs_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention output [bs, num_qo_heads, head_dim] float64 of `q` over `batch`'s pages.

    With `probs_dtype` the unnormalised probabilities are rounded to it, as kernels do before
    their second matrix product; the result then shows what that rounding alone costs.
    """
    batch.check_inputs(q, kv)
    rows = [
        _attend_one(q[i], *gather_tokens(kv, batch, i), batch.spec.softmax_scale, probs_dtype)
        for i in range(batch.batch_size)
    ]
    return torch.stack(rows)


def gather_tokens(kv: PagedKV, batch: DecodeBatch, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [seq_len, num_kv_heads, head_dim] float64 of one request, in token order."""
    length = int(batch.seq_lens_cpu[index])
    num_pages = -(-length // batch.spec.page_size)
    pages = batch.page_table[index, :num_pages].long()
    k, v = (cache[pages].flatten(0, 1)[:length].double() for cache in (kv.k_cache, kv.v_cache))
    return k, v


def _attend_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    probs_dtype: torch.dtype | None,
) -> torch.Tensor:
    num_kv_heads = k.shape[1]
    grouped = q.double().view(num_kv_heads, -1, q.shape[-1])
    scores = softmax_scale * torch.einsum("hgd,nhd->hgn", grouped, k)
    probs = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = probs if probs_dtype is None else round_probs(probs, probs_dtype)
    out = torch.einsum("hgn,nhd->hgd", weights, v) / probs.sum(-1, keepdim=True)
    return out.reshape(q.shape)


def round_probs(probs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unnormalised probabilities (0..1) rounded to `dtype`, as float64."""
    # FP8 kernels scale probabilities to the format's range first, or most would underflow.
    scale = torch.finfo(dtype).max if dtype.itemsize == 1 else 1.0
    return (probs * scale).to(dtype).double() / scale
