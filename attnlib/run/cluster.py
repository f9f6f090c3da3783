"""A study on many GPUs: its cases are dealt out, and each GPU sweeps its share as a Dask task.

    python -m attnlib measure STUDY --gpus all       a Dask worker for each GPU of this machine
    python -m attnlib measure STUDY --dask ADDRESS   the workers of a running scheduler, each with
        export CUDA_VISIBLE_DEVICES=0 DASK_DISTRIBUTED__DIAGNOSTICS__NVML=False
        dask worker ADDRESS --nworkers 1 --nthreads 1

What is compared must lie on one GPU, so cases are dealt out, not rounds: a GPU measures all rounds
of its cases as a `Sweep` does, under its own lock. Items without a case, the ceilings, are measured
on each GPU. A share returns its records; the caller keeps those that its own folder lacks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .. import install_with
from ..measure.calls.form import NamedCase
from ..measure.machine import has_driver
from . import store
from .jobs import Job, StoppedError
from .rows import Row, machine_slug, rows_of
from .study import Study, Sweep, describe

if TYPE_CHECKING:
    from distributed import Client, Future

ANSWER_S = 10
"""For a scheduler to answer."""
START_S = 120
"""For a worker to start, or to come back once it was killed."""
RETRIES = 2
"""Of a share: its sweep may raise, as where another one holds the GPU, or its worker may die."""
POLL_S = 0.2


@dataclass
class Share:
    """What a GPU is to measure, and how far it is; its Dask worker is at `address`, if alive."""

    machine: dict[str, Any]
    on_record: Counter[NamedCase]
    address: str
    jobs: list[Job] = field(default_factory=list)
    task: Future = None
    done: int = 0
    deaths: int = 0
    died_at: float = 0.0
    failure: str = ""

    @property
    def size(self) -> int:
        """How many items it has."""
        return sum(len(job.items) for job in self.jobs)


def measure_on_gpus(study: Study, sweep: Sweep, client: Client) -> tuple[int, list[str]]:
    """Measure what `study` lacks on a cluster's GPUs; returns how many items, and the machines.

    Raises what `Sweep.jobs` does, ValueError for workers without a GPU of their own. At the end, if
    some shares failed, RuntimeError; the same command then goes on from what is on disk.
    """
    jobs = sweep.jobs(study)
    shares = _find_gpus(client, study, list(client.nthreads()))
    if not shares:
        raise RuntimeError("the Dask cluster must have a worker for each GPU, it has none")
    for share in shares.values():
        here = store.find(study.name, machine_slug(share.machine))
        share.on_record.update(here.case.dropna())
    on_record = {gpu_id: share.on_record for gpu_id, share in shares.items()}
    dealt = deal(jobs, on_record)
    for gpu_id, share in shares.items():
        if dealt[gpu_id]:
            share.jobs = sweep.missing(dealt[gpu_id], share.machine)
    total = sum(share.size for share in shares.values())
    if total:
        bar = sweep.progress(total=total, unit="item", desc=study.name)
        with closing(bar):
            _Run(client, study, sweep, shares).to_end(bar)
    return total, [machine_slug(share.machine) for share in shares.values()]


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
        # Of equals `max` takes the first.
        home[case] = max([next_in_turn, *gpu_ids], key=lambda gpu_id: on_record[gpu_id][case])
    parts: dict[str, list[Job]] = {gpu_id: [] for gpu_id in gpu_ids}
    for gpu_id in set(home.values()):
        for job in jobs:
            own = [item for item in job.items if home.get(item.case, gpu_id) == gpu_id]
            if own:
                parts[gpu_id].append(replace(job, items=tuple(own)))
    return parts


def _find_gpus(
    client: Client, study: Study, addresses: list[str], on_error: str = "raise"
) -> dict[str, Share]:
    """A share without jobs for the GPU of each worker, by the GPU's id."""
    answers = client.run(
        _look_around,
        study.name,
        study.device,
        workers=addresses,
        on_error=on_error,
    )
    shares: dict[str, Share] = {}
    for address, (machine, on_record) in answers.items():
        share = Share(machine, on_record, address)
        other = shares.setdefault(machine["gpu_id"], share)
        if other is not share:
            raise ValueError(
                f"each Dask worker must have a GPU of its own, {other.address} and {address} both "
                f"have {machine['gpu_id']!r}: set CUDA_VISIBLE_DEVICES"
            )
    return dict(sorted(shares.items()))


