"""What all kinds of case share: names for people and command lines, and a flat JSON form."""

from dataclasses import fields
from typing import Any, ClassVar, Self


class NamedCase:
    """Base of the frozen dataclasses that say what is measured.

    `kind` stands in the JSON form; decode, which came first, has none. `inner` names the field
    that is a noun of its own, and its class: its fields stand flat beside the case's.
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
        """Flat dict of the case: its kind, the inner noun's fields and its own."""
        return ({"kind": self.kind} if self.kind else {}) | _flat(self)

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Self:
        """Inverse of `to_dict`, less the kind; ValueError on a missing or unknown field."""
        needed = sorted(_all_fields(cls))
        if needed != sorted(form):
            raise ValueError(f"a {cls.__name__} must have the fields {needed}, got {sorted(form)}")
        return _build(cls, form)


def _inner(noun: Any) -> tuple[str, Any]:
    """The field and the class of the noun within; a layer's spec has none."""
    return getattr(noun, "inner", ("", None))


def _own_fields(cls: Any) -> list[str]:
    return [f.name for f in fields(cls) if f.name != _inner(cls)[0]]


def _all_fields(cls: Any) -> list[str]:
    _, noun = _inner(cls)
    return [*(_all_fields(noun) if noun else []), *_own_fields(cls)]


def _flat(noun: Any) -> dict[str, Any]:
    name, _ = _inner(noun)
    own = {field: getattr(noun, field) for field in _own_fields(noun)}
    return (_flat(getattr(noun, name)) if name else {}) | own


def _build(cls: Any, form: dict[str, Any]) -> Any:
    name, noun = _inner(cls)
    own = {field: form[field] for field in _own_fields(cls)}
    return cls(**({name: _build(noun, form)} if name else {}), **own)
