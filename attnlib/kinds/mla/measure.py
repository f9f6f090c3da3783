"""MLA decode. `plan_us` holds the check of chosen tokens and their slots.

What FlashMLA computes of a schedule is made once, by the checked call before any timing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..call import CallSubject
from ..check import OracleCheck
from ..cost import DecodeCost, mla_cache_bytes, mla_cost
from .case import MlaCase
from .reference import MlaOracle
from .workload import MlaWorkload, build_mla_workload


class MlaSubject(CallSubject[MlaCase, MlaWorkload]):
    """Measures one MLA call of a backend."""

    plans = "mla"

    def build(self, case: MlaCase) -> tuple[MlaWorkload, Callable[[torch.Tensor], OracleCheck]]:
        """Query, latent cache and batch, and attention in float64 over the dequantised cache."""
        work = build_mla_workload(case, device=self.bench.device)
        return work, MlaOracle(work.q, work.cache, work.batch).check

    def caches(self, work: MlaWorkload, count: int) -> list[torch.Tensor]:
        """The latent cache and copies of it."""
        return [work.cache, *(work.cache.clone() for _ in range(count - 1))]

    def cost(self, case: MlaCase) -> DecodeCost:
        """Bytes and FLOPs of a call."""
        return mla_cost(case)

    def cache_bytes(self, case: MlaCase) -> int:
        """Bytes of the whole cache: a sparse call reads but a part of it."""
        return mla_cache_bytes(case)
