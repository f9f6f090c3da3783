"""The base of all cases: names for people and command lines, and a flat JSON form."""

from collections.abc import Iterator
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, ClassVar, Self

from ..core.spec import LATER, require_types


def later(default: Any) -> Any:
    """A dataclass field that older records lack: at its default it stays out of the JSON form.

    So records written before the field keep their ids, which are hashes of that form.
    """
    return field(default=default, metadata=LATER)


class NamedCase:
    """Base of the frozen dataclasses that describe a measurement.

    `kind` is a field of the JSON form; decode, which came first, has none. The fields of a field
    that is itself a dataclass, as a layer's spec, are flat beside the case's own.
    """

    kind: ClassVar[str] = ""

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """A stable name without spaces, for command lines."""
        return self.label.replace(" ", ",")

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case: its kind and its fields."""
        return ({"kind": self.kind} if self.kind else {}) | _flat(self)

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Self:
        """Inverse of `to_dict`, less the kind; ValueError on a missing, unknown or wrong field."""
        allowed = [*flat_fields(cls)]
        needed = {f.name for f in allowed if f.metadata != LATER}
        if needed - set(form) or set(form) - {f.name for f in allowed}:
            raise ValueError(
                f"a {cls.__name__} must have the fields {sorted(needed)}, got {sorted(form)}"
            )
        case: Self = _build(cls, form)
        require_types(allowed, form)
        return case


def flat_fields(cls: Any) -> Iterator[Field[Any]]:
    """The fields of a case's JSON form, less the kind."""
    for f in fields(cls):
        if is_dataclass(f.type):
            yield from flat_fields(f.type)
        else:
            yield f


def _flat(noun: Any) -> dict[str, Any]:
    form: dict[str, Any] = {}
    for f in fields(noun):
        value = getattr(noun, f.name)
        if is_dataclass(value):
            form |= _flat(value)
        elif f.metadata != LATER or value != f.default:
            form[f.name] = value
    return form


def _build(cls: Any, form: dict[str, Any]) -> Any:
    values = {f.name: form[f.name] for f in fields(cls) if f.name in form}
    for f in fields(cls):
        if is_dataclass(f.type):
            values[f.name] = _build(f.type, form)
    return cls(**values)
