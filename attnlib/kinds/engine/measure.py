"""Decode steps inside SGLang, by the arms of attnlib's plugin (`case` lists them), or transformers.

An engine runs in a process group of its own (`group`, `serve`) and stays for all items that it can
serve, so order a study's items by arm. Arms that take turns are measured together at the first of
them, and the others' records come from the same steps: position by position samples "in turns" are
neighbours. The timer `host` is of whole steps, `profiler` of a step's kernels; a process that was
traced gives way to a new one before it would be timed.

SGLang may need other packages than transformers' continuous batching: ATTNLIB_TRANSFORMERS_PYTHON
names the Python for the latter.
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
from ...core.engines.arms import PREFIX
from ...core.engines.sglang import TRIED, require_release
from ...core.spec import require_word
from ...measure.trace import kernel_family
from ..base import Bench, Subject, oracle_fields
from ..check import OracleCheck
from ..item import Item
from ..lengths import sample_seq_lens
from .case import ARMS, EXACT, IN_TURNS, START, EngineCase
from .group import EngineEndedError, EngineGroup
from .model import write_model

TIMERS = ("host", "profiler")
COMMAND = (sys.executable, "-m", "attnlib.kinds.engine")
START_S, CASE_S = 300.0, 200.0
"""Time to start and to answer for a case; the first on a machine compiles for 80 s."""
BUDGET = 0.05
"""Relative error of a request's logits that bfloat16 may leave after all layers, of each kernel."""


@dataclass(frozen=True)
class Setup:
    """What a process of an engine is started for."""

    model: str
    driver: str
    tp: int
    dp: int
    backend: str

    @property
    def environment(self) -> dict[str, str]:
        """Ours, less other arms, with this one's variables."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        attention, variable, value = ARMS[self.backend]
        arms = (START[attention] if self.driver == "steps" else {}) | {variable: value}
        return kept | {f"{PREFIX}{name.upper()}": word for name, word in arms.items()}

    @property
    def command(self) -> tuple[str, ...]:
        """What serves, by its own Python."""
        own = os.environ.get("ATTNLIB_TRANSFORMERS_PYTHON") if self.driver == "batching" else None
        return (own or COMMAND[0], *COMMAND[1:])


class EngineSubject(Subject):
    """Measures items of engines; holds at most one of them at a time."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._engine: EngineGroup | None = None
        self._setup: Setup | None = None
        self._traced = False
        self._broken: dict[Setup, EngineEndedError] = {}
        self._asked: tuple[object, ...] = ()
        self._answer: dict[str, Any] = {}

    def measure(self, item: Item[EngineCase]) -> dict[str, Any]:
        """The record's fields; an engine that ends or hangs costs this item alone."""
        require_word("backend", item.backend, ARMS)
        require_word("timer", item.timer, TIMERS)
        driver = item.case.driver
        if driver != "steps" and item.timer != "host":
            raise ValueError(f"timer must be host for the driver {driver}, got {item.timer!r}")
        if (driver == "batching") != (ARMS[item.backend][0] == "transformers"):
            raise ValueError(f"backend must be one of the driver {driver}, got {item.backend!r}")
        if reason := self._refused(item.case):
            return {"status": "refused", "reason": reason}
        try:
            answer = self._answered(item)
        except EngineEndedError as error:
            self._close()
            return {"status": error.status, "reason": str(error)}
        if "refused" in answer:
            return {"status": "refused", "reason": answer["refused"]}
        return _fields(item, answer)

    def _refused(self, case: EngineCase) -> str:
        """Why this machine cannot run the case, or the empty string."""
        if self.bench.device != "cuda":
            return "an engine needs a CUDA GPU"
        if case.tp > (count := torch.cuda.device_count()):
            return f"tp {case.tp} needs as many GPUs, here is {count}"
        try:
            if case.driver != "batching":  # which looks at its own Python's packages
                require_release(f"pip install sglang=={TRIED[-1]}")
        except RuntimeError as error:
            return str(error)
        return ""

    def _answered(self, item: Item[EngineCase]) -> dict[str, Any]:
        case, trace = item.case, item.timer == "profiler"
        arms = case.in_turns(item.backend)
        setup = Setup(case.model, case.driver, case.tp, case.dp, arms[0])
        asked = (setup, case, item.timer)
        if asked != self._asked:
            engine = self._started(setup, timed=not trace)
            self._traced |= trace
            self._asked = ()
            told = {"lens": sample_seq_lens(case).tolist(), "steps": case.output_len}
            words = {arm: dict([ARMS[arm][1:]]) for arm in arms}
            engine.tell(told | {"arms": words, "trace": trace})
            self._answer, self._asked = engine.answer(CASE_S), asked
        return self._answer

    def _started(self, setup: Setup, *, timed: bool) -> EngineGroup:
        """The engine for `setup`; one that did not start is not started again."""
        if self._engine and self._setup == setup and not (timed and self._traced):
            return self._engine
        self._close()
        if setup in self._broken:
            raise self._broken[setup]
        self._folder = tempfile.TemporaryDirectory()
        write_model(folder := Path(self._folder.name), setup.model)
        path = folder / "setup.json"
        told = asdict(setup) | {"attention": ARMS[setup.backend][0], "model": str(folder)}
        path.write_text(json.dumps(told))
        self._engine = EngineGroup((*setup.command, str(path)), setup.environment)
        self._setup, self._traced = setup, False
        try:
            self._engine.answer(START_S)
        except EngineEndedError as error:
            self._broken[setup] = error
            raise
        return self._engine

    def _close(self) -> None:
        if self._engine:
            self._engine.close()
            self._folder.cleanup()
        self._engine, self._asked = None, ()


def _fields(item: Item[EngineCase], answer: dict[str, Any]) -> dict[str, Any]:
    steps, mean = (item.case.driver == name for name in ("steps", "offline"))
    arms, (_, variable, value) = answer["arms"], ARMS[item.backend]
    found, word = arms[item.backend], f"{variable}={value}"
    if not mean and not answer["calls"].get(word):
        raise RuntimeError(f"the plugin must have run {word}, it counted {answer['calls']}")
    verdict = OracleCheck(found["error"], BUDGET if steps else 0.0, item.case.batch_size)
    said = [word, *answer.get("said", ()), f"outputs {found['digest']}"]
    if steps and len(arms) > 1:
        said.insert(1, IN_TURNS)
    seen = {"reported_backend": ", ".join(said), **oracle_fields(verdict)}
    if not verdict.passed:
        return seen
    other = EXACT.get(item.backend, item.backend)
    if found["digest"] != (wanted := arms.get(other, found)["digest"]):
        reason = f"outputs must be those of {other} bit by bit, {wanted}, got {found['digest']}"
        return {"status": "incorrect", "reason": reason, **seen}
    kernels = tuple(found.get("kernels", ()))
    return {
        "status": "ok",
        "run_us": tuple(found["run_us"]),
        "calls_per_sample": item.case.output_len if mean else 1,
        "kernels": kernels,
        "kernel_family": kernel_family([each["name"] for each in kernels], family_of),
        **seen,
    }
