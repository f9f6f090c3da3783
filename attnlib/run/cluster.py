"""A study on many GPUs or machines: the same study, its jobs as tasks of a Dask cluster.

    dask scheduler
    CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS --nworkers 1 --nthreads 1 --resources GPU=1
    python -m attnlib measure STUDY --cluster ADDRESS

One Dask worker (with its nanny) per GPU. What is compared must lie on one GPU, so the cases are
shared out, not the rounds: each goes to the GPU that has records of it, else to the one with the
least to do. Ceilings are measured on every GPU.

A task is a GPU's share of a `jobs.Job`. It runs there as a `Sweep` does, and each record is in that
machine's store before the task returns (`ATTNLIB_DATA` names one shared folder, or each machine
keeps its own). So the death of a Dask worker costs the item that it was at: its nanny starts
another, and its GPU's tasks go there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..kinds.cases import Case
from . import store
from .jobs import Job
from .record import machine_slug
from .study import Study, Sweep, describe

if TYPE_CHECKING:
    from distributed import Client, Future

RESOURCE = "GPU"
RETRIES = 2
"""Of a task that raises: an overlay may fail to install, a held lock may come free."""
MOVES = 3
"""How many deaths of its Dask worker a GPU may have before its tasks are given up."""
AWAY_S = 120.0
"""How long a GPU may be without a worker: a nanny's restart took 2 to 5 s on two cores."""
POLL_S = 0.2


def connect(address: str) -> Client:
    """A client of the scheduler at `address`; RuntimeError without Dask, OSError without one."""
    try:
        from distributed import Client
    except ImportError as error:
        raise RuntimeError('Dask is missing: pip install "attnlib[cluster]"') from error
    return Client(address, set_as_default=False)


def measure_on_cluster(study: Study, client: Client, sweep: Sweep) -> dict[str, int]:
    """Measure what `study` lacks on the cluster, as `sweep.measure` would on this machine.

    Returns how many of the study's items are on record with each status. Folders of overlays must
    exist on every worker; `sweep.stop` is not asked. Raises ValueError for a cluster that is not
    one worker per GPU; at the end, with all else on record, RuntimeError for the jobs that failed.
    """
    jobs = sweep.jobs(study)
    homes = _find_gpus(client, study.device)
    known = client.run(_cases_on_record, study.name, study.device)
    shares = share_out(jobs, {gpu_id: known[home] for gpu_id, home in homes.items()})
    total = sum(len(job.items) for _, job in shares)
    there = Sweep(overlays=sweep.overlays, retry=sweep.retry)
    with sweep.bar(study.name, total) as update:
        return _Tasks(client, study.device, homes, there, update).run(shares)


def share_out(jobs: list[Job], on_record: dict[str, Counter[Case]]) -> list[tuple[str, Job]]:
    """(GPU id, its share of a job) in the order of `jobs`; `on_record` counts each GPU's records.

    A case has one home over all jobs; an item without a case, a ceiling, is in every share.
    """
    load = dict.fromkeys(sorted(on_record), 0)
    home: dict[Case, str] = {}
    weights = Counter(item.case for job in jobs for item in job.items if item.case)
    # What is on record has no choice of home, so it goes first and the rest evens out the load.
    for case in sorted(weights, key=lambda case: not any(on_record[g][case] for g in load)):
        home[case] = min(load, key=lambda gpu_id: (-on_record[gpu_id][case], load[gpu_id]))
        load[home[case]] += weights[case]
    shares = []
    for job in jobs:
        for gpu_id in load:
            items = tuple(i for i in job.items if i.case is None or home[i.case] == gpu_id)
            shares += [(gpu_id, replace(job, items=items))] if items else []
    return shares


