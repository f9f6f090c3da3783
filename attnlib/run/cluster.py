"""A study on many GPUs: its cases are dealt out, and each GPU measures its share as Dask tasks.

    python -m attnlib measure STUDY --gpus all       a Dask worker for each GPU of this machine
    python -m attnlib measure STUDY --dask ADDRESS   the workers of a running scheduler, each with
        export CUDA_VISIBLE_DEVICES=0 DASK_DISTRIBUTED__DIAGNOSTICS__NVML=False
        dask worker ADDRESS --nworkers 1 --nthreads 1 --worker-port 40000

What is compared must lie on one GPU, so cases are dealt out, not rounds: a GPU measures all rounds
of its cases as a `Sweep` does, under its own lock. Items without a case, the ceilings, are measured
on each GPU. A job is a task, which returns its records; the caller keeps those that its own folder
lacks. A worker that is killed comes back at its port, and Dask gives it its jobs again; what was on
disk is not measured again. If it stays away, or dies a fourth time, its jobs end with an error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import install_with
from ..measure.calls.form import NamedCase
from ..measure.machine import has_driver
from . import store
from .jobs import Job, Machine, StoppedError
from .missing import NoGpuError
from .rows import Row, machine_slug, rows_of
from .study import Study, Sweep, describe

if TYPE_CHECKING:
    from distributed import Client

ANSWER_S = 10
"""For a scheduler to answer."""
START_S = 120
"""For a worker to start, or to come back once it was killed."""
RETRIES = 2
"""Of a job that raises, as where another sweep holds the GPU."""
POLL_S = 0.2


@dataclass(frozen=True)
class Gpu:
    """A GPU of the cluster: its Dask worker, its machine, and how often a case is on record."""

    address: str
    machine: Machine
    on_record: Counter[NamedCase]

    @property
    def id(self) -> str:
        """The GPU's id."""
        return self.machine["gpu_id"]


Tasks = dict[Any, tuple[Gpu, Job]]
"""Future of a job -> where it runs."""


def measure_on_gpus(
    study: Study,
    sweep: Sweep,
    client: Client,
) -> tuple[int, list[str]]:
    """Measure what `study` lacks on a cluster's GPUs; returns how many items, and the machines.

    Raises what `Sweep.jobs` does, ValueError for workers without a GPU of their own. At the end, if
    a job failed or a worker died, RuntimeError; the same command then goes on from what is on disk.
    """
    from tqdm import tqdm

    jobs = sweep.jobs(study)
    gpus = _find_gpus(client, study)
    if not gpus:
        raise RuntimeError("the Dask cluster must have a worker for each GPU, it has none")
    on_record = {gpu.id: gpu.on_record for gpu in gpus}
    dealt = deal(jobs, on_record)
    there = Sweep(
        overlays=sweep.overlays,
        retry=sweep.retry,
        progress=partial(tqdm, disable=True),
    )
    left: Tasks = {}
    for gpu in gpus:
        for job in sweep.missing(dealt[gpu.id], gpu.machine):
            task = client.submit(
                _measure,
                job,
                there,
                workers=[gpu.address],
                retries=RETRIES,
                pure=False,
            )
            left[task] = (gpu, job)
    total = sum(len(job.items) for _, job in left.values())
    if total:
        bar = sweep.progress(total=total, unit="item", desc=study.name)
        with closing(bar):
            _wait_for(left, client, sweep, bar)
    return total, [machine_slug(gpu.machine) for gpu in gpus]


