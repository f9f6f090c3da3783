"""Decode attention: one query a request over a paged cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.batch import PagedKV
from ..call import CallSubject, paged_copies
from ..check import OracleCheck
from ..cost import DecodeCost, decode_cost
from .case import DecodeCase
from .oracle import Oracle
from .workload import DecodeWorkload, build_workload


class DecodeSubject(CallSubject[DecodeCase, DecodeWorkload]):
    """Measures one attention call of a backend."""

    plans = "decode"

    def build(
        self, case: DecodeCase
    ) -> tuple[DecodeWorkload, Callable[[torch.Tensor], OracleCheck]]:
        """Query, cache and batch, and attention in float64."""
        work = build_workload(case, device=self.bench.device)
        return work, Oracle(work.q, work.kv, work.batch).check

    def caches(self, work: DecodeWorkload, count: int) -> list[PagedKV]:
        """The paged cache and copies of it."""
        return paged_copies(work.kv, count)

    def cost(self, case: DecodeCase) -> DecodeCost:
        """Bytes and FLOPs of a call."""
        return decode_cost(case)
