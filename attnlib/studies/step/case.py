"""The attention of a whole decode step, layer after layer, as a case. No torch here."""

from dataclasses import dataclass
from typing import ClassVar

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
    decode: DecodeCase
    layers: int

    def __post_init__(self) -> None:
        require_int("layers", self.layers)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        return f"{self.layers} layers of {self.decode.label}"
