"""The attention of a whole decode step, layer after layer, as a case. No torch here."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ...core.call_text import CallText
from ...core.spec import require_int
from ...measure.calls.decode.case import DecodeCase
from ...measure.calls.form import NamedCase

EACH = "flash-attn-3-step-each"
ONCE = "flash-attn-3-step-once"
"""Backends: a schedule in every layer, or one for all of them."""


@dataclass(frozen=True)
class StepCase(NamedCase):
    """The attention calls of one decode step: `decode` in each of `layers` layers."""

    kind: ClassVar = "step"
    words: ClassVar = DecodeCase.words
    own_words: ClassVar = ("layers",)
    decode: DecodeCase
    layers: int

    def __post_init__(self) -> None:
        require_int("layers", self.layers)

    @property
    def said(self) -> CallText:
        """What its text says."""
        layers = ("layers", self.layers)
        return replace(
            self.decode.said,
            mode=self.kind,
            own=(layers,),
        )

    @classmethod
    def from_said(cls, said: CallText) -> Self:
        """Inverse of `said`."""
        return cls(DecodeCase.from_said(said), said.required("layers"))
