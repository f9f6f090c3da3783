"""Items: what a study asks for, and a worker measures."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .cases import Case, case_from_dict

CaseT = TypeVar("CaseT", bound=Case | None)


@dataclass(frozen=True)
class Item(Generic[CaseT]):
    """What is to be measured: the identity of a record, less its study, round and machine.

    `case` is None for a ceiling; `release` is that of the backend's distribution, or empty for
    what is installed and has no releases to compare.
    """

    backend: str
    timer: str
    case: CaseT = None  # type: ignore[assignment] # of a ceiling
    release: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form; inverse of `from_dict`."""
        case: Case | None = self.case
        return {
            "backend": self.backend,
            "timer": self.timer,
            "case": case.to_dict() if case else None,
            "release": self.release,
        }

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> "Item[Any]":
        """Inverse of `to_dict`; a form may lack a field that has a default."""
        case = form.get("case")
        return cls(**{**form, "case": case_from_dict(case) if case else None})
