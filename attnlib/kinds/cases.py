"""The registry of kinds: their cases, the JSON form of a case, and what measures it. No torch.

`kind` is a field of the JSON form of every case but `DecodeCase`, which came first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from .decode.case import DecodeCase
from .engine.case import EngineCase
from .extend.case import ExtendCase
from .item import Item
from .metadata.case import MetadataCase
from .mismatch.case import MismatchCase
from .mla.case import MlaCase
from .plan.case import PlanCase
from .step.case import StepCase

if TYPE_CHECKING:
    from .base import Bench, Subject

_Call = DecodeCase | MetadataCase | StepCase | MismatchCase | MlaCase | ExtendCase
Case = _Call | PlanCase | EngineCase
KINDS = {cls.kind: cls for cls in get_args(Case)}
SUBJECTS: dict[type, str] = {
    DecodeCase: "decode.measure:DecodeSubject",
    EngineCase: "engine.measure:EngineSubject",
    ExtendCase: "extend.measure:ExtendSubject",
    MetadataCase: "metadata.measure:MetadataSubject",
    MismatchCase: "mismatch.measure:MismatchSubject",
    MlaCase: "mla.measure:MlaSubject",
    PlanCase: "plan.measure:PlanSubject",
    StepCase: "step.measure:StepSubject",
    type(None): "ceiling:CeilingSubject",
}
"""Class of an item's case -> the module and class that measures it; a ceiling has no case."""


def subject_class(case: object) -> Callable[[Bench], Subject]:
    """The class that measures items with such a case; imported here, because it needs torch."""
    module, _, name = SUBJECTS[type(case)].partition(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def case_from_dict(form: dict[str, Any]) -> Case:
    """The case of a record's JSON; ValueError for an unknown kind or fields that do not fit."""
    fields = dict(form)
    kind = fields.pop("kind", "")
    if kind not in KINDS:
        kinds = ", ".join(filter(None, KINDS))
        raise ValueError(f"kind of a case must be one of {kinds}, got {kind!r}")
    return KINDS[kind].from_dict(fields)


def item_from_dict(form: dict[str, Any]) -> Item[Any]:
    """Inverse of `Item.to_dict`; a form may lack a field that has a default."""
    case = form.get("case")
    fields = {**form, "again": form.get("again") or 0}
    return Item(**{**fields, "case": case_from_dict(case) if case else None})
