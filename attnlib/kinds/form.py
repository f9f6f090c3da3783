"""The JSON form of a case: its fields, flat."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def _from_fields(cls: Any, form: dict[str, Any]) -> Any:
    names = sorted(f.name for f in fields(cls))
    if sorted(form) != names:
        raise ValueError(f"a {cls.__name__} must have the fields {names}, got {sorted(form)}")
    return cls(**form)