@dataclass
class _Tasks:
    """Tasks under way, each bound to the Dask worker that has its GPU at the time."""

    client: Client
    device: str
    homes: dict[str, str]
    sweep: Sweep
    update: Callable[[int], object]
    pending: dict[Future, tuple[int, str, Job]] = field(default_factory=dict)
    moves: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, shares: list[tuple[str, Job]]) -> dict[str, int]:
        statuses: Counter[str] = Counter()
        for order, (gpu_id, job) in enumerate(shares):
            self._submit(order, gpu_id, job)
        try:
            while self.pending:
                for future in [future for future in self.pending if future.done()]:
                    statuses += self._result(future)
                self._follow_workers()
                time.sleep(POLL_S)
        finally:
            self.client.cancel(list(self.pending))
        if self.failures:
            raise RuntimeError(f"{len(self.failures)} jobs failed, first {self.failures[0]}")
        return dict(statuses)

    def _submit(self, order: int, gpu_id: str, job: Job) -> None:
        future = self.client.submit(
            _run_here,
            job,
            self.sweep,
            workers=[self.homes[gpu_id]],
            resources={RESOURCE: 1},
            retries=RETRIES,
            priority=-order,
            pure=False,
        )
        self.pending[future] = (order, gpu_id, job)

    def _result(self, future: Future) -> Counter[str]:
        _, gpu_id, job = self.pending.pop(future)
        self.update(len(job.items))
        try:
            return future.result()
        except Exception as error:
            self._give_up(gpu_id, job, error)
            return Counter()

    def _follow_workers(self) -> None:
        here = self.client.nthreads()
        waiting = {gpu_id for _, gpu_id, _ in self.pending.values()}
        for gpu_id in [gpu_id for gpu_id in waiting if self.homes[gpu_id] not in here]:
            self.moves[gpu_id] += 1
            came_back = self.moves[gpu_id] <= MOVES and self._find_again(gpu_id)
            for future, (order, owner, job) in list(self.pending.items()):
                if owner == gpu_id:
                    del self.pending[future]
                    self.client.cancel([future])
                    if came_back:
                        self._submit(order, gpu_id, job)
                    else:
                        self._give_up(gpu_id, job, "its worker died and did not come back")

    def _find_again(self, gpu_id: str) -> bool:
        deadline = time.monotonic() + AWAY_S
        while time.monotonic() < deadline:
            strangers = set(self.client.nthreads()) - set(self.homes.values())
            gpus = self.client.run(
                _describe_here, self.device, workers=list(strangers), on_error="ignore"
            )
            for address, machine in gpus.items():
                if machine["gpu_id"] == gpu_id:
                    self.homes[gpu_id] = address
                    return True
            time.sleep(POLL_S)
        return False

    def _give_up(self, gpu_id: str, job: Job, why: object) -> None:
        release = job.release or "no release"
        self.failures.append(f"round {job.round} of {release} on GPU {gpu_id!r}: {why}")


def _find_gpus(client: Client, device: str) -> dict[str, str]:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        raise ValueError("cluster must have a worker for each GPU, it has none")
    for address, worker in workers.items():
        if worker["resources"].get(RESOURCE) != 1:
            raise ValueError(
                f"workers must be started with --resources {RESOURCE}=1, "
                f"{address} has {worker['resources'] or 'none'}"
            )
    homes: dict[str, str] = {}
    for address, machine in client.run(_describe_here, device).items():
        other = homes.setdefault(machine["gpu_id"], address)
        if other != address:
            raise ValueError(
                f"each worker must have a GPU of its own, {other} and {address} "
                f"both have {machine['gpu_id']!r}: set CUDA_VISIBLE_DEVICES"
            )
    return homes


async def _describe_here(device: str) -> dict[str, Any]:
    # In a thread: the description takes seconds, and the worker must go on answering.
    return await asyncio.to_thread(describe, device)


def _cases_on_record(study: str, device: str) -> Counter[Case]:
    records = store.recover(study, machine_slug(describe(device)))
    return Counter(record.item.case for record in records if record.item.case)


def _run_here(job: Job, sweep: Sweep) -> Counter[str]:
    sweep.run([job])
    machine = describe(job.device)
    wanted = {job.id_of(item, machine) for item in job.items}
    records = store.read(job.study, machine_slug(machine))
    return Counter(record.status for record in records if record.id in wanted)
