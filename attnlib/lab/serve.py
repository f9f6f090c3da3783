"""Arms of an engine's server under a load of one's own: a verdict by rounds.

The load is a number of requests in flight with the lengths of real traffic, of a log, or as typed.
Each round starts a fresh server for each arm (`studies.serving.rounds`); records are those of the
study `served`, so a run that was stopped goes on when it is asked for again.
"""

from __future__ import annotations

import csv
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import pandas as pd

from ..core.call_text import Lens, shortened
from ..core.spec import require_int
from ..measure.stats import FASTER, LONG_MARGIN, NOT_SLOWER, SAME, SLOWER
from ..run import store
from ..run.missing import NoGpuError
from ..run.rows import machine_slug
from ..run.study import describe, mode
from ..studies import captured
from ..studies.serving.case import CACHED, ServingCase
from ..studies.serving.engine import Served, engine_named, read_arm
from ..studies.serving.models import MODELS, make_model
from ..studies.serving.rounds import PORT, Load, Plan, backend_of, drive
from ..studies.serving.served import STUDY, compared
from ..studies.serving.server import Setup, port_of
from ..studies.splits.traffic import IN_FLIGHT, TRACES, batches
from .cards import Card, Shown, in_words

CHAT = "chat"
"""Short for the traffic of a chat service."""
CHAT_TRACE = "azure-conversation"
CHAT_IN_FLIGHT = 32
OUTPUT = 256
TURNS = 3
ROUNDS = 4
NOT_DECIDED = "not decided"
PLANNED = ("decode", "planned")
"""What plans FlashInfer's decode, as a variable of an arm."""
FLASHINFER = "flashinfer"
NO_EFFECT = (
    "decode=planned changes FlashInfer's decode alone: is that the backend of these servers? "
    "Choose it with --options='--attention-backend ...'"
)
PROVED = (NOT_SLOWER, FASTER, SAME)
JUDGED = ("time per token", "ITL p50", "ITL p99")
"""What the outcome stands on."""
FORMATS = {
    "base_ms": ",.3f",
    "arm_ms": ",.3f",
    "ratio": ",.3f",
    "low": ",.3f",
    "high": ",.3f",
    "rounds": "d",
}
LOG_NAMES = {
    "prompt": ("prompt", "input_tokens", "ContextTokens", "prompt_tokens"),
    "output": ("output", "output_tokens", "GeneratedTokens", "completion_tokens"),
}
"""What a log of requests calls its columns."""


@dataclass(frozen=True, eq=False, repr=False)
class Reach(Shown):
    """What each arm does to the users of a server, beside the first one, the base."""

    base: str
    rows: pd.DataFrame
    machine: str
    not_slower: float

    def table(self) -> pd.DataFrame:
        """A row per case, arm and metric: times of both in ms, ratio with its interval, verdict."""
        return self.rows.round(4)

    @property
    def outcome(self) -> str:
        """`slower` if one row is, `not slower` if that is proved of each, else `not decided`."""
        if (self.rows.verdict == SLOWER).any():
            return SLOWER
        proved = self.rows.verdict.isin(PROVED)
        return NOT_SLOWER if len(proved) and proved.all() else NOT_DECIDED

    @property
    def conclusion(self) -> str:
        """The outcome in a line."""
        parts = []
        for row in self.rows.itertuples():
            if row.metric == JUDGED[0]:
                change = f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f})"
                parts.append(f"{row.arm} takes {change} of {self.base}'s time per token")
        changes = "; ".join(parts) or "no round is whole"
        return f"{self.outcome}: {changes}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        labels = [case.label for case in self.rows.case]
        rows = self.rows.assign(case=labels)
        return {
            "base": self.base,
            "outcome": self.outcome,
            "conclusion": self.conclusion,
            "machine": self.machine,
            "rows": json.loads(rows.to_json(orient="records")),
        }

    def card(self) -> Card:
        """The verdicts."""
        cases = [shortened(case.label) for case in self.rows.case]
        rows = self.rows.assign(case=cases).drop(columns="base")
        shown = in_words(rows, FORMATS)
        return Card(
            title=f"Servers under load, {self.base} is the base: {self.outcome}",
            notes=[
                f"All rows are judged as one table (Holm); margin {self.not_slower:.1%}.",
                "Times: of the server per token it makes, and of a user between two tokens.",
            ],
            facts=[],
            table=shown,
            caption="times in milliseconds, arm over base",
            footer=f"records of {STUDY.name} on {self.machine}",
        )


