"""What a worker measures, by the kind of an item's case; each subject is imported when needed.

A subject is made once per process and keeps the tensors of its last case for the case's neighbours.
`measure(item)` gives the fields of a record that are its own: status, samples, kernels, the check.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Bench, Subject


def subject_class(case: object) -> Callable[[Bench], Subject]:
    """The class that measures items with such a case, of its folder; None is a ceiling's."""
    name = type(case).__name__.removesuffix("Case") if case else "Ceiling"
    module = f"{name.lower()}.measure" if case else "ceiling"
    return getattr(importlib.import_module(f"{__name__}.{module}"), f"{name}Subject")
