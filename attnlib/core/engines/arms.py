"""Arms of an engine's plugin: what its variables may say, what this process runs. No torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..backends.table import installed_version
from ..spec import require_word
from .capture import Capture

PREFIX = "ATTNLIB_SGLANG_"
ARMS = {
    "metadata": ("eager", "sglang", "fused", "one-launch"),
    "schedule": ("once", "layer"),
    "decode": ("fa2", "fa3", "planned"),
    "guard": ("raise", "log"),
}


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


def require_tried(distribution: str, tried: tuple[str, ...], remedy: str) -> None:
    """RuntimeError with `remedy` unless the release of an engine that is installed was tried."""
    if (found := installed_version(distribution)) not in tried:
        raise RuntimeError(
            f"{distribution} must be a release that was tried ({', '.join(tried)}), got "
            f"{found or 'none'}: {remedy}"
        )


def read(env: Mapping[str, str]) -> State:
    """What the variables of `env` ask for; one that is empty is not set.

    ValueError for a variable, a value or two arms that cannot be, or a file that cannot be written.
    """
    known = {PREFIX + name.upper(): name for name in (*ARMS, "capture")}
    asked = {}
    for variable, value in env.items():
        if variable.startswith(PREFIX) and value:
            require_word("a variable", variable, known)
            name = known[variable]
            if name in ARMS:
                require_word(variable, value, ARMS[name])
            asked[name] = value
    path = asked.pop("capture", "")
    require_together(asked)
    try:
        return State(asked, capture=Capture(path) if path else None)
    except OSError as error:
        raise ValueError(f"{PREFIX}CAPTURE must be a file to append to, got {error}") from error


def require_together(arms: Mapping[str, str]) -> None:
    """ValueError for arms of which one leaves nothing to do for another."""
    if arms.get("metadata") == "one-launch" and arms.get("schedule") == "layer":
        raise ValueError(
            f"{PREFIX}SCHEDULE must be once where metadata is one-launch, which writes the whole "
            "step's, got 'layer'"
        )
