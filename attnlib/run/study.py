"""A study: grids of cases x backends x releases x timers, in rounds; measured once, then loaded.

Each (round, release) has a fresh process; odd rounds run in reverse order, so that a drift of the
GPU does not favour one side (A B B A).

`ATTNLIB_MODE` = auto (live where torch sees a CUDA GPU, else replay) | live | replay.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import shlex
import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.backends.table import COMPARED, compared_package
from ..core.spec import require_type, require_word
from ..measure.calls.cases import read_case
from ..measure.calls.form import PACKAGE, Item, NamedCase
from ..measure.machine import has_driver
from ..measure.progress import progress_bar
from . import store
from .jobs import WORKER, Job, Machine, Watch, run_job, worker_environment
from .lock import hold_gpu
from .missing import NoGpuError
from .releases import overlay_for
from .rows import machine_slug

if TYPE_CHECKING:
    import pandas as pd

MODES = ("auto", "live", "replay")
ROUNDS = 4
"""Of releases that are compared: A B B A, twice."""
LONGEST_GAP_S = 300
"""Between two records of one sweep; after a longer one it had been stopped."""


@dataclass(frozen=True)
class Grid:
    """A product of cases, backends, releases and timers, over `rounds` fresh processes.

    Of those `again`, each case is measured once more after all backends (A/A items).
    Live notebooks measure only grids marked `headline`; `attnlib measure` measures all. Items of
    an `isolated` grid have a process each, so that what one does to memory is not the next one's.
    """

    cases: tuple[NamedCase, ...]
    backends: tuple[str, ...]
    releases: tuple[str, ...] = ("",)
    timers: tuple[str, ...] = ("graph",)
    rounds: int = 1
    headline: bool = False
    isolated: bool = False
    again: tuple[str, ...] = ()

    def items(self) -> Iterator[Item]:
        """Every item of one round, case by case, so that a worker builds each case once."""
        firsts = list(product(self.backends, self.timers))
        repeats = list(product(self.again, self.timers))
        for release, case in product(self.releases, self.cases):
            for backend, timer in firsts:
                yield Item(backend, timer, case, release)
            for backend, timer in repeats:
                yield Item(backend, timer, case, release, again=1)


@dataclass(frozen=True)
class Study:
    """A question with the grids that answer it, and the machine its published records are of.

    Parameters
    ----------
    name : str
        Name of the study, of its file or folder and of its records.
    question : str
        What it asks, in one sentence.
    grids : tuple of Grid
        What is measured; none if the study is retired.
    reference_machine : str
        Folder of `data/records` whose records are shown unless another one is asked for.
    bisect_machine : str
        The same of the records of `bisect_<name>`, where there are any.
    device : str
        `cuda`, or `cpu` for a study of host code.
    ceilings : tuple of str
        Rates of the GPU that are measured beside the calls.
    command : str
        What measures it again, where `attnlib measure NAME` does not.
    retired : str
        What to do in place of measuring a study that can only be read.

    Raises
    ------
    ValueError
        By `require_measurable` for a retired study, by `case_named` for an unknown case.

    Examples
    --------
    >>> from attnlib.studies import STUDIES, fa3_decode_regression
    >>> study = fa3_decode_regression.STUDY
    >>> study.name in STUDIES, len(study.cases) > 100
    (True, True)
    >>> study.case_named("heads=32/8 head_dim=128 page=16 lens=8192x16").batch_size
    16
    """

    name: str
    question: str
    grids: tuple[Grid, ...] = ()
    reference_machine: str = ""
    bisect_machine: str = ""
    device: str = "cuda"
    ceilings: tuple[str, ...] = ("copy", "matmul")
    command: str = ""
    retired: str = ""

    @cached_property
    def cases(self) -> tuple[NamedCase, ...]:
        """Every case of the grids, once, in their order."""
        cases: dict[NamedCase, None] = {}
        for grid in self.grids:
            cases |= dict.fromkeys(grid.cases)
        return tuple(cases)

    def require_measurable(self) -> None:
        """ValueError that says what to do instead if the study can only be read."""
        if self.retired:
            raise ValueError(f"study {self.name!r} cannot be measured any more: {self.retired}")

    def case_named(self, name: str) -> NamedCase:
        """The case with this text, whose context may be left out; ValueError names near ones."""
        self.require_measurable()
        why = ""
        try:
            wanted = read_case(name).label
        except ValueError as error:
            wanted = name
            why = f" ({error})"
        matches = [case for case in self.cases if case.label == wanted]
        if not matches:  # the context may be left out where there is one alone
            start = f"{wanted} context="
            matches = []
            for case in self.cases:
                if case.label.startswith(start):
                    matches.append(case)
        if len(matches) != 1:
            texts = [case.label for case in self.cases]
            nearest = get_close_matches(wanted, texts, n=5, cutoff=0)
            near = "; ".join(nearest)
            raise ValueError(
                f"case must be one of study {self.name!r}, got {name!r}{why}; near: {near}"
            )
        return matches[0]

    def over_releases(self, package: str, releases: Sequence[str]) -> Study:
        """The calls by backends of one package alone, over these releases of it, `ROUNDS` or more.

        ValueError if no grid has such a backend.
        """
        grids = []
        for grid in self.grids:
            mine = replace(
                grid,
                backends=_of_package(package, grid.backends),
                again=_of_package(package, grid.again),
                releases=tuple(releases),
                rounds=max(grid.rounds, ROUNDS),
            )
            if mine.backends or mine.again:
                grids.append(mine)
        if not grids:
            words = f"study {self.name!r} has no backend of {package!r}"
            raise ValueError(f"releases must be of a package that is compared: {words}")
        options = f"--releases {package}=={','.join(releases)}"
        return replace(
            self,
            grids=tuple(grids),
            command=f"python -m attnlib measure {shlex.quote(self.name)} {options}",
        )

    def jobs(
        self,
        *,
        headline: bool,
        rounds: int | None = None,
    ) -> list[Job]:
        """Fresh processes in the order to run them: rounds outermost, odd rounds reversed."""
        self.require_measurable()
        grids = [grid for grid in self.grids if grid.headline or not headline]
        if not grids:
            raise ValueError(f"study {self.name!r} must have a headline grid to be measured live")
        count = rounds or max(grid.rounds for grid in grids)
        jobs: list[Job] = []
        for round_ in range(count):
            chosen = [grid for grid in grids if rounds or round_ < grid.rounds]
            items = chain.from_iterable(grid.items() for grid in chosen)
            jobs += self.jobs_of(round_, items)
        return jobs

    def jobs_of(self, round_: int, items: Iterable[Item]) -> list[Job]:
        """Fresh processes that measure `items` in that round, and the ceilings beside them."""
        isolated = [grid for grid in self.grids if grid.isolated]
        alone = set(chain.from_iterable(grid.items() for grid in isolated))
        groups: dict[object, list[Item]] = {}
        if self.ceilings:
            groups[""] = [Item(name, "graph") for name in self.ceilings]
        for item in dict.fromkeys(items):
            key = item if item in alone else item.release
            groups.setdefault(key, []).append(item)
        step = -1 if round_ % 2 else 1
        command = self.command or f"python -m attnlib measure {shlex.quote(self.name)}"
        jobs = []
        for group in list(groups.values())[::step]:
            job = Job(
                study=self.name,
                round=round_,
                device=self.device,
                release=group[0].release,
                items=tuple(group[::step]),
                command=command,
            )
            jobs.append(job)
        return jobs


def mode() -> str:
    """Whether notebooks measure on this GPU or replay published records.

    Returns
    -------
    str
        `live` or `replay`: what `ATTNLIB_MODE` says; if it is `auto` or unset, `live` where a CUDA
        GPU is.

    Raises
    ------
    ValueError
        For another value of `ATTNLIB_MODE`.
    RuntimeError
        For `live` without a CUDA GPU.

    Examples
    --------
    >>> import os
    >>> import attnlib
    >>> os.environ["ATTNLIB_MODE"] = "replay"
    >>> attnlib.mode()
    'replay'
    """
    wanted = os.environ.get("ATTNLIB_MODE", "auto")
    if wanted not in MODES:
        raise ValueError(f"ATTNLIB_MODE must be one of {', '.join(MODES)}, got {wanted!r}")
    if wanted == "live" and not _has_cuda():
        raise NoGpuError("ATTNLIB_MODE must be replay or auto here: live needs a CUDA GPU")
    if wanted == "auto":
        return "live" if _has_cuda() else "replay"
    return wanted


def study_given(study: Study | str) -> Study:
    """A study, or the one of a name; ValueError for another value, and lists the names."""
    if isinstance(study, str):
        # By its name, as the case of a record: this room knows no question.
        studies = importlib.import_module(f"{PACKAGE.name}.studies")
        studies.require_sound(study)
        require_word("study", study, studies.STUDIES)
        return studies.STUDIES[study]
    require_type("study", study, Study, such_as='attnlib.STUDIES["split_cap"]')
    return study


def load_or_measure(study: Study | str) -> pd.DataFrame:
    """The records of a study: measured now where missing (live), or replayed.

    Live it warns where no case could run, as for want of a library, with the first one's reason.

    Parameters
    ----------
    study : Study or str
        The study, or its name in `attnlib.STUDIES`. Live only its grids marked `headline` are
        measured.

    Returns
    -------
    pandas.DataFrame
        A row per record, with the columns of `data/README.md`; times in microseconds.

    Raises
    ------
    ValueError
        For an unknown study; for one that can only be read, if it is to be measured; for one
        without records.
    RuntimeError
        For `ATTNLIB_MODE=live` without a CUDA GPU, or while another sweep holds the GPU.

    Examples
    --------
    >>> import os
    >>> os.environ["ATTNLIB_MODE"] = "replay"
    >>> import attnlib
    >>> from attnlib.studies import fa3_decode_regression
    >>> rows = attnlib.load_or_measure(fa3_decode_regression.STUDY)
    >>> sorted(rows.backend.unique())[:2]
    ['copy', 'flashinfer-auto']
    """
    study = study_given(study)
    if mode() == "live":
        Sweep(headline=True).measure(study)
    frame = store.load(study.name, record_machine(study))
    cases = frame[frame.case.notna()]
    is_ok = cases.status == "ok"
    if mode() == "live" and len(cases) and not is_ok.any():
        why = f"no case of {study.name} could run here: {cases.reason.iloc[0]}"
        warnings.warn(why, stacklevel=2)
    return frame


def record_machine(study: Study) -> str:
    """Whose records to show: this GPU's (live), `ATTNLIB_MACHINE`, or its reference machine's.

    `ATTNLIB_MACHINE` may be a part of a name, such as h100: the reference machine if it fits, else
    the first that does. Raises ValueError listing the machines if there is none.
    """
    return machine_shown(study.name, study.device, study.reference_machine)


def machine_shown(study: str, device: str, published: str) -> str:
    """The same of a study by name, whose `published` records are of that machine, if any."""
    if mode() == "live":
        return machine_slug(describe(device))
    machines = store.machines(study)
    wish = os.environ.get("ATTNLIB_MACHINE")
    if wish:
        sources = [(study, machine) for machine in machines]
        found = store.on_machine("ATTNLIB_MACHINE", wish, sources)
        fitting = [machine for _, machine in found] or [wish]
        return published if published in fitting else fitting[0]
    if not published:
        what = "measure it on a GPU"
        if machines:
            listed = ", ".join(machines)
            what = f"set ATTNLIB_MACHINE to one of: {listed}"
        raise ValueError(f"study {study!r} has no published records: {what}")
    return published


@dataclass(frozen=True)
class Sweep:
    """How to measure what studies lack on this machine.

    `headline` takes only the grids that live notebooks measure; `rounds` overrides the grids' own.
    `overlays` maps `NAME==VERSION` to folders. `retry` measures again what is on record as failed.
    `progress` is a tqdm-like factory. `stop` ends the sweep with StoppedError (`jobs.Watch`).
    """

    headline: bool = False
    rounds: int | None = None
    overlays: dict[str, Path] = field(default_factory=dict)
    retry: bool = False
    progress: Callable[..., Any] = progress_bar
    stop: Callable[[], bool] | None = None

    def measure(self, study: Study) -> int:
        """Measure what `study` lacks; returns how many items were measured.

        Raises what `jobs` does, then RuntimeError without the GPU or while another sweep holds it.
        """
        jobs = self.jobs(study)
        if study.device == "cuda" and not _has_cuda():
            items = sum(len(job.items) for job in jobs)
            time = in_about((len(jobs), items), pace=study)
            words = f"{study.name!r} must be measured on a CUDA GPU{time}; none is here"
            raise NoGpuError(f"study {words}")
        return self.run(jobs)

    def jobs(self, study: Study) -> list[Job]:
        """The study's jobs in order; ValueError for no rounds or an overlay that none asks for."""
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"rounds must be >= 1, got {self.rounds}")
        jobs = study.jobs(headline=self.headline, rounds=self.rounds)
        releases = {job.release for job in jobs if job.release}
        for requirement in self.overlays:
            _, _, release = requirement.partition("==")
            if release not in releases:
                words = f"overlay {requirement} must be of a release in the study"
                raise ValueError(f"{words}: {sorted(releases)}")
        return jobs

    def run(self, jobs: list[Job]) -> int:
        """Measure what one study's `jobs` lack, under the GPU's `lock`; returns how many items."""
        if not jobs:
            return 0
        machine = describe(jobs[0].device)
        if not self.missing(jobs, machine):
            return 0
        with hold_gpu(machine["gpu_id"]) as held:
            # Asked again: the sweep that held the GPU until now may have measured some.
            left = self.missing(jobs, machine)
            total = sum(len(job.items) for job in left)
            releases = {job.release for job in left} - {""}
            words = " ".join([jobs[0].study, *sorted(releases)])
            bar = self.progress(total=total, unit="item", desc=words)
            watch = Watch(
                on_done=bar.update,
                stop=self.stop,
                held=(held,),
            )
            with closing(bar):
                for job in left:
                    overlay = _overlay(job, self.overlays)
                    run_job(job, machine, overlay, watch)
        return total

    def missing(self, jobs: list[Job], machine: Machine) -> list[Job]:
        """What the `jobs` of one study lack on that machine."""
        if not jobs:
            return []
        rows = store.find(jobs[0].study, machine_slug(machine))
        if self.retry:
            rows = rows[~rows.status.isin(["error", "crashed", "timeout"])]
        have = set(rows["id"])
        left = []
        for job in jobs:
            items = []
            for item in job.items:
                if job.id_of(item, machine) not in have:
                    items.append(item)
            if items:
                left.append(replace(job, items=tuple(items)))
        return left


