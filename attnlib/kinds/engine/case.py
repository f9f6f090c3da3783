"""A model's decode steps inside an engine, as a case. No torch here.

| driver | a step is |
|---|---|
| steps | one of SGLang's `bench_one_batch`: synchronous, what the host does before it counts |
| offline | one of SGLang's `Engine`, which schedules ahead: a mean over `output_len` of them |
| batching | one of transformers' continuous batching, from its start to the next one's |
"""

from dataclasses import dataclass
from typing import ClassVar

from ...core.spec import LENGTHS, require_int, require_lengths, require_word
from ..form import NamedCase, later
from .model import CONFIGS

DRIVERS = ("steps", "offline", "batching")
ARMS = {
    "sglang": ("fa3", "metadata", "sglang"),
    "sglang-eager": ("fa3", "metadata", "eager"),
    "sglang-fused": ("fa3", "metadata", "fused"),
    "sglang-one-launch": ("fa3", "metadata", "one-launch"),
    "sglang-layer": ("fa3", "schedule", "layer"),
    "sglang-fa2": ("flashinfer", "decode", "fa2"),
    "sglang-fa3": ("flashinfer", "decode", "fa3"),
    "sglang-planned": ("flashinfer", "decode", "planned"),
    "sglang-guarded": ("fa3", "guard", "raise"),
    "hf": ("transformers", "metadata", "own"),
    "hf-once": ("transformers", "metadata", "once"),
}
"""Backend -> SGLang's attention backend, and the plugin's variable and value, as
`core.engines.sglang` explains them, or transformers and what `core.engines.hf` does there. `sglang`
and `hf` are an engine's own of each."""
START = {"fa3": {"metadata": "sglang", "schedule": "once"}, "flashinfer": {"decode": "fa2"}}
"""Attention backend -> what is set where arms take turns, less what an arm sets itself."""
SIDE_BY_SIDE = {
    attention: tuple(
        name for name, arm in ARMS.items() if arm[0] == attention and "guard" not in arm
    )
    for attention in ("fa3", "flashinfer", "transformers")
}
"""Attention backend -> the arms that take turns in one process, but in the driver offline."""
EXACT = {
    "sglang-eager": "sglang",
    "sglang-fused": "sglang",
    "sglang-layer": "sglang-one-launch",
    "hf-once": "hf",
}
"""Arm -> the one whose tokens and logits it must have, bit by bit, where they take turns."""
IN_TURNS = "in turns"
"""In `reported_backend`, of records whose steps alternate with those of other arms."""


@dataclass(frozen=True)
class EngineCase(NamedCase):
    """`output_len` decode steps of `model` for requests that hold tokens already.

    `kv_len` is the longest request's, the others' as `lengths` says (`kinds.lengths`). A `tp` above
    1 splits the model over so many GPUs of this machine, which only the offline engine drives; a
    `dp` above 1 makes groups of them, each of which attends for requests of its own.
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

    def __post_init__(self) -> None:
        require_word("model", self.model, CONFIGS)
        for name in ("batch_size", "kv_len", "output_len", "tp", "dp"):
            require_int(name, getattr(self, name), least=2 if name == "kv_len" else 1)
        require_int("seed", self.seed, least=0)
        require_word("driver", self.driver, DRIVERS)
        if self.driver != "offline" and self.tp > 1:
            raise ValueError(f"tp must be 1 for the driver {self.driver}, got {self.tp}")
        if self.tp % self.dp:
            raise ValueError(f"dp must divide tp, {self.tp}, got {self.dp}")
        require_lengths("lengths", self.lengths, self.batch_size, self.kv_len, LENGTHS)

    def in_turns(self, backend: str) -> tuple[str, ...]:
        """The arms that one process measures with `backend`, turn by turn, itself among them.

        Not FlashInfer's fa3 where one request is long: its steps take up to 0.2 s.
        """
        arms = SIDE_BY_SIDE[ARMS[backend][0]]
        if self.lengths != "fixed":
            arms = tuple(arm for arm in arms if arm != "sglang-fa3")
        return arms if backend in arms and self.driver != "offline" else (backend,)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        driven = "" if self.driver == "steps" else f" {self.driver}"
        ranks = "" if self.tp == 1 else f" tp {self.tp}" + (f" dp {self.dp}" if self.dp > 1 else "")
        size = f"{self.batch_size} x {self.kv_len} {self.lengths}"
        return f"{self.model} {size} + {self.output_len} seed {self.seed}{driven}{ranks}"
