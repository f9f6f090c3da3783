"""Is an output right? An error budget computed from the data, not a fixed tolerance.

The error of an output row (one request, one query head) against the float64 oracle is

    || out - ref ||_2 / || ref ||_2          and the error of a call is its worst row's.

Its budget is `BUDGET_FACTOR` times the same error of a low-precision reference: the oracle with
its probabilities rounded to the query's dtype and its output to the output's, which every kernel
that uses tensor cores must do; at least half a unit in the last place of the output. NaN and inf
never pass. One dropped token of n moves a row by about 1 / sqrt(e n), which the bf16 budget of
about 0.009 sees up to n = 4,500; a wrong head, page or scale moves it by order 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...core.spec import FP8_OUT_DTYPE

BUDGET_FACTOR = 3.0
"""Kernels also round partial sums of splits and use fast exponentials; on record: 0.6 to 1.5."""


@dataclass(frozen=True)
class OracleCheck:
    """The verdict of the oracle: what `counts` names, its budget, rows compared."""

    error: float
    budget: float
    rows: int
    counts: str = "row error"

    @property
    def passed(self) -> bool:
        """True only for a finite error within the budget."""
        return math.isfinite(self.error) and self.error <= self.budget


class Judge:
    """The `reference` [rows, heads, dim] float64 of one call, computed once, and its `budget`.

    `attend` is the oracle of the call's kind; with `probs_dtype` it rounds as a kernel must.
    """

    def __init__(
        self,
        attend: Callable[..., torch.Tensor],
        q: torch.Tensor,
        kv: Any,
        batch: Any,
    ) -> None:
        self.reference = attend(q, kv, batch)
        low = attend(q, kv, batch, probs_dtype=q.dtype)
        is_fp8 = q.dtype.itemsize == 1
        out_dtype = getattr(torch, FP8_OUT_DTYPE) if is_fp8 else q.dtype
        low_error = worst_row_error(low.to(out_dtype), self.reference)
        least = torch.finfo(out_dtype).eps / 2
        self.budget = max(least, BUDGET_FACTOR * low_error)

    def check(self, out: torch.Tensor) -> OracleCheck:
        """Judge `out` [bs, num_qo_heads, head_dim]; a wrong shape is an error, not a verdict."""
        rows = self.reference.shape[:-1].numel()
        return OracleCheck(
            error=worst_row_error(out, self.reference),
            budget=self.budget,
            rows=rows,
        )


def worst_row_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest relative L2 error over rows; inf where an output is not finite."""
    if out.shape != reference.shape:
        raise ValueError(f"out must be {list(reference.shape)}, got {list(out.shape)}")
    wide = out.double()
    if not bool(torch.isfinite(wide).all()):
        return float("inf")
    distances = (wide - reference).norm(dim=-1)
    errors = distances / reference.norm(dim=-1)
    return float(errors.max())


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    *,
    probs_dtype: torch.dtype | None,
    sees: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output [rows, heads, dim of v] float64 of rows of queries over K and V of one request.

    `sees` [rows, tokens] bool says which tokens a row attends to, all of them if it is None.
    """
    rows, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    grouped = q.double().unflatten(1, (kv_heads, group))
    scores = torch.einsum("rhgd,nhd->hgrn", grouped, k)
    scores.mul_(softmax_scale)
    if sees is not None:
        scores.masked_fill_(~sees, float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    probs = scores.sub_(highest).exp_()
    weights = probs
    if probs_dtype is not None:
        # FP8 kernels scale probabilities to the format's range first, or most would underflow.
        scale = 1.0
        if probs_dtype.itemsize == 1:
            scale = torch.finfo(probs_dtype).max
        weights = (probs * scale).to(probs_dtype).double() / scale
    out = torch.einsum("hgrn,nhd->hgrd", weights, v)
    out /= probs.sum(-1, keepdim=True)
    return out.permute(2, 0, 1, 3).reshape(rows, heads, -1)
