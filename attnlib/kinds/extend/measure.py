"""Calls with several queries a request. `plan_us` holds the packing of a custom mask into bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.batch import PagedKV
from ..call import CallSubject, paged_copies
from ..check import OracleCheck
from ..cost import DecodeCost, extend_cost
from .case import ExtendCase
from .reference import ExtendOracle
from .workload import ExtendWorkload, build_extend_workload


class ExtendSubject(CallSubject[ExtendCase, ExtendWorkload]):
    """Measures one call of a backend."""

    memory_share = 0.6
    plans = "extend"

    def mask(self, case: ExtendCase) -> str:
        """The mask that the mode has, or that the case asks for."""
        return case.mask

    def build(
        self, case: ExtendCase
    ) -> tuple[ExtendWorkload, Callable[[torch.Tensor], OracleCheck]]:
        """Queries, keys, values and batch, and attention in float64."""
        work = build_extend_workload(case, device=self.bench.device)
        return work, ExtendOracle(work.q, work.kv, work.batch).check

    def caches(self, work: ExtendWorkload, count: int) -> list[PagedKV]:
        """K and V and copies of them."""
        return paged_copies(work.kv, count)

    def cost(self, case: ExtendCase) -> DecodeCost:
        """Bytes and FLOPs of a call."""
        return extend_cost(case)
