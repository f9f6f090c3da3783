"""Cases and items: the text form of a call, and the JSON form that records have.

A kind of case is a folder with `case.py`, here or in a room; the folder's name is the kind. To read
a record imports the module of its own case and no other.
"""

import importlib
import json
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from ...core.call_text import CallText
from ...core.spec import LATER, require_types, require_word

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1]
DECODE = "decode"
"""The folder of the first kind, whose JSON form names none."""


def later(default: Any) -> Any:
    """A dataclass field that older records lack: at its default it stays out of the JSON form.

    So records written before the field keep their ids, which are hashes of that form.
    """
    return field(default=default, metadata=LATER)


class NamedCase:
    """Base of the frozen dataclasses that describe a measurement.

    `kind` is a field of the JSON form; decode, which came first, has none. The fields of a field
    that is itself a dataclass, as a layer's spec, are flat beside the case's own.
    `keeps_samples`: a frame has all samples of its records, not their median alone.
    """

    kind: ClassVar[str] = ""
    words: ClassVar[tuple[str, ...]] = ()
    """Of `core.call_text`: those that its text may have."""
    own_words: ClassVar[tuple[str, ...]] = ()
    """Words that no other kind has."""
    keeps_samples: ClassVar[bool] = False

    @property
    def said(self) -> CallText:
        """What its text says."""
        raise NotImplementedError

    @classmethod
    def from_said(cls, said: CallText) -> Self:
        """Inverse of `said`; ValueError for a word that is missing or has no such value."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Its text: `heads=32/8 head_dim=128 page=16 lens=8192x16`."""
        return str(self.said)

    @property
    def key(self) -> str:
        """The same, under an older name."""
        return self.label

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case: its kind and its fields."""
        form = _flat(self)
        if self.kind:
            return {"kind": self.kind} | form
        return form

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Self:
        """Inverse of `to_dict`, less the kind; ValueError on a missing, unknown or wrong field."""
        known = list(flat_fields(cls))
        allowed = {each.name for each in known}
        needed = {each.name for each in known if each.metadata != LATER}
        if not needed <= form.keys() <= allowed:
            raise ValueError(
                f"a {cls.__name__} must have the fields {sorted(needed)}, got {sorted(form)}"
            )
        case: Self = _build(cls, form)
        require_types(known, form)
        return case


def flat_fields(cls: Any) -> Iterator[Field[Any]]:
    """The fields of a case's JSON form, less the kind."""
    for each in fields(cls):
        if is_dataclass(each.type):
            yield from flat_fields(each.type)
        else:
            yield each


def _flat(noun: Any) -> dict[str, Any]:
    form: dict[str, Any] = {}
    for each in fields(noun):
        value = getattr(noun, each.name)
        if is_dataclass(value):
            form |= _flat(value)
        elif each.metadata != LATER or value != each.default:
            form[each.name] = value
    return form


def _build(cls: Any, form: dict[str, Any]) -> Any:
    values = {}
    for each in fields(cls):
        if is_dataclass(each.type):
            values[each.name] = _build(each.type, form)
        elif each.name in form:
            values[each.name] = form[each.name]
    return cls(**values)


# ---- kinds


def class_of(kind: str) -> type[NamedCase]:
    """The class of a kind's cases; ValueError for an unknown kind."""
    if kind != "":
        require_word("kind of a case", kind, kinds())
    module = importlib.import_module(case_modules()[kind])
    for value in vars(module).values():
        is_case = isinstance(value, type) and issubclass(value, NamedCase)
        if is_case and value.__module__ == module.__name__ and value.kind == kind:
            return value
    raise ImportError(f"{module.__name__} must have a case of kind {kind!r}, it has none")


def kinds() -> list[str]:
    """Every kind that has a name, sorted."""
    return sorted(filter(None, case_modules()))


@cache
def case_modules() -> dict[str, str]:
    """Kind -> the module of its cases."""
    modules = {}
    for path in (*HERE.glob("*/case.py"), *PACKAGE.glob("*/*/case.py")):
        folder = path.parent.relative_to(PACKAGE.parent)
        kind = "" if folder.name == DECODE else folder.name
        modules[kind] = ".".join([*folder.parts, "case"])
    return modules


def case_from_dict(form: dict[str, Any]) -> NamedCase:
    """The case of a record's JSON; ValueError for an unknown kind or fields that do not fit."""
    fields = dict(form)
    kind = fields.pop("kind", "")
    return class_of(kind).from_dict(fields)


# ---- items


CaseT = TypeVar("CaseT", bound=NamedCase | None)


@dataclass(frozen=True)
class Item(Generic[CaseT]):
    """One thing to measure: the identity of a record, without its study, round and machine.

    `case` is None for a ceiling; `release` is that of the backend's distribution, empty where no
    releases are compared. `again` numbers A/A items: the same item measured once more in the same
    process. `item_from_dict` is the inverse of `to_dict`.
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


def item_from_dict(form: dict[str, Any]) -> Item[Any]:
    """Inverse of `Item.to_dict`; a form may lack a field that has a default."""
    fields = dict(form)
    fields["again"] = form.get("again") or 0
    case = form.get("case")
    fields["case"] = case_from_dict(case) if case else None
    return Item(**fields)
