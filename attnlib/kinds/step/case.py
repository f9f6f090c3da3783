"""The attention of a whole decode step, layer after layer, as a case. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..decode.case import DecodeCase


@dataclass(frozen=True)
class StepCase:
    """The attention calls of one decode step: `decode` in each of `layers` layers."""

    decode: DecodeCase
    layers: int

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers must be an integer >= 1, got {self.layers!r}")

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        return f"{self.layers} layers of {self.decode.label}"

    @property
    def key(self) -> str:
        """A name without spaces for command lines."""
        return f"{self.decode.key},l{self.layers}"

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case with its kind."""
        return {"kind": "step", **self.decode.to_dict(), "layers": self.layers}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> StepCase:
        """Inverse of `to_dict`, less the kind."""
        flat = dict(form)
        layers = flat.pop("layers", 0)
        return cls(DecodeCase.from_dict(flat), layers)
