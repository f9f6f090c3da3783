"""A model's decode steps inside an engine, as a case. No torch here.

| driver | a step is |
|---|---|
| steps | one of SGLang's `bench_one_batch`: synchronous, what the host does before it counts |
| offline | one of SGLang's `Engine`, which schedules ahead: a mean over `output_len` of them |
"""

from dataclasses import dataclass
from typing import ClassVar

from ...core.spec import LENGTHS, require_int, require_lengths, require_word
from ..form import NamedCase
from .model import CONFIGS

DRIVERS = ("steps", "offline")
ARMS = {
    "sglang": ("fa3", "metadata", "sglang"),
    "sglang-eager": ("fa3", "metadata", "eager"),
    "sglang-fused": ("fa3", "metadata", "fused"),
    "sglang-one-launch": ("fa3", "metadata", "one-launch"),
    "sglang-layer": ("fa3", "schedule", "layer"),
    "sglang-fa2": ("flashinfer", "decode", "fa2"),
    "sglang-fa3": ("flashinfer", "decode", "fa3"),
    "sglang-planned": ("flashinfer", "decode", "planned"),
}
"""Backend -> SGLang's attention backend, and the plugin's variable and value, as
`core.engines.sglang` explains them. `sglang` is SGLang's own of each."""
SIDE_BY_SIDE = tuple(name for name, arm in ARMS.items() if arm[1] == "metadata")
"""Arms that one process alternates step by step; each of the others has a process to itself."""
REFERENCE = "sglang"
EXACT = ("sglang-eager", "sglang-fused", "sglang-layer")
"""Arms whose tokens and logits must be the reference's, bit by bit."""


@dataclass(frozen=True)
class EngineCase(NamedCase):
    """`output_len` decode steps of `model` for requests that hold tokens already.

    `kv_len` is the longest request's, the others' as `lengths` says (`kinds.lengths`). A `tp` above
    1 splits the model over so many GPUs of this machine, which only the offline engine drives.
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

    def __post_init__(self) -> None:
        require_word("model", self.model, CONFIGS)
        for name in ("batch_size", "kv_len", "output_len", "tp"):
            require_int(name, getattr(self, name), least=2 if name == "kv_len" else 1)
        require_int("seed", self.seed, least=0)
        require_word("driver", self.driver, DRIVERS)
        if self.driver == "steps" and self.tp > 1:
            raise ValueError(f"tp must be 1 for the driver steps, got {self.tp}")
        require_lengths("lengths", self.lengths, self.batch_size, self.kv_len, LENGTHS)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        driven = "" if self.driver == "steps" else f" {self.driver}"
        ranks = "" if self.tp == 1 else f" tp {self.tp}"
        size = f"{self.batch_size} x {self.kv_len} {self.lengths}"
        return f"{self.model} {size} + {self.output_len} seed {self.seed}{driven}{ranks}"