def _wait_for(left: Tasks, client: Client, sweep: Sweep, bar: Any) -> None:
    """Keep the records of each job when it ends. RuntimeError for the GPUs on which one failed.

    Whatever ends the wait, such as Ctrl-C, makes the workers give up what they measure.
    """
    failures = {}
    seen = {gpu.address: time.monotonic() for gpu, _ in left.values()}
    try:
        while left:
            time.sleep(POLL_S)
            if sweep.stop and sweep.stop():
                raise StoppedError
            now = time.monotonic()
            seen.update(dict.fromkeys(client.nthreads(), now))
            for task, (gpu, job) in list(left.items()):
                if task.done():
                    if task.status == "finished":
                        _keep(
                            study=job.study,
                            machine=gpu.machine,
                            rows=task.result(),
                        )
                    else:
                        failures[gpu.id] = str(task.exception())
                elif now - seen[gpu.address] > START_S:  # Dask would wait for it for good
                    failures[gpu.id] = f"its Dask worker died, and did not come back in {START_S} s"
                else:
                    continue
                del left[task]
                bar.update(len(job.items))
            bar.update(0)  # a bar shows the time that an item takes
    finally:
        client.cancel(list(left))
    if failures:
        words = [f"GPU {gpu_id!r}: {why}" for gpu_id, why in failures.items()]
        listed = "; ".join(words)
        raise RuntimeError(f"not all was measured: {listed}")


def deal(
    jobs: list[Job],
    on_record: dict[str, Counter[NamedCase]],
) -> dict[str, list[Job]]:
    """Each GPU's part of the jobs, by its id; `on_record` counts each GPU's records of a case.

    Case i goes to GPU i % n, in the order of the jobs and of the ids, unless another GPU has more
    records of it. A GPU without a case gets no jobs.
    """
    gpu_ids = sorted(on_record)
    items = [item for job in jobs for item in job.items]
    cases = dict.fromkeys(item.case for item in items if item.case)
    home: dict[NamedCase | None, str] = {}
    for number, case in enumerate(cases):
        next_in_turn = gpu_ids[number % len(gpu_ids)]
        counts = {}
        for gpu_id in [next_in_turn, *gpu_ids]:
            counts[gpu_id] = on_record[gpu_id][case]
        home[case] = max(counts, key=counts.__getitem__)  # of equals the first
    parts: dict[str, list[Job]] = {gpu_id: [] for gpu_id in gpu_ids}
    for gpu_id in set(home.values()):
        for job in jobs:
            own = []
            for item in job.items:
                is_own = home.get(item.case, gpu_id) == gpu_id
                if is_own:
                    own.append(item)
            if own:
                part = replace(job, items=tuple(own))
                parts[gpu_id].append(part)
    return parts


def _find_gpus(client: Client, study: Study) -> list[Gpu]:
    """The GPU of each worker, by id."""
    answers = client.run(_look_around, study.name, study.device)
    gpus: dict[str, Gpu] = {}
    for address, (machine, on_record) in answers.items():
        here = store.find(study.name, machine_slug(machine))
        found = Counter(here.case.dropna())
        gpu = Gpu(address, machine, on_record + found)
        other = gpus.setdefault(gpu.id, gpu)
        if other is not gpu:
            raise ValueError(
                f"each Dask worker must have a GPU of its own, {other.address} and {address} both "
                f"have {gpu.id!r}: set CUDA_VISIBLE_DEVICES"
            )
    return [gpus[gpu_id] for gpu_id in sorted(gpus)]


def _keep(study: str, machine: Machine, rows: list[Row]) -> None:
    """Write what the data folder lacks: nothing where it is the worker's folder too."""
    have = {row["id"]: row for row in _rows(study, machine)}
    for row in rows:
        if have.get(row["id"]) != row:
            store.keep(row)


def _rows(study: str, machine: Machine) -> list[Row]:
    slug = machine_slug(machine)
    if slug not in store.machines(study):
        return []
    return rows_of(store.read(study, slug))


# ---- on a worker


async def _look_around(study: str, device: str) -> tuple[Machine, Counter[NamedCase]]:
    """The worker's GPU, and how many records of each case its data folder has."""
    # In a thread: the description takes seconds, and the worker must go on answering.
    machine = await asyncio.to_thread(describe, device)
    frame = store.find(study, machine_slug(machine))
    return machine, Counter(frame.case.dropna())


def _measure(job: Job, sweep: Sweep) -> list[Row]:
    """Measure what the worker's data folder lacks of a job; returns the records of its items."""
    from distributed import Status, get_worker

    worker = get_worker()
    key = worker.get_current_task()
    machine = describe(job.device)
    ids = {job.id_of(item, machine) for item in job.items}

    def is_given_up() -> bool:
        # The caller cancelled it or is gone, or the scheduler is: Dask does not stop a thread.
        task = worker.state.tasks.get(key)
        is_wanted = task is not None and task.state == "executing"
        return not is_wanted or worker.status in (Status.closing, Status.closed)

    replace(sweep, stop=is_given_up).run([job])
    rows = _rows(job.study, machine)
    return [row for row in rows if row["id"] in ids]


