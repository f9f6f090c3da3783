"""One fresh process: a job in, records out. The only place that runs foreign kernels for a study.

    python -m attnlib.worker JOB.json          (started by `jobs`, not by hand)
    python -m attnlib.worker --describe cuda   prints the machine as JSON

A job is `{"study", "round", "device", "command", "items": [...], "progress": PATH}`. For each item
the worker writes `start N` to the progress file, measures, appends the record to the store, writes
`done N`. Whatever kills the process, the parent knows which item did it and goes on with the rest.
With `--end-with-stdin` it ends when its stdin does: nobody's worker must not time on, unlocked.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import backends, store
from .backends.base import Backend, Plan
from .batch import DecodeCase, PagedKV
from .check import Oracle, OracleCheck
from .cost import decode_cost
from .measure import ceilings
from .measure.machine import describe_machine, describe_state, describe_versions
from .measure.timer import ROTATING, Timing, cold_copies, run_timer, time_host
from .measure.trace import Kernel, kernel_family, trace_kernels
from .record import Item, Record, strip_folders
from .workload import DecodeWorkload, build_workload

CONTEXT_LOST = 75
"""Exit status after a CUDA error that poisons the process (EX_TEMPFAIL: start a new one)."""
MEMORY_SHARE = 0.75
"""Of the GPU's memory a case may fill with KV; the oracle and workspaces need the rest."""
REASON_LENGTH = 300


