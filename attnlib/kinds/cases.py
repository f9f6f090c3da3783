"""What can be measured: the named, seeded cases of every kind, and their JSON form.

The kind stands in the JSON of every case but `DecodeCase`, which came first. No torch here.
"""

from typing import Any, get_args

from .decode.case import DecodeCase
from .engine.case import EngineCase
from .extend.case import ExtendCase
from .metadata.case import MetadataCase
from .mismatch.case import MismatchCase
from .mla.case import MlaCase
from .plan.case import PlanCase
from .step.case import StepCase

_Call = DecodeCase | MetadataCase | StepCase | MismatchCase | MlaCase | ExtendCase
Case = _Call | PlanCase | EngineCase
KINDS = {cls.kind: cls for cls in get_args(Case)}


def case_from_dict(form: dict[str, Any]) -> Case:
    """The case of a record's JSON; ValueError for an unknown kind or fields that do not fit."""
    flat = dict(form)
    kind = flat.pop("kind", "")
    if kind not in KINDS:
        known = ", ".join(filter(None, KINDS))
        raise ValueError(f"kind of a case must be one of {known}, got {kind!r}")
    return KINDS[kind].from_dict(flat)