@dataclass(frozen=True)
class Asked:
    """What was asked for; `options` are those of the server, as one text."""

    model: str
    arms: Sequence[str]
    engine: str = "sglang"
    traffic: str = CHAT
    output: int = 0
    turns: int = TURNS
    loads: Sequence[int] = ()
    rounds: int = ROUNDS
    options: str = ""
    port: int = PORT
    together: bool = False
    minutes: float = 0.0


def serve(
    asked: Asked,
    *,
    not_slower: float = LONG_MARGIN,
    say: Callable[[str], object] = print,
) -> Reach:
    """Measure the arms in rounds, and judge each against the first.

    `say` gets, before anything starts, about how many minutes it takes, then a line per load.
    ValueError for what cannot be asked, RuntimeError without a CUDA GPU or for a server that fails.
    """
    engine = engine_named(asked.engine)
    with tempfile.TemporaryDirectory(prefix="attnlib-serve-") as folder:
        plan = plan_of(asked, engine, Path(folder), say)
        if mode() != "live":
            raise NoGpuError(
                f"serve must run on a CUDA GPU, where it takes {_about(plan)}; none is here"
            )
        say(_size(plan))
        machine = describe("cuda")
        drive(plan, machine)
    slug = machine_slug(machine)
    frame = store.load(STUDY.name, slug)
    return judged(plan, frame, slug, not_slower)


def announced(asked: Asked) -> str:
    """What `serve` would start and how long that takes, a line each; nothing is started."""
    engine = engine_named(asked.engine)
    with tempfile.TemporaryDirectory(prefix="attnlib-serve-") as folder:
        plan = plan_of(asked, engine, Path(folder), print)
    lines = [_size(plan)]
    if asked.model in MODELS:
        lines.append(f"model {asked.model}: a folder with random weights, made for the run")
    for number, arm in enumerate(plan.arms):
        variables = arm.environment(engine)
        words = [f"{name}={value}" for name, value in variables.items()]
        _python, *options = plan.setup.command(arm, port_of(plan.port, number))
        options[options.index(str(plan.setup.model))] = asked.model
        command = shlex.join([*words, "python", *options])
        lines.append(f"server {arm.text}: {command}")
        if PLANNED in arm.variables and FLASHINFER not in command.lower():
            lines.append(f"  {NO_EFFECT}")
    for load in plan.loads:
        case = load.case
        prompts = [request.prompt for request in case.requests()]
        loop = f"open loop at {case.load} %" if case.load else "closed loop"
        lines.append(
            f"{loop}: {case.batch_size} clients x {case.turns} requests, prompts of "
            f"{min(prompts):,} to {case.kv_len:,} tokens, {case.output_len} to make"
        )
    return "\n".join(lines)


def _about(plan: Plan) -> str:
    return f"about {ceil(plan.seconds() / 60)} minutes"


def _size(plan: Plan) -> str:
    """Rounds, arms, loads and minutes of a plan."""
    sizes = f"rounds: {plan.rounds}, arms: {len(plan.arms)}, loads: {len(plan.loads)}"
    return f"{sizes}; {_about(plan)}"


def plan_of(
    asked: Asked,
    engine: Served,
    folder: Path,
    say: Callable[[str], object],
) -> Plan:
    """The plan; model folders that are made up and logs go to `folder`."""
    arms = tuple(read_arm(text, engine) for text in asked.arms)
    if len({*arms}) < 2:
        raise ValueError(f"arm must be given twice or more (--arm), got {list(asked.arms)}")
    require_int("rounds", asked.rounds)
    model, name = _model(asked.model, folder)
    options = tuple(shlex.split(asked.options))
    loads = [Load(case, asked.rounds) for case in cases_of(asked, name)]
    until = float("inf")
    if asked.minutes:
        until = time.monotonic() + 60 * asked.minutes
    return Plan(
        study=STUDY.name,
        engine=asked.engine,
        setup=Setup(engine, model, options, folder),
        arms=arms,
        loads=tuple(loads),
        port=asked.port,
        together=asked.together,
        until=until,
        say=say,
    )