class Worker:
    """Measures the items of one job; keeps the last case's tensors for its neighbours."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.device = job["device"]
        self.machine = describe_machine(self.device)
        self.versions = describe_versions()
        self._case: DecodeCase | None = None
        self._work: DecodeWorkload | None = None
        self._oracle: Oracle | None = None

    def measure(self, item: Item) -> Record:
        """The record of one item; every failure that leaves the process sane becomes a status."""
        before = describe_state(self.device)
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            found = self._measure_ceiling(item) if item.case is None else self._measure_decode(item)
        except Exception as error:
            status = "crashed" if _context_lost(error) else "error"
            found = {"status": status, "reason": _reason(error)}
        return Record(
            study=self.job["study"],
            round=self.job["round"],
            item=item,
            machine=self.machine,
            versions=self.versions,
            command=self.job["command"],
            started_at=started,
            state_before=before,
            state_after=describe_state(self.device),
            **found,
        )

    def _measure_ceiling(self, item: Item) -> dict[str, Any]:
        call, work = ceilings.CEILINGS[item.backend]()
        kernels = trace_kernels(call)
        return _timed(run_timer(item.timer)(call), kernels=kernels, work_per_call=work)

    def _measure_decode(self, item: Item) -> dict[str, Any]:
        cls, spec = backends.backend_class(item.backend), item.case.spec
        self._require_release(cls.distribution, item.release)
        reason = cls.unavailable() or cls.unsupported(spec) or self._too_large(item.case)
        if reason:
            return {"status": "refused", "reason": reason}
        timer = run_timer(item.timer)
        work, oracle = self._workload(item.case)
        backend = backends.create(
            item.backend, spec, device=self.device, cuda_graph=item.timer.startswith("graph")
        )
        plan = backend.plan(work.batch)
        verdict = oracle.check(backend.run(work.q, work.kv, plan))
        seen = {"reported_backend": plan.reported_backend, **_oracle_fields(verdict)}
        if not verdict.passed:
            reason = f"row error {verdict.error:.3g} over budget {verdict.budget:.3g}"
            return {"status": "incorrect", "reason": reason, **seen}

        def run() -> torch.Tensor:
            return backend.run(work.q, work.kv, plan)

        kernels = trace_kernels(run) if self.device == "cuda" else ()
        family = kernel_family(kernel.name for kernel in kernels)
        if cls.pinned_family not in ("", family):
            raise RuntimeError(f"asked for {cls.pinned_family}, but {family or 'none'} ran")
        planning = time_host(lambda: backend.plan(work.batch, out=plan))
        cost = decode_cost(item.case)
        timed = run
        if item.timer in ROTATING:
            timed = self._rotation(backend, plan, work, cost.kv_bytes)
        return _timed(timer(timed), kernels=kernels, work_per_call=float(cost.io_bytes)) | {
            "kernel_family": family,
            "plan_us": planning.samples_us,
            **seen,
        }

    def _require_release(self, distribution: str, release: str) -> None:
        found = self.versions.get(distribution, "none")
        if release and found != release:
            raise RuntimeError(f"release must be {distribution} {release}, imported was {found}")

    def _rotation(
        self, backend: Backend, plan: Plan, work: DecodeWorkload, kv_bytes: int
    ) -> list[Callable[[], torch.Tensor]]:
        """Calls over as many copies of the cache as a cold L2 takes; refuses if they do not fit."""
        copies = cold_copies(kv_bytes, int(self.machine["l2_mib"] * 2**20))
        needed, limit = copies * kv_bytes / 2**30, self.machine["memory_gib"] * MEMORY_SHARE
        if needed > limit:
            raise ValueError(f"a cold L2 needs {needed:.1f} GiB of copies, limit {limit:.1f} GiB")
        caches = [work.kv]
        for _ in range(copies - 1):
            caches.append(PagedKV(work.kv.k_cache.clone(), work.kv.v_cache.clone()))
        return [partial(backend.run, work.q, kv, plan) for kv in caches]

    def _workload(self, case: DecodeCase) -> tuple[DecodeWorkload, Oracle]:
        if case != self._case:
            self._case = self._work = self._oracle = None
            work = build_workload(case, device=self.device)
            self._oracle = Oracle(work.q, work.kv, work.batch)
            self._case, self._work = case, work
        return self._work, self._oracle

    def _too_large(self, case: DecodeCase) -> str:
        limit = self.machine.get("memory_gib", 4.0) * MEMORY_SHARE
        needed = decode_cost(case).kv_bytes / 2**30
        return "" if needed <= limit else f"KV needs {needed:.1f} GiB, limit {limit:.1f} GiB"


def run_job(path: Path) -> int:
    """Measure every item of the job at `path`; returns the exit status."""
    job = json.loads(path.read_text())
    with Path(job["progress"]).open("a", buffering=1) as progress:
        worker = Worker(job)
        for number, form in job["items"]:
            progress.write(f"start {number}\n")
            record = worker.measure(Item.from_dict(form))
            store.append(record)
            progress.write(f"done {number}\n")
            if record.status == "crashed":
                return CONTEXT_LOST
    return 0


def _timed(timing: Timing, *, kernels: tuple[Kernel, ...], work_per_call: float) -> dict[str, Any]:
    return {
        "status": "ok",
        "run_us": timing.samples_us,
        "calls_per_sample": timing.calls_per_sample,
        "kernels": tuple(asdict(kernel) for kernel in kernels),
        "work_per_call": work_per_call,
    }


def _oracle_fields(verdict: OracleCheck) -> dict[str, Any]:
    finite = verdict.error if verdict.error != float("inf") else None
    return {
        "oracle_error": finite,
        "oracle_budget": verdict.budget,
        "oracle_rows": verdict.rows,
    }


def _reason(error: Exception) -> str:
    words = strip_folders(f"{type(error).__name__}: {error}")
    told = " ".join(words.split())[:REASON_LENGTH]
    # A compiler's own complaint stands far below the command line that it got.
    complaint = re.search(r"^.*\berror: .*$", words, re.MULTILINE)
    if complaint is None or complaint[0].strip() in told:
        return told
    return f"{told} ... {complaint[0].strip()[:REASON_LENGTH]}"


def _context_lost(error: Exception) -> bool:
    # These leave the CUDA context unusable; an out-of-memory error does not.
    return "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the worker process."""
    parser = argparse.ArgumentParser(prog="attnlib.worker", description=__doc__)
    parser.add_argument("job", nargs="?", type=Path)
    parser.add_argument("--describe", metavar="DEVICE")
    parser.add_argument("--end-with-stdin", action="store_true")
    options = parser.parse_args(arguments)
    if options.describe:
        print(json.dumps(describe_machine(options.describe)))
        return 0
    if options.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    return run_job(options.job)


def _end_with_stdin() -> None:
    # Blocks without the GIL: it costs the measurement nothing.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
