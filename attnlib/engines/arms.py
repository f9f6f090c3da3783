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
ONE_LAUNCH = "one-launch"
"""The value of the arm that writes all schedules of a step with its metadata."""


class Arm(NamedTuple):
    """An arm of SGLang's plugin: its values, and the attention backends that it is for, in
    SGLang's words."""

    values: tuple[str, ...]
    backends: tuple[str, ...]


SGLANG_ARMS = {
    "metadata": Arm(("eager", "sglang", "fused", ONE_LAUNCH), backends=("fa3",)),
    "schedule": Arm(("once", "layer"), backends=("fa3",)),
    "splits": Arm((UPSTREAM, BOUNDED, SPLITS), backends=("fa3",)),
    "decode": Arm(("fa2", "fa3", "planned"), backends=("flashinfer",)),
    "guard": Arm(("raise", "log"), backends=("fa3", "flashinfer")),
}
ARMS = {name: arm.values for name, arm in SGLANG_ARMS.items()}
"""Name of an arm -> its values; "fa2" and "fa3" of decode are FlashInfer's kernels."""
RUNS = "attnlib runs"  # then the arm's name and value: a line of the log
SGLANG = Engine("sglang", "SGLang", PREFIX, ARMS)
VLLM_ARMS = {"decode": ("planned",), "guard": ARMS["guard"]}
VLLM = Engine("vllm", "vLLM", "ATTNLIB_VLLM_", VLLM_ARMS)


class Pool(NamedTuple):
    """KV slots of SGLang's pools, the padding slots too: of all layers with full attention, and of
    those with a window, which see `window` tokens; 0 where there are none."""

    slots: int
    window_slots: int
    window: int


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
    graphs: Any = None
    """SGLang's metadata of that step's graphs, by requests, where its schedules may be ours."""
    words: Any = None
    """The schedule that FlashAttention-3's calls of a layer read."""
    worker: Any = None
    """vLLM's worker whose step is not captured yet."""
    pool: Pool | None = None
    """SGLang's pools; None before its first step."""
    step: Any = None
    """The builder and the batch that vLLM plans for."""
    judged: Counter[str] = field(default_factory=Counter)
    """How often each arm had run when SGLang's last decode step ended."""
    said: set[str] = field(default_factory=set)
    """What was said in the log and is said once."""

    def ran(self, name: str) -> None:
        """Count that an arm, if it is set, has run; log it the first time."""
        if name in self.arms:
            word = f"{name}={self.arms[name]}"
            self.say(f"{RUNS} {word}")
            self.calls[word] += 1

    def leave(self, name: str, reason: str) -> None:
        """Count what an arm, or the capture, leaves as it is; log it the first time."""
        value = f"={self.arms[name]}" if name in self.arms else ""
        self.say(f"attnlib: {name}{value} leaves out: {reason}")
        self.calls[f"{name}: {reason}"] += 1

    def say(self, message: str) -> None:
        """Log a message once in this process."""
        if message not in self.said:
            self.said.add(message)
            logger.warning("%s", message)


STATE = State()


def read_variables(env: Mapping[str, str], engine: Engine) -> tuple[Arms, str]:
    """The arms that the variables of `env` set, and the file to capture to or the empty string.

    An empty variable is not set. ValueError for an unknown variable or value, for a variable that
    is misspelt, in lower case too, or for two arms that exclude each other.
    """
    words = (*engine.arms, "capture")
    names = {engine.prefix + word.upper(): word for word in words}
    values = {}
    for variable, value in env.items():
        if variable.upper().startswith(engine.prefix.rstrip("_")):
            require_word("a variable", variable, names)
        if variable in names and value:
            name = names[variable]
            if name in engine.arms:
                require_value(variable, value, engine.arms[name])
            values[name] = value
    path = values.pop("capture", "")
    require_together(values)
    return values, path


def without_effect(env: Mapping[str, str], engine: Engine) -> list[str]:
    """What is set in `env` and does nothing in this engine: a sentence for each variable."""
    said = []
    for name, value in env.items():
        if name.startswith(engine.prefix) and not value:
            said.append(f"{name} is empty, which does nothing")
        for other in (SGLANG, VLLM):
            if other is not engine and name.startswith(other.prefix):
                said.append(f"{name} is for {other.title} and does nothing in {engine.title}")
    return said


def require_value(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError unless `value` is a word of `allowed`, or a number of splits where it has that."""
    is_word = value in allowed and value != SPLITS
    is_number = value.isdecimal() and 1 <= int(value) <= MAX_NUM_SPLITS
    if not is_word and not (is_number and SPLITS in allowed):
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def require_together(arms: Mapping[str, str]) -> None:
    """ValueError for two arms that exclude each other: one makes the other a no-op."""
    if arms.get("metadata") == ONE_LAUNCH and arms.get("schedule") == "layer":
        raise ValueError(
            f"{PREFIX}SCHEDULE must be once where metadata is one-launch, which writes the "
            "schedule of the whole step, got 'layer'"
        )
