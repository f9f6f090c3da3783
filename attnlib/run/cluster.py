"""A study on many GPUs or machines: the same study, its jobs as tasks of a Dask cluster.

    dask scheduler
    CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS --nworkers 1 --nthreads 1 --resources GPU=1
    python -m attnlib measure STUDY --cluster ADDRESS

One Dask worker (with its nanny) per GPU. What is compared must lie on one GPU, so the cases are
shared out, not the rounds: each goes to the GPU that has records of it, else to the one with the
least to do. Ceilings are measured on every GPU.

A task is a GPU's share of a `jobs.Job`. It runs there as a `Sweep` does, and each record is in that
machine's store before the task returns (`ATTNLIB_DATA` names one shared folder, or each machine
keeps its own). Should a Dask worker die, its GPU's tasks are given up: the same command goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
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
    tasks: dict[Future, tuple[str, Job]] = {}
    for order, (gpu_id, job) in enumerate(shares):
        future = client.submit(
            _run_here,
            job,
            there,
            workers=[homes[gpu_id]],
            resources={RESOURCE: 1},
            retries=RETRIES,
            priority=-order,
            pure=False,
        )
        tasks[future] = (gpu_id, job)
    with sweep.bar(study.name, total) as update:
        return _collect(client, tasks, homes, update)


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


def _collect(
    client: Client,
    tasks: dict[Future, tuple[str, Job]],
    homes: dict[str, str],
    update: Callable[[int], object],
) -> dict[str, int]:
    """Wait for the tasks; how many items have each status.

    RuntimeError at the end for those that failed, or whose Dask worker died.
    """
    statuses: Counter[str] = Counter()
    failures = []
    try:
        while tasks:
            alive = client.nthreads()
            for future, (gpu_id, job) in list(tasks.items()):
                error: BaseException | str | None = None
                if future.done():
                    error = future.exception()
                elif homes[gpu_id] not in alive:
                    error = "its Dask worker died: start it and repeat the command"
                    client.cancel([future])
                else:
                    continue
                del tasks[future]
                update(len(job.items))
                if error is None:
                    statuses += future.result()
                else:
                    release = job.release or "no release"
                    failures.append(f"round {job.round} of {release} on GPU {gpu_id!r}: {error}")
            time.sleep(POLL_S)
    finally:
        client.cancel(list(tasks))
    if failures:
        raise RuntimeError(f"{len(failures)} jobs failed, first {failures[0]}")
    return dict(statuses)


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
