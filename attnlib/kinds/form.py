"""The base of all cases: names for people and command lines, and a flat JSON form."""

from dataclasses import Field, field, fields
from functools import cache
from typing import Any, ClassVar, Self

from ..core.spec import LATER


def later(default: Any) -> Any:
    """A dataclass field that older records lack: at its default it stays out of the JSON form.

    So records written before the field keep their ids, which are hashes of that form.
    """
    return field(default=default, metadata=LATER)


class NamedCase:
    """Base of the frozen dataclasses that describe a measurement.

    `kind` is a field of the JSON form; decode, which came first, has none. `inner` names a field
    that is itself a dataclass, and its class: its fields are flat beside the case's.
    """

    kind: ClassVar[str] = ""
    inner: ClassVar[tuple[str, Any]] = ("", None)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """A stable name without spaces, for command lines."""
        return self.label.replace(" ", ",")

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case: its kind, the inner dataclass's fields and its own."""
        return ({"kind": self.kind} if self.kind else {}) | _flat(self)

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Self:
        """Inverse of `to_dict`, less the kind; ValueError on a missing or unknown field."""
        allowed = _all_fields(cls)
        needed = {f.name for f in allowed if f.metadata != LATER}
        if needed - set(form) or set(form) - {f.name for f in allowed}:
            raise ValueError(
                f"a {cls.__name__} must have the fields {sorted(needed)}, got {sorted(form)}"
            )
        return _build(cls, form)


def _inner(noun: Any) -> tuple[str, Any]:
    """The field and the class of the inner dataclass; a layer's spec has none."""
    return getattr(noun, "inner", ("", None))


@cache
def _own_fields(cls: Any) -> list[Field[Any]]:
    return [f for f in fields(cls) if f.name != _inner(cls)[0]]


def _all_fields(cls: Any) -> list[Field[Any]]:
    _, noun = _inner(cls)
    return [*(_all_fields(noun) if noun else []), *_own_fields(cls)]


def _flat(noun: Any) -> dict[str, Any]:
    name, _ = _inner(noun)
    form = _flat(getattr(noun, name)) if name else {}
    for f in _own_fields(noun.__class__):
        value = getattr(noun, f.name)
        if f.metadata != LATER or value != f.default:
            form[f.name] = value
    return form


def _build(cls: Any, form: dict[str, Any]) -> Any:
    name, noun = _inner(cls)
    values = {f.name: form[f.name] for f in _own_fields(cls) if f.name in form}
    if name:
        values[name] = _build(noun, form)
    return cls(**values)
