"""Calls with several queries a request. `plan_us` holds the packing of a custom mask into bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core import backends
from ...core.backends.base import Backend
from ...core.batch import PagedKV
from ..call import CallSubject, paged_copies
from ..check import OracleCheck
from ..cost import DecodeCost, extend_cost
from ..item import Item
from .case import ExtendCase
from .reference import ExtendOracle
from .workload import ExtendWorkload, build_extend_workload


class ExtendSubject(CallSubject[ExtendCase, ExtendWorkload]):
    """Measures one call of a backend (`backends.EXTEND_BACKENDS`)."""

    memory_share = 0.6

    def backend_class(self, name: str) -> type[Backend]:
        """Of `backends.EXTEND_BACKENDS`."""
        return backends.extend_class(name)

    def refusal(self, cls: type[Backend], case: ExtendCase) -> str:
        """By the whole case: a mode or a mask may be what a backend lacks."""
        return cls.unsupported(case)

    def create(self, item: Item, *, cuda_graph: bool) -> Backend:
        """The item's backend, ready to plan."""
        return backends.create_extend(
            item.backend, item.case, device=self.bench.device, cuda_graph=cuda_graph
        )

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
