"""What can be measured: named, seeded cases, and their JSON form.

| kind | case | what a call is |
|---|---|---|
| `decode` | `DecodeCase` | one attention call over a paged cache |
| `metadata` | `MetadataCase` | one step's metadata, before its first layer |
| `step` | `StepCase` | the attention of a whole decode step, layer after layer |
| `mismatch` | `MismatchCase` | an attention call whose metadata does not fit it |
| `mla` | `MlaCase` | one multi-head latent attention call, dense or over chosen tokens |
| `extend` | `ExtendCase` | one attention call with several queries per request |

A kind stands in the JSON of every case but `decode`, which came first. No torch here.
"""

from __future__ import annotations

from typing import Any

from .decode.case import DecodeCase
from .extend.case import ExtendCase
from .metadata.case import MetadataCase
from .mismatch.case import MismatchCase
from .mla.case import MlaCase
from .step.case import StepCase

Case = DecodeCase | MetadataCase | StepCase | MismatchCase | MlaCase | ExtendCase
KINDS = {
    cls.kind: cls for cls in (MetadataCase, StepCase, MismatchCase, MlaCase, ExtendCase, DecodeCase)
}


def case_from_dict(form: dict[str, Any]) -> Case:
    """The case of a record's JSON; ValueError for an unknown kind or fields that do not fit."""
    flat = dict(form)
    kind = flat.pop("kind", "")
    if kind not in KINDS:
        known = ", ".join(filter(None, KINDS))
        raise ValueError(f"kind of a case must be one of {known}, got {kind!r}")
    return KINDS[kind].from_dict(flat)
