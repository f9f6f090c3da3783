"""Values of the plugins' environment variables, and what this process runs. No torch."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.schedule.caps import BOUNDED, UPSTREAM
from ..core.schedule.facts import MAX_NUM_SPLITS
from ..core.spec import require_word
from .capture import Capture

logger = logging.getLogger(__name__)
Arms = dict[str, str]
"""Name of an arm -> the value that is set."""


class Engine(NamedTuple):
    """An engine with a plugin: its distribution, its name, what its variables start with, and the
    values of each arm by its name."""

    package: str
    title: str
    prefix: str
    arms: Mapping[str, tuple[str, ...]]


PREFIX = "ATTNLIB_SGLANG_"
SPLITS = f"1..{MAX_NUM_SPLITS}"
"""In a table of values: any number of splits."""
OWN_CAP = "0.5.16"
"""The first SGLang whose kernels (sglang-kernel 0.4.5) cap splits by the rows of all requests."""
ARMS = {
    "metadata": ("eager", "sglang", "fused", "one-launch"),
    "schedule": ("once", "layer"),
    "splits": (UPSTREAM, BOUNDED, SPLITS),
    "decode": ("fa2", "fa3", "planned"),
    "guard": ("raise", "log"),
}
"""Name of an arm -> its values; "fa2" and "fa3" of decode are FlashInfer's kernels."""
RUNS = "attnlib runs"  # then the arm's name and value: a line of the log
SGLANG = Engine("sglang", "SGLang", PREFIX, ARMS)
VLLM_ARMS = {"decode": ("planned",), "guard": ARMS["guard"]}
VLLM = Engine("vllm", "vLLM", "ATTNLIB_VLLM_", VLLM_ARMS)


@dataclass
class State:
    """The arms that are set, by name, and how often each one ran in this process."""

    arms: Arms = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    guard: Any = None
    """FlashAttention-3's guard, where that arm is set."""
    capture: Capture | None = None
    """None while nothing is captured."""
    backend: Any = None
    """SGLang's attention backend whose step is being prepared."""
    scheduled: bool = False
    """Whether the schedule of that step is already written."""
    worker: Any = None
    """vLLM's worker whose step is not captured yet."""
    step: Any = None
    """The builder and the batch that vLLM plans for."""

    def arm(self, name: str) -> str:
        """The value that runs now, counted, the first time logged; "" where the arm is not set."""
        value = self.arms.get(name, "")
        if value:
            word = f"{name}={value}"
            if word not in self.calls:
                logger.warning("%s %s", RUNS, word)
            self.calls[word] += 1
        return value


STATE = State()


def read_variables(env: Mapping[str, str], engine: Engine) -> tuple[Arms, str]:
    """The arms that the variables of `env` set, and the file to capture to or the empty string.

    An empty variable is not set. ValueError for an unknown variable or value, or for two arms that
    exclude each other.
    """
    words = (*engine.arms, "capture")
    names = {engine.prefix + word.upper(): word for word in words}
    values = {}
    for variable, value in env.items():
        if variable.startswith(engine.prefix) and value:
            require_word("a variable", variable, names)
            name = names[variable]
            if name in engine.arms:
                require_value(variable, value, engine.arms[name])
            values[name] = value
    path = values.pop("capture", "")
    require_together(values)
    return values, path


def require_value(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError unless `value` is a word of `allowed`, or a number of splits where it has that."""
    is_word = value in allowed and value != SPLITS
    is_number = value.isdecimal() and 1 <= int(value) <= MAX_NUM_SPLITS
    if not is_word and not (is_number and SPLITS in allowed):
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def require_together(arms: Mapping[str, str]) -> None:
    """ValueError for two arms that exclude each other: one makes the other a no-op."""
    if arms.get("metadata") == "one-launch" and arms.get("schedule") == "layer":
        raise ValueError(
            f"{PREFIX}SCHEDULE must be once where metadata is one-launch, which writes the "
            "schedule of the whole step, got 'layer'"
        )
