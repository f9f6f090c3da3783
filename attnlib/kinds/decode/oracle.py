"""The oracle of a decode call: attention in float64, and the error budget of the query's dtype."""

from __future__ import annotations

import torch

from ...core.batch import DecodeBatch, PagedKV
from ..check import Judge
from .reference import attend


class Oracle(Judge):
    """Reference output and budget of one call, computed once, for any number of outputs."""

    def __init__(self, q: torch.Tensor, kv: PagedKV, batch: DecodeBatch) -> None:
        low = attend(q, kv, batch, probs_dtype=q.dtype)
        super().__init__(attend(q, kv, batch), low.to(getattr(torch, batch.spec.out_dtype)))
