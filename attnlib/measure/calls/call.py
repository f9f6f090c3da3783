"""Measure one attention call: check it by the oracle, time it and its plan, trace it. Or a ceiling.

`plan_us` is a replan in place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from ...core import backends
from ...core.backends.base import Backend, Plan
from ...core.backends.table import family_of
from ..ceilings import CEILINGS
from ..timer import ROTATING, Timing, cold_copies, run_timer, time_host
from ..trace import kernel_family, trace_kernels
from .base import Subject, oracle_fields, timed_fields
from .check import Judge, OracleCheck
from .form import Item
from .inputs import Workload

MEMORY_GIB_UNKNOWN = 4.0


class CallSubject(Subject):
    """Measures one call of a backend.

    A kind names what its backends plan (one of `table.PLANNABLE`), what builds a case's tensors,
    and the oracle's attention over them.
    """

    plans: ClassVar[str]
    build: ClassVar["staticmethod[..., Workload]"]
    attend: ClassVar["staticmethod[..., torch.Tensor]"]
    memory_share: ClassVar[float] = 0.75
    """Share of the GPU's memory for K and V; the oracle and workspaces need the rest."""

    def measure(self, item: Item) -> dict[str, Any]:
        """Check one call by the oracle, time it and its plan, then trace it."""
        case = item.case
        mask = getattr(case, "mask", "causal")
        entry = backends.entry_of(item.backend, self.plans)
        self.bench.require_release(entry.distribution, item.release)
        reason = (
            backends.unavailable(entry.name)
            or backends.unsupported(entry.name, case.spec, mask=mask)
            or self._too_large(case, copies=1)
        )
        if reason:
            return {"status": "refused", "reason": reason}
        timer = run_timer(item.timer)
        work, judge = self.prepared(case)
        backend = backends.create(
            entry.name,
            case.spec,
            mask=mask,
            device=self.bench.device,
            cuda_graph=item.timer.startswith("graph"),
        )
        plan = backend.plan(work.batch)
        run = partial(
            backend.run,
            work.q,
            work.kv,
            plan,
        )

        def timing() -> Timing:
            if item.timer in ROTATING:
                return timer(self._rotation(backend, plan, work))
            return timer(run)

        fields = timed_call(
            run,
            judge.check,
            timer=timing,
            work_per_call=float(case.cost.io_bytes),
            gpu=self.bench.device == "cuda",
            reported=plan.reported_backend,
            replan=lambda: backend.plan(work.batch, out=plan),
        )
        family = fields.get("kernel_family", entry.family)
        if entry.family not in ("", family):
            raise RuntimeError(f"asked for {entry.family}, but {family or 'none'} ran")
        return fields

    def _rotation(
        self, backend: Backend, plan: Plan, work: Workload
    ) -> list[Callable[[], torch.Tensor]]:
        """Calls over as many copies of the cache as a cold L2 needs; ValueError if too large."""
        l2_bytes = int(self.bench.machine["l2_mib"] * 2**20)
        copies = cold_copies(work.case.cost.kv_bytes, l2_bytes)
        reason = self._too_large(work.case, copies)
        if reason:
            raise ValueError(f"a cold L2 needs {copies} copies: {reason}")
        calls: list[Callable[[], torch.Tensor]] = []
        for kv in cache_copies(work.kv, copies):
            calls.append(partial(backend.run, work.q, kv, plan))
        return calls

    def prepare(self, case: Any) -> tuple[Workload, Judge]:
        """The case's tensors and their judge."""
        work = self.build(case, device=self.bench.device)
        return work, Judge(self.attend, work.q, work.kv, work.batch)

    def _too_large(self, case: Any, copies: int) -> str:
        memory_gib = self.bench.machine.get("memory_gib", MEMORY_GIB_UNKNOWN)
        limit = memory_gib * self.memory_share
        needed = copies * case.cost.cache_bytes / 2**30
        if needed <= limit:
            return ""
        return f"KV needs {needed:.1f} GiB, limit {limit:.1f} GiB"


class CeilingSubject(Subject):
    """Measures an item without a case: its `backend` is a name out of `ceilings.CEILINGS`.

    What the GPU reaches at best, in the same study as what is judged by it.
    """

    def measure(self, item: Item) -> dict[str, Any]:
        """Time one ceiling."""
        call, work = CEILINGS[item.backend]()
        kernels = trace_kernels(call)
        timer = run_timer(item.timer)
        return timed_fields(timer(call), kernels=kernels, work_per_call=work)


def timed_call(
    run: Callable[[], Any],
    check: Callable[[Any], OracleCheck],
    *,
    timer: Callable[[], Timing],
    work_per_call: float,
    gpu: bool,
    reported: str = "",
    replan: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """A record's fields: check the output of `run`, time calls with `timer` and the plan on the
    host, if there is one, then (on a GPU) trace `run`."""
    verdict = check(run())
    seen = {"reported_backend": reported, **oracle_fields(verdict)}
    if not verdict.passed:
        return seen
    # Timed before it is traced: the profiler's callbacks stay on, and slow every launch.
    timing = timer()
    if replan is not None:
        seen["plan_us"] = time_host(replan).samples_us
    if gpu:
        seen["peak_bytes"] = peak_bytes(run)
    kernels = trace_kernels(run) if gpu else ()
    names = [kernel.name for kernel in kernels]
    seen["kernel_family"] = kernel_family(names, family_of)
    timed = timed_fields(timing, kernels=kernels, work_per_call=work_per_call)
    return timed | seen


def peak_bytes(run: Callable[[], Any]) -> int:
    """Bytes of GPU memory that a call allocates on top of what is held, at most at one time."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - held


def cache_copies(kv: Any, count: int) -> list[Any]:
    """A cache and clones of it: `count` in all."""
    clones = [kv.clone() for _ in range(count - 1)]
    return [kv, *clones]
