"""The oracle of MLA: attention over the attended tokens of the dequantised cache, in float64.

For request i, its tokens K [n, 576] (all of them, or the chosen ones in their order) and head h:

    out[i, h] = softmax(softmax_scale * q[i, h] K^T) K[:, :512]

One request at a time, from page table and places, not from the slots that the kernels are given.
The budget is that of `check`: probabilities rounded to bfloat16, and the output too.
"""

from __future__ import annotations

import torch

from ...core.mla import NO_TOKEN, MlaBatch
from ...core.mla_format import dequantize
from ...core.spec import LATENT_DIM
from ..check import Judge


class MlaOracle(Judge):
    """Reference output and budget of one MLA call, computed once, for any number of outputs."""

    def __init__(self, q: torch.Tensor, cache: torch.Tensor, batch: MlaBatch) -> None:
        low = attend_mla(q, cache, batch, probs_dtype=torch.bfloat16)
        super().__init__(attend_mla(q, cache, batch), low.bfloat16())


def attend_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: MlaBatch,
    *,
    probs_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Output [bs, num_qo_heads, 512] float64 of `q` over `cache`, both as in `mla`.

    With `probs_dtype` the unnormalised probabilities are rounded to it, as in `reference.attend`.
    """
    batch.check_inputs(q, cache)
    rows = []
    for i in range(batch.batch_size):
        tokens = gather_latent(cache, batch, i)
        scores = batch.spec.softmax_scale * (q[i].double() @ tokens.T)
        probs = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights = probs if probs_dtype is None else probs.to(probs_dtype).double()
        rows.append(weights @ tokens[:, :LATENT_DIM] / probs.sum(-1, keepdim=True))
    return torch.stack(rows)


def gather_latent(cache: torch.Tensor, batch: MlaBatch, index: int) -> torch.Tensor:
    """Attended tokens [n, 576] float64 of one request, dequantised."""
    page_size, length = batch.spec.page_size, int(batch.paged.seq_lens_cpu[index])
    places = torch.arange(length, device=cache.device)
    if batch.chosen is not None:
        row = batch.chosen[index]
        places = row[row != NO_TOKEN].long()
    pages = batch.paged.page_table[index].long()[places // page_size]
    tokens = cache[pages, places % page_size]
    return (dequantize(tokens) if tokens.dtype == torch.uint8 else tokens).double()
