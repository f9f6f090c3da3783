"""Calls with several queries a request: one backend, one case; checked, timed, traced.

`plan_us` is a replan in place, a custom mask packed into bits included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import backends
from ..backends.base import Backend, Plan
from ..batch import PagedKV
from ..cost import extend_cost
from ..extend_case import ExtendCase
from ..extend_reference import ExtendOracle
from ..extend_workload import ExtendWorkload, build_extend_workload
from ..measure.timer import ROTATING, cold_copies, run_timer, time_host
from ..measure.trace import kernel_family, trace_kernels
from ..record import Item
from .base import Bench, oracle_fields, timed_fields

MEMORY_SHARE = 0.6
"""Of the GPU's memory a case may fill with K and V; the oracle and workspaces need the rest."""
MEMORY_GIB_UNKNOWN = 4.0


class ExtendSubject:
    """Measures one call of a backend (`backends.EXTEND_BACKENDS`); keeps the last case."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._work: ExtendWorkload | None = None
        self._oracle: ExtendOracle | None = None

    def measure(self, item: Item) -> dict[str, Any]:
        """Check one call by the oracle, time it and its plan, then trace it."""
        cls, case = backends.extend_class(item.backend), item.case
        self.bench.require_release(cls.distribution, item.release)
        reason = cls.unavailable() or cls.unsupported(case) or self._too_large(case, 1)
        if reason:
            return {"status": "refused", "reason": reason}
        timer = run_timer(item.timer)
        work, oracle = self._workload(case)
        backend = backends.create_extend(
            item.backend, case, device=self.bench.device, cuda_graph=item.timer.startswith("graph")
        )
        plan = backend.plan(work.batch)
        run = partial(backend.run, work.q, work.kv, plan)
        verdict = oracle.check(run())
        seen = {"reported_backend": plan.reported_backend, **oracle_fields(verdict)}
        if not verdict.passed:
            reason = f"row error {verdict.error:.3g} over budget {verdict.budget:.3g}"
            return {"status": "incorrect", "reason": reason, **seen}
        # Timed before it is traced: the profiler's callbacks stay on, and slow every launch.
        timing = timer(self._rotation(backend, plan) if item.timer in ROTATING else run)
        planning = time_host(lambda: backend.plan(work.batch, out=plan))
        kernels = trace_kernels(run)
        family = kernel_family(kernel.name for kernel in kernels)
        if cls.pinned_family not in ("", family):
            raise RuntimeError(f"asked for {cls.pinned_family}, but {family or 'none'} ran")
        work_bytes = float(extend_cost(case).io_bytes)
        return timed_fields(timing, kernels=kernels, work_per_call=work_bytes) | {
            "kernel_family": family,
            "plan_us": planning.samples_us,
            **seen,
        }

    def _rotation(self, backend: Backend, plan: Plan) -> list[Callable[[], torch.Tensor]]:
        """Calls over as many copies of K and V as a cold L2 takes; refuses if they do not fit."""
        work = self._work
        read = extend_cost(work.case).kv_bytes
        copies = cold_copies(read, int(self.bench.machine["l2_mib"] * 2**20))
        if reason := self._too_large(work.case, copies):
            raise ValueError(f"a cold L2 needs {copies} copies: {reason}")
        kv = work.kv
        more = (PagedKV(kv.k_cache.clone(), kv.v_cache.clone()) for _ in range(copies - 1))
        return [partial(backend.run, work.q, cache, plan) for cache in (kv, *more)]

    def _workload(self, case: ExtendCase) -> tuple[ExtendWorkload, ExtendOracle]:
        if self._work is None or self._work.case != case:
            self._work = self._oracle = None
            work = build_extend_workload(case, device=self.bench.device)
            self._oracle = ExtendOracle(work.q, work.kv, work.batch)
            self._work = work
        return self._work, self._oracle

    def _too_large(self, case: ExtendCase, copies: int) -> str:
        limit = self.bench.machine.get("memory_gib", MEMORY_GIB_UNKNOWN) * MEMORY_SHARE
        needed = copies * extend_cost(case).kv_bytes / 2**30
        return "" if needed <= limit else f"K and V need {needed:.1f} GiB, limit {limit:.1f} GiB"
