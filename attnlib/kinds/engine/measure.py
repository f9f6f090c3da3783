"""Decode steps inside SGLang, by the arms of attnlib's plugin (`case` lists them).

An engine runs in a process group of its own (`group`, `serve`) and stays for all items that it can
serve, so order a study's items by arm. Arms that can switch step by step are measured together at
the first of them, and the others' records come from the same steps: position by position their
samples are neighbours. The timer `host` is of whole steps, `profiler` of a step's kernels; a
process that was traced gives way to a new one before it would be timed.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.backends.table import FAMILY_OF
from ...core.engines.arms import PREFIX
from ...core.engines.sglang import TRIED, require_release
from ...core.spec import require_word
from ...measure.trace import kernel_family
from ..base import Bench
from ..item import Item
from ..lengths import sample_seq_lens
from .case import ARMS, EXACT, REFERENCE, SIDE_BY_SIDE, EngineCase
from .group import EngineEndedError, EngineGroup
from .model import write_model

TIMERS = ("host", "profiler")
COMMAND = (sys.executable, "-m", "attnlib.kinds.engine.serve")
START_S, CASE_S = 300.0, 150.0
"""Time to start, of which the first on a machine compiles for 80 s, and to answer for a case."""
BUDGET = 0.05
"""Relative error of a request's logits that bfloat16 may leave after all layers, of each kernel."""


@dataclass(frozen=True)
class Setup:
    """What a process of an engine is started for."""

    model: str
    driver: str
    tp: int
    backend: str

    @property
    def environment(self) -> dict[str, str]:
        """Ours, less other arms, with this one's variable."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        _, variable, value = ARMS[self.backend]
        return kept | {f"{PREFIX}{variable.upper()}": value}


class EngineSubject:
    """Measures items of engines; holds at most one of them at a time."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
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
        if item.case.driver == "offline" and item.timer != "host":
            raise ValueError(f"timer must be host for the driver offline, got {item.timer!r}")
        try:
            require_release(f"pip install sglang=={TRIED[-1]}")
        except RuntimeError as error:
            return {"status": "refused", "reason": str(error)}
        if self.bench.device != "cuda":
            return {"status": "refused", "reason": "an engine needs a CUDA GPU"}
        try:
            answer = self._answered(item)
        except EngineEndedError as error:
            self._close()
            return {"status": error.status, "reason": str(error)}
        if "refused" in answer:
            return {"status": "refused", "reason": answer["refused"]}
        return _fields(item, answer)

    def _answered(self, item: Item[EngineCase]) -> dict[str, Any]:
        case, trace = item.case, item.timer == "profiler"
        beside = item.backend in SIDE_BY_SIDE and case.driver == "steps"
        arms = SIDE_BY_SIDE if beside else (item.backend,)
        setup = Setup(case.model, case.driver, case.tp, REFERENCE if beside else item.backend)
        asked = (setup, case, item.timer)
        if asked != self._asked:
            engine = self._started(setup, timed=not trace)
            self._traced |= trace
            self._asked = ()
            names = {ARMS[arm][2]: arm for arm in arms}
            told = {"lens": sample_seq_lens(case).tolist(), "arms": list(names)}
            engine.tell(told | {"steps": case.output_len, "trace": trace})
            answer = engine.answer(CASE_S)
            found = {names[value]: each for value, each in answer.get("arms", {}).items()}
            self._answer, self._asked = answer | {"arms": found}, asked
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
        told = {"driver": setup.driver, "tp": setup.tp, "attention": ARMS[setup.backend][0]}
        path.write_text(json.dumps(told | {"model": str(folder)}))
        self._engine = EngineGroup((*COMMAND, str(path)), setup.environment)
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
    steps = item.case.driver == "steps"
    found, (_, variable, value) = answer["arms"][item.backend], ARMS[item.backend]
    word = f"{variable}={value}"
    if steps and not answer["calls"].get(word):
        raise RuntimeError(f"the plugin must have run {word}, it counted {answer['calls']}")
    budget = BUDGET if steps else 0.0
    seen = {
        "reported_backend": f"{word}, outputs {found['digest']}",
        "oracle_error": found["error"] if found["error"] != float("inf") else None,
        "oracle_budget": budget,
        "oracle_rows": item.case.batch_size,
    }
    wanted = answer["arms"].get(REFERENCE, found)["digest"]
    if not found["error"] <= budget:
        reason = f"error {found['error']:.3g} over budget {budget:g}"
        return {"status": "incorrect", "reason": reason, **seen}
    if item.backend in EXACT and found["digest"] != wanted:
        reason = f"outputs must be those of {REFERENCE} bit by bit, {wanted}, got {found['digest']}"
        return {"status": "incorrect", "reason": reason, **seen}
    kernels = tuple(found.get("kernels", ()))
    return {
        "status": "ok",
        "run_us": tuple(found["run_us"]),
        "calls_per_sample": 1 if steps else item.case.output_len,
        "kernels": kernels,
        "kernel_family": kernel_family([each["name"] for each in kernels], FAMILY_OF),
        **seen,
    }
