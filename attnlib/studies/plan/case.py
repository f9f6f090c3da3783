"""A plan for FlashInfer's fa2 as a case. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from ...core.spec import AttnSpec, require_int
from ...measure.calls.decode.case import DecodeCase
from ...measure.calls.form import NamedCase


@dataclass(frozen=True)
class PlanCase(NamedCase):
    """A plan for `q_len` queries of each request of `decode`, causal; the planner cuts it."""

    kind: ClassVar = "plan"
    decode: DecodeCase
    q_len: int = 1

    def __post_init__(self) -> None:
        require_int("q_len", self.q_len)

    @property
    def spec(self) -> AttnSpec:
        """The attention layer."""
        return self.decode.spec

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        return f"plan q_len {self.q_len} {self.decode.label}"
