"""The registry of kinds: their cases, the JSON form and the text of a case, and what measures it.

`kind` is a field of the JSON form of every case but `DecodeCase`, which came first. The text of a
case (`core.call_text`) is read back by `read_case`. No torch here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, get_args

from ..core.call_text import CallText, nearest
from ..core.spec import require_word
from .decode.case import DecodeCase
from .engine.case import EngineCase
from .extend.case import MODES as EXTEND_MODES
from .extend.case import ExtendCase
from .item import Item
from .metadata.case import MetadataCase
from .mla.case import DENSE, SPARSE, MlaCase
from .old_names import read_old_name
from .plan.case import PlanCase
from .step.case import StepCase

if TYPE_CHECKING:
    from .base import Bench, Subject

Case = DecodeCase | MetadataCase | StepCase | MlaCase | ExtendCase | PlanCase | EngineCase
KINDS = {cls.kind: cls for cls in get_args(Case)}

DECODE = "decode"
MODES: dict[str, type[Case]] = {
    DECODE: DecodeCase,
    **dict.fromkeys(EXTEND_MODES, ExtendCase),
    **dict.fromkeys((DENSE, SPARSE), MlaCase),
    **{cls.kind: cls for cls in (MetadataCase, PlanCase, StepCase, EngineCase)},
}
"""Mode of a text -> class."""


def subject_class(case: object) -> Callable[[Bench], Subject]:
    """The class that measures items with such a case; imported here, because it needs torch.

    `XCase` of `x.case` is measured by `XSubject` of `x.measure`; no case is a ceiling.
    """
    module = f"{__package__}.call"
    name = "CeilingSubject"
    if case is not None:
        cls = type(case)
        folder = cls.__module__.removesuffix(".case")
        module = f"{folder}.measure"
        name = cls.__name__.replace("Case", "Subject")
    return getattr(importlib.import_module(module), name)


def case_from_dict(form: dict[str, Any]) -> Case:
    """The case of a record's JSON; ValueError for an unknown kind or fields that do not fit."""
    fields = dict(form)
    kind = fields.pop("kind", "")
    if kind != "":
        require_word("kind of a case", kind, [*filter(None, KINDS)])
    return KINDS[kind].from_dict(fields)


def item_from_dict(form: dict[str, Any]) -> Item[Any]:
    """Inverse of `Item.to_dict`; a form may lack a field that has a default."""
    fields = dict(form)
    fields["again"] = form.get("again") or 0
    case = form.get("case")
    fields["case"] = case_from_dict(case) if case else None
    return Item(**fields)


def parse_cases(lines: Iterable[str]) -> tuple[Case, ...]:
    """The cases of `lines`, each once; empty lines and those from `#` on are skipped.

    ValueError names the line that is no call.
    """
    cases: list[Case] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        try:
            if text and not text.startswith("#"):
                cases.append(read_case(text))
        except ValueError as error:
            raise ValueError(f"line {number} of the cases: {error}") from error
    return tuple(dict.fromkeys(cases))


def read_case(text: str) -> Case:
    """The case of a text (`core.call_text`), or of a key or a label of old.

    Inverse of a case's `label`. ValueError names the word, what it must be and what it was.
    """
    said = read_old_name(text) or CallText.read(text)
    mode = said.mode or DECODE
    if mode not in MODES:
        modes = ", ".join(MODES)
        raise ValueError(f"mode must be one of {modes}, got {mode!r}{nearest(mode, MODES)}")
    cls = MODES[mode]
    said.require_only(f"mode={mode}", cls.words)
    return cls.from_said(said)
