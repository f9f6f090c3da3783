"""A metadata mismatch as a case: its name, with the guard or past it. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..form import _from_fields


@dataclass(frozen=True)
class MismatchCase:
    """An entry of `mismatch.MISMATCHES`, with the guard or past it."""

    name: str
    guard: bool

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        return f"{self.name} {'guarded' if self.guard else 'unguarded'}"

    @property
    def key(self) -> str:
        """A name without spaces for command lines."""
        return self.label.replace(" ", ",")

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case with its kind."""
        return {"kind": "mismatch", **asdict(self)}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> MismatchCase:
        """Inverse of `to_dict`, less the kind."""
        return _from_fields(cls, form)
