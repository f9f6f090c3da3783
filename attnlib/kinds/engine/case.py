"""A model's decode steps inside SGLang, as a case. No torch here.

| driver | a step is |
|---|---|
| steps | one of `bench_one_batch`: synchronous, so the host's time of it counts |
| offline | one of `Engine`, which schedules ahead: a mean over `output_len` steps |
"""

from dataclasses import dataclass
from typing import ClassVar

from ...core.spec import LENGTHS, require_int, require_lengths, require_word
from ..form import NamedCase, later
from .model import CONFIGS

DRIVERS = ("steps", "offline")


@dataclass(frozen=True)
class Arm:
    """SGLang's `attention_backend`, and the variable of our plugin with its value."""

    attention: str
    variable: str
    value: str


# "fa3" is SGLang's word for the FlashAttention-3 library; as a value of decode it is FlashInfer's.
ARMS = {
    "sglang": Arm("fa3", "metadata", "sglang"),
    "sglang-eager": Arm("fa3", "metadata", "eager"),
    "sglang-fused": Arm("fa3", "metadata", "fused"),
    "sglang-one-launch": Arm("fa3", "metadata", "one-launch"),
    "sglang-layer": Arm("fa3", "schedule", "layer"),
    "sglang-upstream-splits": Arm("fa3", "splits", "upstream"),
    "sglang-guarded": Arm("fa3", "guard", "raise"),
    "sglang-fa2": Arm("flashinfer", "decode", "fa2"),
    "sglang-fa3": Arm("flashinfer", "decode", "fa3"),
    "sglang-planned": Arm("flashinfer", "decode", "planned"),
}
"""Backend -> its arm; `engines.sglang` explains the values. `sglang` is SGLang as it is."""
START = {"fa3": {"metadata": "sglang", "schedule": "once"}, "flashinfer": {"decode": "fa2"}}
"""Attention backend -> the variables that must be set before arms can take turns."""
SIDE_BY_SIDE = {
    attention: tuple(
        name
        for name, arm in ARMS.items()
        if arm.attention == attention and arm.variable not in ("guard", "schedule", "splits")
    )
    for attention in START
}
"""Attention backend -> the arms that take turns in one process of the driver `steps`. Not the
schedule in layers and the splits: a second set of CUDA graphs in the process delays the other arms'
replays."""
EXACT = {"sglang-eager": "sglang", "sglang-fused": "sglang"}
"""Arm -> the arm whose tokens and logits it must have, bit by bit, where they take turns."""
WARM_TURNS = 4
"""Steps of each arm before those that are timed; every step of any arm adds a token."""
IN_TURNS = "in turns"
"""In `reported_backend` of records whose steps alternate with those of other arms."""


@dataclass(frozen=True)
class EngineCase(NamedCase):
    """`output_len` decode steps of `model` for requests that hold tokens already.

    `kv_len` is the longest request's, the others' follow from `lengths` (`kinds.lengths`). A `tp`
    above 1 splits the model over as many GPUs of this machine (driver `offline` alone); a `dp`
    above 1 makes groups of them, each of which attends for requests of its own. `context` is
    the longest request that SGLang is started for (`--context-length`); 0: the driver's own.
    """

    kind: ClassVar = "engine"
    model: str
    batch_size: int
    kv_len: int
    output_len: int = 64
    driver: str = "steps"
    tp: int = 1
    lengths: str = "fixed"
    seed: int = 0
    dp: int = later(1)
    context: int = later(0)

    def __post_init__(self) -> None:
        require_word("model", self.model, CONFIGS)
        for name in ("batch_size", "kv_len", "output_len", "tp", "dp"):
            require_int(name, getattr(self, name), least=2 if name == "kv_len" else 1)
        for name in ("seed", "context"):
            require_int(name, getattr(self, name), least=0)
        require_word("driver", self.driver, DRIVERS)
        if self.driver != "offline" and self.tp > 1:
            raise ValueError(f"tp must be 1 for the driver {self.driver}, got {self.tp}")
        if self.tp % self.dp:
            raise ValueError(f"dp must divide tp, {self.tp}, got {self.dp}")
        require_lengths("lengths", self.lengths, self.batch_size, self.kv_len, LENGTHS)

    def in_turns(self, backend: str) -> tuple[str, ...]:
        """The arms that one process measures together with `backend`, itself included.

        Not FlashInfer's fa3 where lengths differ: its steps take up to 0.2 s.
        """
        arms = SIDE_BY_SIDE[ARMS[backend].attention]
        if self.driver == "offline":
            return (backend,)
        if self.lengths != "fixed":
            arms = tuple(arm for arm in arms if arm != "sglang-fa3")
        return arms if backend in arms else (backend,)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        driver = "" if self.driver == "steps" else f" {self.driver}"
        ranks = "" if self.tp == 1 else f" tp {self.tp}" + (f" dp {self.dp}" if self.dp > 1 else "")
        size = f"{self.batch_size} x {self.kv_len} {self.lengths}"
        context = f" context {self.context}" if self.context else ""
        return f"{self.model} {size} + {self.output_len} seed {self.seed}{driver}{ranks}{context}"
