"""MLA decode: one backend, one case; checked by the oracle, traced, timed.

`plan_us` is a replan in place, chosen tokens checked and turned into slots. What FlashMLA computes
of a schedule is made once, by the checked call before any timing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import backends
from ..backends.base import Backend, Plan
from ..cases import MlaCase
from ..cost import mla_cache_bytes, mla_cost
from ..measure.timer import ROTATING, cold_copies, run_timer, time_host
from ..measure.trace import kernel_family, trace_kernels
from ..mla_reference import MlaOracle
from ..mla_workload import MlaWorkload, build_mla_workload
from ..record import Item
from .base import Bench, oracle_fields, timed_fields

MEMORY_SHARE = 0.75
"""Of the GPU's memory a case may fill with caches; the oracle and workspaces need the rest."""
MEMORY_GIB_UNKNOWN = 4.0


class MlaSubject:
    """Measures one MLA call of a backend (`backends.MLA_BACKENDS`); keeps the last case."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._work: MlaWorkload | None = None
        self._oracle: MlaOracle | None = None

    def measure(self, item: Item) -> dict[str, Any]:
        """Check one call by the oracle, time it and its plan, then trace it."""
        cls, spec = backends.mla_class(item.backend), item.case.spec
        self.bench.require_release(cls.distribution, item.release)
        reason = cls.unavailable() or cls.unsupported(spec) or self._too_large(item.case, 1)
        if reason:
            return {"status": "refused", "reason": reason}
        timer = run_timer(item.timer)
        work, oracle = self._workload(item.case)
        backend = backends.create_mla(
            item.backend, spec, device=self.bench.device, cuda_graph=item.timer.startswith("graph")
        )
        plan = backend.plan(work.batch)
        run = partial(backend.run, work.q, work.cache, plan)
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
        if cls.pinned_family != family:
            raise RuntimeError(f"asked for {cls.pinned_family}, but {family or 'none'} ran")
        work_bytes = float(mla_cost(item.case).io_bytes)
        return timed_fields(timing, kernels=kernels, work_per_call=work_bytes) | {
            "kernel_family": family,
            "plan_us": planning.samples_us,
            **seen,
        }

    def _rotation(self, backend: Backend, plan: Plan) -> list[Callable[[], torch.Tensor]]:
        """Calls over as many copies of the cache as a cold L2 takes; refuses if they do not fit."""
        work = self._work
        read = mla_cost(work.case).kv_bytes
        copies = cold_copies(read, int(self.bench.machine["l2_mib"] * 2**20))
        if reason := self._too_large(work.case, copies):
            raise ValueError(f"a cold L2 needs {copies} copies: {reason}")
        caches = [work.cache, *(work.cache.clone() for _ in range(copies - 1))]
        return [partial(backend.run, work.q, cache, plan) for cache in caches]

    def _workload(self, case: MlaCase) -> tuple[MlaWorkload, MlaOracle]:
        if self._work is None or self._work.case != case:
            self._work = self._oracle = None
            work = build_mla_workload(case, device=self.bench.device)
            self._oracle = MlaOracle(work.q, work.cache, work.batch)
            self._work = work
        return self._work, self._oracle

    def _too_large(self, case: MlaCase, copies: int) -> str:
        limit = self.bench.machine.get("memory_gib", MEMORY_GIB_UNKNOWN) * MEMORY_SHARE
        needed = copies * mla_cache_bytes(case) / 2**30
        return "" if needed <= limit else f"KV needs {needed:.1f} GiB, limit {limit:.1f} GiB"
