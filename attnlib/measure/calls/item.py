"""Items: what a study asks for, and a worker measures."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from .form import NamedCase

CaseT = TypeVar("CaseT", bound=NamedCase | None)


@dataclass(frozen=True)
class Item(Generic[CaseT]):
    """One thing to measure: the identity of a record, without its study, round and machine.

    `case` is None for a ceiling; `release` is that of the backend's distribution, empty where no
    releases are compared. `again` numbers A/A items: the same item measured once more in the same
    process. `cases.item_from_dict` is the inverse of `to_dict`.
    """

    backend: str
    timer: str
    case: CaseT = None  # type: ignore[assignment] # of a ceiling
    release: str = ""
    again: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        case: NamedCase | None = self.case
        form: dict[str, Any] = {
            "backend": self.backend,
            "timer": self.timer,
            "case": case.to_dict() if case else None,
            "release": self.release,
        }
        if self.again:
            form["again"] = self.again
        return form

    @cached_property
    def identity(self) -> str:
        """The JSON form as text, keys sorted: the item's part in the id of its records."""
        return json.dumps(self.to_dict(), sort_keys=True)