def judged(plan: Plan, frame: pd.DataFrame, machine: str, not_slower: float) -> Reach:
    """The verdicts on the plan's arms, from the records."""
    base, *others = [backend_of(plan.engine, arm) for arm in plan.arms]
    cases = [load.case for load in plan.loads]
    rows = compared(
        frame[frame.case.isin(cases)],
        [(name, base) for name in others],
        metrics=JUDGED,
        not_slower=not_slower,
    )
    return Reach(base, rows, machine, not_slower)


def _model(text: str, folder: Path) -> tuple[Path, str]:
    """The folder of a model, and what records call it: a folder, or a name with made-up weights."""
    if text in MODELS:
        return make_model(folder, text), text
    path = Path(text)
    config = path / "config.json"
    if not config.is_file():
        known = ", ".join(MODELS)
        raise ValueError(
            f"model must be a folder with config.json, or one of {known}, got {text!r}"
        )
    whole = path.resolve()
    return whole, whole.name


# ---- the load


def cases_of(asked: Asked, model: str) -> list[ServingCase]:
    """A closed loop, then an open one for each of `loads`, percent of what it serves."""
    prompts, output = lengths_of(asked.traffic)
    lens = Lens.of(prompts)
    cases = []
    for load in (0, *asked.loads):
        case = ServingCase(
            model=model,
            **lens.fields,
            output_len=asked.output or output,
            turns=asked.turns,
            prompts=CACHED,
            load=load,
        )
        cases.append(case)
    return cases


def lengths_of(traffic: str) -> tuple[Sequence[int], int]:
    """Tokens of each prompt in flight, and tokens to make.

    `chat`; TRACE:N, a decode batch of real traffic (data/traffic) with N requests; a file, .csv
    with a column of prompts and maybe of outputs, or steps.jsonl of the plugin; or lengths.
    """
    path = Path(traffic)
    if path.suffix == ".csv":
        return _of_log(path)
    if path.suffix == ".jsonl":
        return _of_steps(path), OUTPUT
    name, colon, count = traffic.partition(":")
    if traffic == CHAT:
        name, colon, count = CHAT_TRACE, ":", str(CHAT_IN_FLIGHT)
    if name in TRACES and colon:
        for batch in batches():
            if batch.trace == name and str(batch.in_flight) == count:
                return batch.tokens, OUTPUT
        sizes = ", ".join(map(str, IN_FLIGHT))
        raise ValueError(f"traffic must have {sizes} requests in flight, got {traffic!r}")
    if not traffic[:1].isdigit():
        traces = ", ".join(f"{trace}:32" for trace in TRACES)
        raise ValueError(
            f"traffic must be {CHAT}, {traces}, lengths such as 512x40+100000, or a file "
            f".csv or .jsonl, got {traffic!r}"
        )
    return Lens.read(traffic, "traffic").tokens, OUTPUT


def _of_log(path: Path) -> tuple[list[int], int]:
    """The prompts of a log of requests, and the mean of their outputs."""
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = list(csv.DictReader(lines))
    prompts = _column(path, rows, "prompt")
    if not prompts:
        names = " or ".join(LOG_NAMES["prompt"])
        raise ValueError(f"{path} must have a column of {names}")
    outputs = _column(path, rows, "output") or [OUTPUT]
    mean = sum(outputs) / len(outputs)
    return prompts, max(2, round(mean))


def _column(
    path: Path,
    rows: Sequence[dict[str, str]],
    name: str,
) -> list[int]:
    """The numbers of a column of a log, by any of its names; none if it has no such column."""
    columns = rows[0] if rows else {}
    named = [known for known in LOG_NAMES[name] if known in columns]
    if not named:
        return []
    column = named[0]
    tokens = []
    for row in rows:
        text = row[column]
        count = int(text) if str(text).isdecimal() else 0
        if count < 1:
            raise ValueError(f"{column} of {path} must be tokens above 0, got {text!r}")
        tokens.append(count)
    return tokens


def _of_steps(path: Path) -> Sequence[int]:
    """The lengths of the largest decode step that the plugin wrote down."""
    study, _ = captured.study_of(path)
    cases = study.grids[0].cases
    if not cases:
        raise ValueError(f"{path} must hold a decode step, it has none")
    largest: Any = max(cases, key=lambda case: getattr(case, "batch_size", 0))
    lens = Lens(largest.batch_size, largest.kv_len, largest.lengths)
    return lens.tokens
