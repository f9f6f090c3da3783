"""Items: what a study asks for, and a worker measures."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .cases import Case, case_from_dict

CaseT = TypeVar("CaseT", bound=Case | None)


@dataclass(frozen=True)
class Item(Generic[CaseT]):
    """What is to be measured: the identity of a record, less its study, round and machine.

    `case` is None for a ceiling; `release` is that of the backend's distribution, or empty for
    what is installed and has no releases to compare. `again` counts A/A items: the same once more
    in the same process, so that a study says how far one thing lies from itself.
    """

    backend: str
    timer: str
    case: CaseT = None  # type: ignore[assignment] # of a ceiling
    release: str = ""
    again: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON form; inverse of `from_dict`."""
        case: Case | None = self.case
        form = {
            "backend": self.backend,
            "timer": self.timer,
            "case": case.to_dict() if case else None,
            "release": self.release,
        }
        return form | ({"again": self.again} if self.again else {})

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> "Item[Any]":
        """Inverse of `to_dict`; a form may lack a field that has a default."""
        case = form.get("case")
        told = {**form, "again": form.get("again") or 0}
        return cls(**{**told, "case": case_from_dict(case) if case else None})
