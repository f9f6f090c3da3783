"""The base of all cases: the text form of a call, and a flat JSON form."""

from collections.abc import Iterator
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, ClassVar, Self

from ...core.call_text import CallText
from ...core.spec import LATER, require_types


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
        return {"kind": self.kind} | form if self.kind else form

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
