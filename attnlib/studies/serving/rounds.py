"""Arms of a server in turns: a fresh server for each arm in each round, A B B A, records kept.

What is on record is not measured again, so a run that was stopped goes on where it was. Where
`together` is set, the servers of a round are started at once and stay up side by side; they take
turns at each case, and while one is loaded the others idle. That halves the time that starts take,
and plans of several models may share it (`drive_all`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from ...core.backends.table import RECORDED
from ...measure.calls.form import Item
from ...measure.machine import describe_versions
from ...run import store
from ...run.lock import hold_gpu
from ...run.rows import machine_slug, record_id, row_of
from ...run.schema import now
from .case import CACHED, ServingCase
from .engine import Arm, ServerError
from .gpu import Memory
from .measure import TIMER, OutOfTimeError, measure
from .server import START_S, Server, Setup, hold_ports

FIRST_START_S = 125.0
LATER_START_S = 70.0
"""What a start of SGLang 0.5.23 took on an H100: the first one compiles kernels."""
PREFILL_PER_S = 25_000
TOKEN_S = 0.01
CASE_S = 3.0
"""Rough rates of one GPU, to say beforehand how long a run takes."""
PORT = 30_000


@dataclass(frozen=True)
class Load:
    """A case, and the rounds in which it is measured: the first so many."""

    case: ServingCase
    rounds: int


@dataclass(frozen=True)
class Plan:
    """What to run: `engine` is its name; the first of `arms` is the base.

    `until` is the second of `time.monotonic` after which nothing more is measured.
    """

    study: str
    engine: str
    setup: Setup
    arms: tuple[Arm, ...]
    loads: tuple[Load, ...]
    port: int = PORT
    together: bool = False
    until: float = float("inf")
    start_s: float = START_S
    say: Callable[[str], object] = print

    @property
    def rounds(self) -> int:
        """The most rounds of a load."""
        return max(load.rounds for load in self.loads)

    def item(self, arm: Arm, case: ServingCase) -> Item[ServingCase]:
        """What a record of this arm is called by."""
        return Item(backend_of(self.engine, arm), TIMER, case)

    def command(self, case: ServingCase) -> str:
        """What measures a case again."""
        words = ["python", "-m", "attnlib", "serve"]
        words += ["--engine", self.engine, "--model", case.model]
        for arm in self.arms:
            words += ["--arm", arm.text]
        words += ["--traffic", str(case.said.lens)]
        words += ["--output", str(case.output_len)]
        words += ["--turns", str(case.turns)]
        if case.load:
            words += ["--open", str(case.load)]
        if self.setup.options:
            words.append(f"--options={shlex.join(self.setup.options)}")
        if self.together:
            words.append("--together")
        return shlex.join(words)

    def seconds(self) -> float:
        """About how long it takes, kernels not yet built."""
        arms = len(self.arms)
        starts = self.rounds if self.together else self.rounds * arms
        total = FIRST_START_S - LATER_START_S + starts * LATER_START_S
        for load in self.loads:
            total += load.rounds * arms * _case_s(load.case)
        return total


def backend_of(engine: str, arm: Arm) -> str:
    """What records call an arm: `sglang`, `sglang splits=bounded`."""
    is_plain = not arm.variables and not arm.options
    return engine if is_plain else f"{engine} {arm.text}"


def _case_s(case: ServingCase) -> float:
    prompts = 0
    for request in case.requests():
        if request.turn == 0:
            prompts += request.prompt
    if case.prompts != CACHED:
        prompts *= case.turns
    prefill_s = prompts / PREFILL_PER_S
    decode_s = case.turns * case.output_len * TOKEN_S
    return CASE_S + case.late_s + prefill_s + decode_s


def drive(plan: Plan, machine: dict[str, Any]) -> int:
    """Measure what is not on record of the plan on this machine; how many records were kept.

    Raises ServerError for a server that fails, RuntimeError for a GPU or port that is taken. What
    was kept stays. It ends before its time where `until` leaves too little for another server.
    """
    return drive_all([plan], machine)


def drive_all(plans: Sequence[Plan], machine: dict[str, Any]) -> int:
    """`drive` for plans of several models: the servers of a round are all up side by side.

    Of several plans each must be `together`, with ports of its own. One whose server fails is left
    out from then on; the others go on, and its error is raised in the end.
    """
    if len(plans) > 1 and not all(plan.together for plan in plans):
        raise ValueError("plans must each be together where there are several")
    with ExitStack() as held:
        held.enter_context(hold_gpu(machine["gpu_id"]))
        runs = []
        for plan in plans:
            ports = held.enter_context(hold_ports(plan.port, len(plan.arms)))
            runs.append(_Run(plan, machine, ports))
        for number in range(max(plan.rounds for plan in plans)):
            if not _round(runs, number):
                kept = sum(run.kept for run in runs)
                plans[0].say(f"time is up in round {number}: {kept} records were kept")
                break
    for run in runs:
        if run.failed is not None:
            raise run.failed
    return sum(run.kept for run in runs)


def _round(runs: Sequence[_Run], number: int) -> bool:
    """Measure a round; whether there was time for all of it."""
    groups = [run.groups(number) for run in runs]
    for turns in zip_longest(*groups, fillvalue=[]):
        with ExitStack() as started:
            for run, group in zip(runs, turns, strict=True):
                if not run.start(number, group, started):
                    return False
            for run in runs:
                if not run.wait(number):
                    return False
            for run in runs:
                if not run.load(number):
                    return False
    return True


class _Run:
    """A plan on its way."""

    def __init__(self, plan: Plan, machine: dict[str, Any], ports: Sequence[int]) -> None:
        self.plan = plan
        self.machine = machine
        self.ports = ports
        self.versions = describe_versions(RECORDED)
        self.memory = Memory(machine["gpu_id"])
        self.kept = 0
        self.failed: ServerError | None = None
        self._servers: list[Server] = []
        self._start_s = 0.0

    def groups(self, number: int) -> list[list[tuple[Arm, int]]]:
        """The arms of a round that lack a record, with their ports; those of a group start at
        once."""
        turns = []
        for arm, port in zip(self.plan.arms, self.ports, strict=True):
            if self.missing(number, arm):
                turns.append((arm, port))
        if number % 2:
            turns.reverse()
        if self.plan.together:
            return [turns]
        return [[turn] for turn in turns]

    def missing(self, number: int, arm: Arm) -> list[ServingCase]:
        """The cases of an arm that have no record of that round."""
        rows = store.find(self.plan.study, machine_slug(self.machine))
        have = set(rows["id"])
        found = []
        for load in self.plan.loads:
            name = record_id(
                self.plan.study,
                number,
                self.plan.item(arm, load.case),
                self.machine["gpu_id"],
            )
            if number < load.rounds and name not in have:
                found.append(load.case)
        return found

    def start(self, number: int, group: Sequence[tuple[Arm, int]], started: ExitStack) -> bool:
        """Start the servers of a group, which `started` ends; whether there is time for it."""
        plan = self.plan
        self._servers = []
        if not group or self.failed is not None:
            return True
        if time.monotonic() + self._start_s > plan.until:
            return False
        for arm, port in group:
            place = plan.arms.index(arm)
            server = Server(plan.setup, arm, port, f"{plan.engine}-{number}-{place}")
            started.callback(server.stop)
            self._servers.append(server)
        return True

    def wait(self, number: int) -> bool:
        """Wait until they are ready; whether there was time for it."""
        plan = self.plan
        for server in self._servers:
            left_s = plan.until - time.monotonic()
            try:
                self._start_s = server.wait(min(plan.start_s, left_s))
            except ServerError as error:
                if time.monotonic() >= plan.until:
                    return False
                self._fail(error)
                return True
            plan.say(f"round {number}: {server.arm.text} ready in {self._start_s:.0f} s")
        return True

    def load(self, number: int) -> bool:
        """One load after the other; whether there was time for all."""
        for load in self.plan.loads:  # the servers take turns at each case
            for server in self._servers:
                if load.case not in self.missing(number, server.arm):
                    continue
                try:
                    is_kept = self.case(number, server, load.case)
                except ServerError as error:
                    self._fail(error)
                    return True
                if not is_kept:
                    return False
        return True

    def _fail(self, error: ServerError) -> None:
        self.failed = error
        for server in self._servers:
            server.stop()
        self._servers = []

    def case(self, number: int, server: Server, case: ServingCase) -> bool:
        """Keep the record of a case; whether there was time for it."""
        plan = self.plan
        before = self.memory.state()
        started_at = now()
        try:
            fields = measure(
                server,
                case,
                self.memory,
                rate=self.rate(case),
                until=plan.until,
            )
        except OutOfTimeError:
            return False
        row = row_of(
            plan.item(server.arm, case),
            self.machine,
            study=plan.study,
            round=number,
            versions=self.versions,
            command=plan.command(case),
            started_at=started_at,
            state_before=before,
            state_after=self.memory.state(),
            **fields,
        )
        store.keep(row)
        self.kept += 1
        served = fields["served"]
        plan.say(
            f"round {number}: {server.arm.text}: {served['tokens_per_s']:,.0f} tokens/s, "
            f"ITL p50 {served['itl_p50_us'] / 1e3:.2f} ms, p99 {served['itl_p99_us'] / 1e3:.2f} ms"
            f"; {case.label[:90]}"
        )
        return True

    def rate(self, case: ServingCase) -> float:
        """Requests a second of an open loop, from what the base's closed loop has served."""
        if not case.is_open:
            return 0.0
        closed = replace(case, load=0)
        rows = store.find(self.plan.study, machine_slug(self.machine))
        base = backend_of(self.plan.engine, self.plan.arms[0])
        of_base = rows[rows.backend == base]
        mine = of_base[of_base.case == closed]
        if mine.empty:
            raise ValueError(f"load={case.load} must come after the same load in a closed loop")
        first = mine.sort_values("round").iloc[0]
        outputs = [request.output for request in case.requests()]
        mean = sum(outputs) / len(outputs)
        served_per_s = float(first.tokens_per_s) / mean
        return served_per_s * case.load / 100
