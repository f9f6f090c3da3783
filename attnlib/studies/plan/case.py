"""A plan for FlashInfer's fa2, without its attention: the case of published records."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ...core.call_text import CallText
from ...core.spec import AttnSpec, require_int
from ...measure.calls.decode.case import DecodeCase
from ...measure.calls.form import NamedCase


@dataclass(frozen=True)
class PlanCase(NamedCase):
    """A plan for `q_len` queries of each request of `decode`, causal; the planner cuts it."""

    kind: ClassVar = "plan"
    words: ClassVar = (*DecodeCase.words, "q_len")
    decode: DecodeCase
    q_len: int = 1

    def __post_init__(self) -> None:
        require_int("q_len", self.q_len)

    @property
    def spec(self) -> AttnSpec:
        """The attention layer."""
        return self.decode.spec

    @property
    def said(self) -> CallText:
        """What its text says."""
        return replace(self.decode.said, mode=self.kind, q_len=self.q_len)

    @classmethod
    def from_said(cls, said: CallText) -> Self:
        """Inverse of `said`."""
        return cls(DecodeCase.from_said(said), said.required("q_len"))
