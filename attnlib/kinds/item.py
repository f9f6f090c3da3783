"""What is to be measured: the identity of a record, less its study, round and machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cases import Case, case_from_dict


@dataclass(frozen=True)
class Item:
    """What is to be measured: the identity of a record, less its study, round and machine.

    `case` is None for a ceiling; `release` is that of the backend's distribution, or empty for
    what is installed and has no releases to compare.
    """

    backend: str
    timer: str
    case: Case | None = None
    release: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form; inverse of `from_dict`."""
        case = self.case.to_dict() if self.case else None
        return {
            "backend": self.backend,
            "timer": self.timer,
            "case": case,
            "release": self.release,
        }

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Item:
        """Inverse of `to_dict`; a form may lack a field that has a default."""
        case = form.get("case")
        return cls(**{**form, "case": case_from_dict(case) if case else None})
