"""Arms of an engine's plugin: what its variables may say, and what this process runs. No torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..spec import require_word
from .capture import Capture

PREFIX = "ATTNLIB_SGLANG_"
ARMS = {
    "metadata": ("eager", "sglang", "fused", "one-launch"),
    "schedule": ("once", "layer"),
    "decode": ("fa2", "fa3", "planned"),
}
EVERY = "10"


@dataclass
class State:
    """Of this process: `arms` that are set, by name, and how often each one ran.

    `capture` is None while nothing is captured. `backend` is the attention backend whose step is
    being prepared, `scheduled` whether that step's schedule has been written already.
    """

    arms: dict[str, str] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    capture: Capture | None = None
    backend: Any = None
    scheduled: bool = False

    def arm(self, name: str) -> str:
        """The arm that runs now, counted; the empty string where none is set."""
        chosen = self.arms.get(name, "")
        if chosen:
            self.calls[f"{name}={chosen}"] += 1
        return chosen


STATE = State()


def read(env: Mapping[str, str]) -> State:
    """What the variables of `env` ask for; one that is empty is not set. ValueError as the module
    says, also for a capture that cannot be written."""
    known = {PREFIX + name.upper(): name for name in (*ARMS, "capture", "capture_every")}
    asked = {}
    for variable, value in env.items():
        if variable.startswith(PREFIX) and value:
            require_word("a variable", variable, known)
            asked[known[variable]] = value
    arms = {name: asked[name] for name in ARMS if name in asked}
    for name, value in arms.items():
        require_word(PREFIX + name.upper(), value, ARMS[name])
    require_together(arms)
    every, path = asked.get("capture_every", EVERY), asked.get("capture")
    if not every.isascii() or not every.isdigit() or int(every) < 1:
        raise ValueError(f"{PREFIX}CAPTURE_EVERY must be a number of steps >= 1, got {every!r}")
    if path is None:
        if "capture_every" in asked:
            raise ValueError(f"{PREFIX}CAPTURE must be a file where _EVERY is set, got none")
        return State(arms)
    try:
        return State(arms, capture=Capture(path, int(every)))
    except OSError as error:
        raise ValueError(f"{PREFIX}CAPTURE must be a file to append to, got {error}") from error


def require_together(arms: Mapping[str, str]) -> None:
    """ValueError for arms of which one leaves nothing to do for another."""
    if arms.get("metadata") == "one-launch" and arms.get("schedule") == "layer":
        raise ValueError(
            f"{PREFIX}SCHEDULE must be once where metadata is one-launch, which writes the whole "
            "step's, got 'layer'"
        )