@dataclass
class _Run:
    """The shares of a study while the workers measure them."""

    client: Client
    study: Study
    sweep: Sweep
    shares: dict[str, Share]

    def to_end(self, bar: Any) -> None:
        """Wait for every share, telling the bar of each item. RuntimeError for those that failed.

        Whatever ends the wait, such as Ctrl-C, makes the workers give up what they measure.
        """
        known = {share.address for share in self.shares.values()}
        left = {gpu_id: share for gpu_id, share in self.shares.items() if share.jobs}
        shown = 0
        self.client.subscribe_topic(self._topic, self._on_event)
        try:
            for share in left.values():
                self._submit(share)
            while left:
                time.sleep(POLL_S)
                if self.sweep.stop and self.sweep.stop():
                    raise StoppedError
                alive = set(self.client.nthreads())
                for gpu_id, share in list(left.items()):
                    if self._has_ended(share, alive):
                        del left[gpu_id]
                if any(not share.address for share in left.values()):
                    self._find_again(left, sorted(alive - known))
                    known |= alive
                done = sum(share.done for share in self.shares.values())
                bar.update(done - shown)  # of 0 items too: a bar shows the time that one takes
                shown = done
        finally:
            tasks = [share.task for share in left.values()]
            self.client.cancel(list(filter(None, tasks)))
            self.client.unsubscribe_topic(self._topic)
        failures = []
        for gpu_id, share in self.shares.items():
            if share.failure:
                failures.append(f"GPU {gpu_id!r}: {share.failure}")
        if failures:
            raise RuntimeError(f"not all was measured: {'; '.join(failures)}")

    @property
    def _topic(self) -> str:
        return f"attnlib-{self.client.id}"

    def _on_event(self, event: tuple[float, tuple[str, int]]) -> None:
        _, (gpu_id, done) = event
        self.shares[gpu_id].done = max(self.shares[gpu_id].done, done)

    def _submit(self, share: Share) -> None:
        there = Sweep(overlays=self.sweep.overlays, retry=self.sweep.retry)
        share.task = self.client.submit(
            _measure_share,
            share.jobs,
            there,
            self._topic,
            workers=[share.address],
            retries=RETRIES,
            pure=False,
        )

    def _has_ended(self, share: Share, alive: set[str]) -> bool:
        """Whether nothing more comes of a share, by what is known of its task and its worker."""
        if share.task and share.task.done():
            if share.task.status == "finished":
                self._keep(share, share.task.result())
                share.done = share.size
            else:
                share.failure = str(share.task.exception())
            return True
        if share.address and share.address not in alive:
            # The next one has another address, and Dask would wait for this one for good.
            self.client.cancel([share.task])
            share.address = ""
            share.task = None
            share.deaths += 1
            share.died_at = time.monotonic()
            if share.deaths > RETRIES:
                share.failure = f"its Dask worker died {share.deaths} times"
        elif not share.address and time.monotonic() - share.died_at > START_S:
            share.failure = f"its Dask worker died, and no other one came within {START_S} s"
        return bool(share.failure)

    def _find_again(self, left: dict[str, Share], addresses: list[str]) -> None:
        """Submit once more the shares whose GPUs are those of the new workers."""
        found = _find_gpus(self.client, self.study, addresses, on_error="ignore")
        for gpu_id in found.keys() & left.keys():
            if not left[gpu_id].address:
                left[gpu_id].address = found[gpu_id].address
                self._submit(left[gpu_id])

    def _keep(self, share: Share, rows: list[Row]) -> None:
        """Write what the data folder lacks: nothing where it is the worker's folder too."""
        have = {row["id"]: row for row in _rows(self.study.name, share.machine)}
        for row in rows:
            if have.get(row["id"]) != row:
                store.keep(row)


def _rows(study: str, machine: dict[str, Any]) -> list[Row]:
    slug = machine_slug(machine)
    return rows_of(store.read(study, slug)) if slug in store.machines(study) else []


# ---- on a worker


async def _look_around(study: str, device: str) -> tuple[dict[str, Any], Counter[NamedCase]]:
    """The worker's GPU, and how many records of each case its data folder has."""
    # In a thread: the description takes seconds, and the worker must go on answering.
    machine = await asyncio.to_thread(describe, device)
    frame = store.find(study, machine_slug(machine))
    return machine, Counter(frame.case.dropna())


def _measure_share(jobs: list[Job], sweep: Sweep, topic: str) -> list[Row]:
    """Measure what the worker's data folder lacks of the jobs; returns the records of them all."""
    from distributed import Status, get_worker

    worker = get_worker()
    key = worker.get_current_task()
    machine = describe(jobs[0].device)
    ids = {job.id_of(item, machine) for job in jobs for item in job.items}

    def is_given_up() -> bool:
        # The caller cancelled it or is gone, or the scheduler is: Dask does not stop a thread.
        task = worker.state.tasks.get(key)
        is_wanted = task is not None and task.state == "executing"
        return not is_wanted or worker.status in (Status.closing, Status.closed)

    def tell(done: int) -> None:
        worker.log_event(topic, (machine["gpu_id"], done))

    sweep = replace(sweep, progress=_Tally(len(ids), tell), stop=is_given_up)
    sweep.run(jobs)
    return [row for row in _rows(jobs[0].study, machine) if row["id"] in ids]


class _Tally:
    """In place of a sweep's bar: tells how many items of a share are done, also if begun again."""

    def __init__(self, size: int, tell: Callable[[int], None]) -> None:
        self.size = size
        self.tell = tell
        self.done = 0

    def __call__(self, total: int, **words: object) -> _Tally:
        self.done = self.size - total
        return self

    def update(self, count: int) -> None:
        self.done += count
        if count:
            self.tell(self.done)

    def close(self) -> None:
        pass


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
        raise RuntimeError("--gpus must be used on a machine with a CUDA GPU; none is here")
    count = torch.cuda.device_count()
    wanted = count if text == "all" else int(text)
    if wanted > count:
        raise ValueError(f"--gpus must be all or a number from 1 to {count}, got {text!r}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return names[:wanted]


@contextmanager
def local_cluster(environments: Iterable[dict[str, str]]) -> Iterator[Client]:
    """A client of a cluster on this machine: a worker with each of the environments."""
    distributed = _import_distributed()
    import dask

    workers = {}
    for number, environment in enumerate(environments):
        # A nanny starts its worker again if that is killed.
        workers[number] = {
            "cls": distributed.Nanny,
            "options": {
                "nthreads": 1,
                "host": "127.0.0.1",
                "memory_limit": 0,
                "dashboard": False,
                "silence_logs": logging.CRITICAL,
                "env": environment,
                "preload": __name__,
            },
        }
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"},
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
