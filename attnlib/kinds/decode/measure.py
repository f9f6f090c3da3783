"""Decode attention, one query per request over a paged cache: tensors, oracle, measurement.

The oracle takes one request at a time, in float64. For request i with pages p_0..p_m and length n,
K and V are the first n tokens of the gathered pages; for query head h, with its KV head
h // group_size:

    out[i, h] = softmax(softmax_scale * q[i, h] K^T) V

No batching, no splitting, no online softmax: nothing in common with the kernels it judges.
"""

from __future__ import annotations

import torch

from ...core.batch import DecodeBatch, PagedKV
from ..call import CallSubject, Workload
from ..check import Judge, require_inputs
from ..cost import decode_cost
from ..lengths import normal_values, sample_page_table, sample_seq_lens
from .case import DecodeCase


def build_batch(case: DecodeCase, *, device: str) -> DecodeBatch:
    """Lengths and a page table [bs, max_pages] whose live pages are distinct and shuffled."""
    lens, table = sample_seq_lens(case), sample_page_table(case)
    return DecodeBatch.build(case.spec, torch.from_numpy(lens), torch.from_numpy(table).to(device))


def build_workload(case: DecodeCase, *, device: str) -> Workload[DecodeCase]:
    """Batch, query and cache on `device`; values are standard normal, so softmax has real spread.

    Zeros would hide unwritten outputs and run the tensor cores cooler than an engine does.
    """
    batch = build_batch(case, device=device)
    spec = case.spec
    generator = torch.Generator(device=device).manual_seed(case.seed)
    q = normal_values((case.batch_size, spec.num_qo_heads, spec.head_dim), spec.dtype, generator)
    shape = (batch.kv_indices.shape[0], spec.page_size, spec.num_kv_heads, spec.head_dim)
    kv = PagedKV(
        normal_values(shape, spec.kv_dtype, generator),
        normal_values(shape, spec.kv_dtype, generator),
    )
    require_inputs(q, kv, batch)
    return Workload(case, batch, q, kv)


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
    require_inputs(q, kv, batch)
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


class Oracle(Judge):
    """Reference output and budget of one call, computed once, for any number of outputs."""

    def __init__(self, q: torch.Tensor, kv: PagedKV, batch: DecodeBatch) -> None:
        low = attend(q, kv, batch, probs_dtype=q.dtype)
        super().__init__(attend(q, kv, batch), low.to(getattr(torch, batch.spec.out_dtype)))


class DecodeSubject(CallSubject[DecodeCase]):
    """Measures one attention call of a backend."""

    plans = "decode"
    build = staticmethod(build_workload)
    oracle = Oracle
    cost = staticmethod(decode_cost)
