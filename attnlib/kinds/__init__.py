"""What a worker measures, by the kind of an item's case; each subject is imported when needed.

A subject is made once a process and keeps the tensors of its last case for the case's neighbours.
`measure(item)` gives the fields of a record that are its own: status, samples, kernels, the check.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Bench, Subject

_CLASSES = {
    "DecodeCase": ("decode.measure", "DecodeSubject"),
    "MetadataCase": ("metadata.measure", "MetadataSubject"),
    "StepCase": ("step.measure", "StepSubject"),
    "MismatchCase": ("mismatch.measure", "MismatchSubject"),
    "MlaCase": ("mla.measure", "MlaSubject"),
    "ExtendCase": ("extend.measure", "ExtendSubject"),
    "NoneType": ("ceiling", "CeilingSubject"),
}


def subject_class(case: object) -> Callable[[Bench], Subject]:
    """The class that measures items with such a case; None is a ceiling's."""
    module, cls = _CLASSES[type(case).__name__]
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)
