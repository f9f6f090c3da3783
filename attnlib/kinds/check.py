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

from ..core.batch import DecodeBatch, PagedKV, require_tensor
from ..core.spec import FP8_OUT_DTYPE

BUDGET_FACTOR = 3.0
"""Kernels also round partial sums of splits and use fast exponentials; on record: 0.6 to 1.5."""


@dataclass(frozen=True)
class OracleCheck:
    """The verdict of the oracle: worst row error, its budget, rows compared."""

    error: float
    budget: float
    rows: int

    @property
    def passed(self) -> bool:
        """True only for a finite error within the budget."""
        return math.isfinite(self.error) and self.error <= self.budget


class Judge:
    """The `reference` [rows, heads, dim] float64 of one call, computed once, and its `budget`.

    `attend` is the oracle of the call's kind; with `probs_dtype` it rounds as a kernel must.
    """

    def __init__(
        self, attend: Callable[..., torch.Tensor], q: torch.Tensor, kv: Any, batch: Any
    ) -> None:
        low = attend(q, kv, batch, probs_dtype=q.dtype)
        self.reference = attend(q, kv, batch)
        low = low.to(getattr(torch, FP8_OUT_DTYPE) if q.dtype.itemsize == 1 else q.dtype)
        least = torch.finfo(low.dtype).eps / 2
        self.budget = max(least, BUDGET_FACTOR * worst_row_error(low, self.reference))

    def check(self, out: torch.Tensor) -> OracleCheck:
        """Judge `out` [bs, num_qo_heads, head_dim]; a wrong shape is an error, not a verdict."""
        error = worst_row_error(out, self.reference)
        return OracleCheck(error, self.budget, self.reference.shape[:-1].numel())


def worst_row_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest relative L2 error over rows; inf where an output is not finite."""
    if out.shape != reference.shape:
        raise ValueError(f"out must be {list(reference.shape)}, got {list(out.shape)}")
    wide = out.double()
    if not bool(torch.isfinite(wide).all()):
        return float("inf")
    errors = (wide - reference).norm(dim=-1) / reference.norm(dim=-1)
    return float(errors.max())


def require_inputs(
    q: torch.Tensor, kv: PagedKV, batch: DecodeBatch, *, rows: int | None = None
) -> None:
    """ValueError unless `q` [rows, num_qo_heads, head_dim] and `kv` fit the batch, on its device.

    There are as many rows as requests where `rows` is None.
    """
    s = batch.spec
    shape = (kv.num_pages, s.page_size, s.num_kv_heads, s.head_dim)
    q_shape = (batch.batch_size if rows is None else rows, s.num_qo_heads, s.head_dim)
    require_tensor("q", q, q_shape, s.dtype)
    require_tensor("k_cache", kv.k_cache, shape, s.kv_dtype)
    require_tensor("v_cache", kv.v_cache, shape, s.kv_dtype)
    devices = [t.device for t in (q, kv.k_cache, kv.v_cache, batch.page_table)]
    if len(set(devices)) > 1:
        got = ", ".join(map(str, devices))
        raise ValueError(f"q, k_cache, v_cache and page_table must be on one device, got {got}")