def in_about(*sweeps: tuple[int, int], pace: Study) -> str:
    """`, in about 1 to 5 minutes`: sweeps of so many processes and records on a GPU, kernels built,
    at the pace of a study; the empty string if it is not published."""
    if pace.reference_machine not in store.machines(pace.name):
        return ""
    rows = store.load(pace.name, pace.reference_machine)
    rows = rows.sort_values("started_at", kind="stable")
    started = rows.started_at.astype("datetime64[ns, UTC]")
    gaps = started.diff().dt.total_seconds()
    process = rows[["round", "release"]]
    is_other = process != process.shift()
    starts = is_other.any(axis=1)
    # Means: times are whole seconds, and most records take less than one.
    in_one_sweep = gaps[gaps < LONGEST_GAP_S]
    means = in_one_sweep.groupby(starts).mean()
    process_s = means.get(True, 0.0)
    record_s = means[False]
    minutes = []
    for count, size in sweeps:
        seconds = count * process_s + size * record_s
        minutes.append(math.ceil(seconds / 60))
    words = " to ".join(str(each) for each in minutes)
    unit = "minutes" if minutes[-1] > 1 else "minute"
    return f", in about {words} {unit}"


@lru_cache(maxsize=2)
def describe(device: str) -> Machine:
    """This machine, described by a worker process: ours never opens a CUDA context.

    NoGpuError for a GPU where none is.
    """
    if device == "cuda" and not has_driver():
        raise NoGpuError("no CUDA GPU is here")
    command = [*WORKER, "--describe", device]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=worker_environment(),
    )
    if done.returncode:
        why = done.stderr.strip()[-800:]
        raise RuntimeError(f"the machine could not be described: {why}")
    *_, last_line = done.stdout.splitlines()
    return json.loads(last_line)


def _overlay(job: Job, given: dict[str, Path]) -> Path | None:
    compared = [item.backend for item in job.items if item.release]
    packages = {backend: compared_package(backend) for backend in compared}
    if not packages:
        return None
    unknown = [backend for backend, package in packages.items() if not package]
    if unknown:
        listed = ", ".join(COMPARED)
        got = ", ".join(sorted(unknown))
        raise ValueError(
            f"release must be empty for backends other than {listed}-*, "
            f"got {job.release!r} for {got}"
        )
    distributions = sorted({*packages.values()})
    if len(distributions) > 1:
        words = "a job must have the releases of one distribution"
        raise ValueError(f"{words}, got {distributions}")
    return overlay_for(distributions[0], job.release, given)


def _of_package(package: str, backends: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in backends if compared_package(name) == package)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None or not has_driver():
        return False
    import torch

    return torch.cuda.is_available()
