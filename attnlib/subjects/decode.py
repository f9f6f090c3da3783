"""Decode attention: one backend, one case; checked by the oracle, traced, timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import backends
from ..backends.base import Backend, Plan
from ..batch import DecodeCase, PagedKV
from ..check import Oracle
from ..cost import decode_cost
from ..measure.timer import ROTATING, cold_copies, run_timer, time_host
from ..measure.trace import kernel_family, trace_kernels
from ..record import Item
from ..workload import DecodeWorkload, build_workload
from .base import Bench, oracle_fields, timed_fields

MEMORY_SHARE = 0.75
"""Of the GPU's memory a case may fill with KV; the oracle and workspaces need the rest."""


class DecodeSubject:
    """Measures one attention call of a backend (`backends.BACKENDS`)."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._case: DecodeCase | None = None
        self._work: DecodeWorkload | None = None
        self._oracle: Oracle | None = None

    def measure(self, item: Item) -> dict[str, Any]:
        """Check one attention call by the oracle, then trace and time it, and time its plan."""
        cls, spec = backends.backend_class(item.backend), item.case.spec
        self.bench.require_release(cls.distribution, item.release)
        reason = cls.unavailable() or cls.unsupported(spec) or self._too_large(item.case)
        if reason:
            return {"status": "refused", "reason": reason}
        timer = run_timer(item.timer)
        work, oracle = self._workload(item.case)
        backend = backends.create(
            item.backend, spec, device=self.bench.device, cuda_graph=item.timer.startswith("graph")
        )
        plan = backend.plan(work.batch)
        verdict = oracle.check(backend.run(work.q, work.kv, plan))
        seen = {"reported_backend": plan.reported_backend, **oracle_fields(verdict)}
        if not verdict.passed:
            reason = f"row error {verdict.error:.3g} over budget {verdict.budget:.3g}"
            return {"status": "incorrect", "reason": reason, **seen}

        def run() -> torch.Tensor:
            return backend.run(work.q, work.kv, plan)

        kernels = trace_kernels(run) if self.bench.device == "cuda" else ()
        family = kernel_family(kernel.name for kernel in kernels)
        if cls.pinned_family not in ("", family):
            raise RuntimeError(f"asked for {cls.pinned_family}, but {family or 'none'} ran")
        planning = time_host(lambda: backend.plan(work.batch, out=plan))
        cost = decode_cost(item.case)
        timed = run
        if item.timer in ROTATING:
            timed = self._rotation(backend, plan, work, cost.kv_bytes)
        return timed_fields(timer(timed), kernels=kernels, work_per_call=float(cost.io_bytes)) | {
            "kernel_family": family,
            "plan_us": planning.samples_us,
            **seen,
        }

    def _rotation(
        self, backend: Backend, plan: Plan, work: DecodeWorkload, kv_bytes: int
    ) -> list[Callable[[], torch.Tensor]]:
        """Calls over as many copies of the cache as a cold L2 takes; refuses if they do not fit."""
        copies = cold_copies(kv_bytes, int(self.bench.machine["l2_mib"] * 2**20))
        needed, limit = copies * kv_bytes / 2**30, self.bench.machine["memory_gib"] * MEMORY_SHARE
        if needed > limit:
            raise ValueError(f"a cold L2 needs {needed:.1f} GiB of copies, limit {limit:.1f} GiB")
        caches = [work.kv]
        for _ in range(copies - 1):
            caches.append(PagedKV(work.kv.k_cache.clone(), work.kv.v_cache.clone()))
        return [partial(backend.run, work.q, kv, plan) for kv in caches]

    def _workload(self, case: DecodeCase) -> tuple[DecodeWorkload, Oracle]:
        if case != self._case:
            self._case = self._work = self._oracle = None
            work = build_workload(case, device=self.bench.device)
            self._oracle = Oracle(work.q, work.kv, work.batch)
            self._case, self._work = case, work
        return self._work, self._oracle

    def _too_large(self, case: DecodeCase) -> str:
        limit = self.bench.machine.get("memory_gib", 4.0) * MEMORY_SHARE
        needed = decode_cost(case).kv_bytes / 2**30
        return "" if needed <= limit else f"KV needs {needed:.1f} GiB, limit {limit:.1f} GiB"