def dask_setup(worker: object) -> None:
    """Dask calls this in each worker of `local_cluster`: Ctrl-C is the caller's, who ends it."""
    # A handler, not SIG_IGN, which pip would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)


# ---- clusters


def asked_gpus(text: str) -> list[str]:
    """CUDA_VISIBLE_DEVICES for each GPU of this machine that `all` or a number asks for."""
    is_number = text.isascii() and text.isdecimal()
    if text != "all" and not (is_number and int(text)):
        raise ValueError(f"--gpus must be all or a number from 1, got {text!r}")
    import torch

    if not (has_driver() and torch.cuda.is_available()):
        raise NoGpuError("--gpus must be used on a machine with a CUDA GPU; none is here")
    count = torch.cuda.device_count()
    wanted = count if text == "all" else int(text)
    if wanted > count:
        raise ValueError(f"--gpus must be all or a number from 1 to {count}, got {text!r}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        names = visible.split(",")
    else:
        names = [str(number) for number in range(count)]
    return names[:wanted]


@contextmanager
def local_cluster(environments: Iterable[dict[str, str]]) -> Iterator[Client]:
    """A client of a cluster on this machine: a worker with each of the environments."""
    distributed = _import_distributed()
    import dask

    environments = list(environments)
    ports = _free_ports(len(environments))
    workers = {}
    for number, (environment, port) in enumerate(zip(environments, ports, strict=True)):
        # A nanny starts its worker again if that is killed: at the same port, to which Dask then
        # sends the jobs that it had.
        workers[number] = {
            "cls": distributed.Nanny,
            "options": {
                "nthreads": 1,
                "host": "127.0.0.1",
                "worker_port": port,
                "memory_limit": 0,
                "dashboard": False,
                "silence_logs": logging.CRITICAL,
                "env": environment,
                "preload": __name__,
            },
        }
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {
            "host": "127.0.0.1",
            "port": 0,
            "dashboard_address": "127.0.0.1:0",
        },
    }
    # Dask would ask each GPU for its load twice a second, beside what is timed.
    with dask.config.set({"distributed.diagnostics.nvml": False}):
        cluster = distributed.SpecCluster(
            workers,
            scheduler=scheduler,
            silence_logs=logging.CRITICAL,
        )
        with cluster, distributed.Client(cluster, set_as_default=False) as client:
            client.wait_for_workers(len(workers), timeout=START_S)
            yield client


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback that nothing listens on, each once."""
    ports = []
    with ExitStack() as held:
        for _ in range(count):
            server = socket.create_server(("127.0.0.1", 0))
            held.enter_context(server)
            _, port = server.getsockname()
            ports.append(port)
    return ports


@contextmanager
def running_cluster(address: str) -> Iterator[Client]:
    """A client of the scheduler at `address`; RuntimeError if none answers."""
    distributed = _import_distributed()
    if not re.fullmatch(r"(\w+://)?\S+:\d+", address):
        raise ValueError(f"--dask must be an address such as tcp://HOST:8786, got {address!r}")
    try:
        asyncio.run(asyncio.wait_for(_greet(address), ANSWER_S))
    except (OSError, ValueError) as error:
        words = f"no Dask scheduler answers at {address} within {ANSWER_S} s"
        raise RuntimeError(words) from error
    with distributed.Client(address, timeout=ANSWER_S, set_as_default=False) as client:
        yield client


async def _greet(address: str) -> None:
    """Greet a scheduler. `Client` itself waits for good for one that accepts and says nothing."""
    from distributed import Security
    from distributed.core import connect

    options = Security().get_connection_args("client")
    comm = await connect(address, timeout=ANSWER_S, **options)
    await comm.close()


def _import_distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise RuntimeError(f"Dask is missing: {install_with('cluster')}") from error
    return distributed
