"""Decode steps inside SGLang, by the arms of attnlib's plugin (`case` lists them).

An engine runs in a process group of its own (`group`, `serve`) and stays for all items that it can
serve, so order a study's items by arm. Arms that take turns are measured together when the first of
them is asked for, and the records of the others come from the same steps: samples at the same
position are neighbours in time. A process that was traced is replaced before the next timed case.
The timer `host` is of whole steps, `profiler` of the kernels of one step, and `ahead` of the GPU
from step to step while the host runs ahead of it, as under SGLang's own scheduler (driver `steps`).
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.backends.table import family_of
from ...core.spec import require_word
from ...engines.arms import PREFIX, RUNS, SGLANG
from ...engines.points import require_release
from ...engines.sglang import NEWEST, OLDEST
from ...measure.trace import kernel_family
from ..base import Bench, Subject, oracle_fields
from ..check import OracleCheck
from ..item import Item
from ..lengths import sample_seq_lens
from .case import ARMS, EXACT, IN_TURNS, START, EngineCase
from .group import EngineEndedError, EngineGroup
from .model import write_model

TIMERS = ("host", "ahead", "profiler")
COMMAND = (sys.executable, "-m", "attnlib.kinds.engine.serve")
START_S = 300.0
CASE_S = 200.0
"""Time limits of a start and of one case; the first start on a machine compiles for 80 s."""
BUDGET = 0.05
"""Relative error of a request's logits that bfloat16 may cause over all layers."""


@dataclass(frozen=True)
class Setup:
    """What the process of an engine is started for."""

    model: str
    driver: str
    tp: int
    dp: int
    context: int
    backend: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment of this process with no other variables of the plugin than the arm's."""
        arm = ARMS[self.backend]
        values = dict(START[arm.attention]) if self.driver == "steps" else {}
        values[arm.variable] = arm.value
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        return kept | {PREFIX + name.upper(): value for name, value in values.items()}


class EngineSubject(Subject):
    """Measures items of engines; holds at most one engine at a time."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._engine: EngineGroup | None = None
        self._setup: Setup | None = None
        self._traced = False
        self._not_started: dict[Setup, EngineEndedError] = {}
        self._asked: tuple[Setup, EngineCase] | None = None
        self._answers: dict[str, dict[str, Any]] = {}

    def measure(self, item: Item[EngineCase]) -> dict[str, Any]:
        """The record's fields; an engine that ends or hangs costs this item alone."""
        require_word("backend", item.backend, ARMS)
        require_word("timer", item.timer, TIMERS)
        if item.case.driver != "steps" and item.timer != "host":
            raise ValueError(
                f"timer must be host for the driver {item.case.driver}, got {item.timer!r}"
            )
        if reason := self._refusal(item.case):
            return {"status": "refused", "reason": reason}
        self.bench.require_release(SGLANG.package, item.release)
        try:
            answer = self._measure_all_arms(item)
        except EngineEndedError as error:
            self._close()
            return {"status": error.status, "reason": str(error)}
        if "refused" in answer:
            return {"status": "refused", "reason": answer["refused"]}
        self._require_arm(item, answer["calls"])
        return _fields(item, answer)

    def _require_arm(self, item: Item[EngineCase], calls: dict[str, int]) -> None:
        """RuntimeError unless the plugin ran the item's arm; an arm that checks has no count."""
        assert self._engine
        arm = ARMS[item.backend]
        word = f"{arm.variable}={arm.value}"
        ran = calls.get(word, 0) > 0
        if item.case.driver == "offline":  # its scheduler, another process, has only a log
            ran = f"{RUNS} {word}" in self._engine.log()
        if not ran and arm.variable != "guard":
            raise RuntimeError(f"the plugin must have run {word}, it counted {calls}")

    def _refusal(self, case: EngineCase) -> str:
        """Why this machine cannot run the case, or the empty string."""
        if self.bench.device != "cuda":
            return "an engine needs a CUDA GPU"
        gpus = torch.cuda.device_count()
        if case.tp > gpus:
            return f"tp {case.tp} needs as many GPUs, here is {gpus}"
        try:
            require_release(SGLANG, OLDEST, f"pip install sglang=={NEWEST}")
        except RuntimeError as error:
            return str(error)
        return ""

    def _measure_all_arms(self, item: Item[EngineCase]) -> dict[str, Any]:
        """Measure every arm that takes turns with the item's; a second item reads the answer.

        Answers of a setup and case are kept by timer: items of a grid alternate between timers.
        """
        case, is_traced = item.case, item.timer == "profiler"
        arms = case.in_turns(item.backend)
        setup = Setup(case.model, case.driver, case.tp, case.dp, case.context, arms[0])
        if self._asked != (setup, case):
            self._asked = (setup, case)
            self._answers.clear()
        if item.timer not in self._answers:
            engine = self._started(setup, timed=not is_traced)
            self._traced |= is_traced
            engine.send(
                {
                    "lens": sample_seq_lens(case).tolist(),
                    "steps": case.output_len,
                    "arms": {arm: {ARMS[arm].variable: ARMS[arm].value} for arm in arms},
                    "timer": item.timer,
                }
            )
            self._answers[item.timer] = engine.answer(CASE_S)
        return self._answers[item.timer]

    def _started(self, setup: Setup, *, timed: bool) -> EngineGroup:
        """The engine for `setup`; one that failed to start is not started again."""
        if self._engine and self._setup == setup and not (timed and self._traced):
            return self._engine
        self._close()
        if setup in self._not_started:
            raise self._not_started[setup]
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        write_model(folder, setup.model)
        attention = ARMS[setup.backend].attention
        path = folder / "setup.json"
        path.write_text(json.dumps(asdict(setup) | {"attention": attention, "model": str(folder)}))
        self._engine = EngineGroup((*COMMAND, str(path)), setup.environment)
        self._setup, self._traced = setup, False
        try:
            self._engine.answer(START_S)
        except EngineEndedError as error:
            self._not_started[setup] = error
            raise
        return self._engine

    def _close(self) -> None:
        if self._engine:
            self._engine.close()
            self._folder.cleanup()
        self._engine = None
        self._answers.clear()


def _fields(item: Item[EngineCase], answer: dict[str, Any]) -> dict[str, Any]:
    """A record's fields from the answer about all arms."""
    synchronous = item.case.driver == "steps"
    arm, answers = ARMS[item.backend], answer["arms"]
    word, result = f"{arm.variable}={arm.value}", answers[item.backend]
    turns = [IN_TURNS] if synchronous and len(answers) > 1 else []
    reported = ", ".join([word, *turns, f"outputs {result['digest']}"])
    check = OracleCheck(result["error"], BUDGET if synchronous else 0.0, item.case.batch_size)
    fields = {"reported_backend": reported, **oracle_fields(check)}
    if not check.passed:
        return fields
    twin = EXACT.get(item.backend, "")
    if twin in answers and answers[twin]["digest"] != result["digest"]:
        reason = (
            f"outputs must be those of {twin} bit by bit, {answers[twin]['digest']}, got "
            f"{result['digest']}"
        )
        return {"status": "incorrect", "reason": reason, **fields}
    if not result["run_us"]:
        return {"status": "refused", "reason": "the host must run ahead of the GPU", **fields}
    kernels = tuple(result.get("kernels", ()))
    return {
        "status": "ok",
        "run_us": tuple(result["run_us"]),
        "calls_per_sample": 1 if synchronous else item.case.output_len,
        "kernels": kernels,
        "kernel_family": kernel_family([kernel["name"] for kernel in kernels], family_of),
        **fields,
    }
