"""The kinds of cases: the JSON form and the text of a case, and what measures it.

Attention calls are here. A case that only one question uses is `case.py` in a folder of a room,
found by the folder's name, which is its kind: it is imported when a record of it is read. `kind` is
a field of the JSON form of every case but `DecodeCase`, which came first. The text of a case
(`core.call_text`) is read back by `read_case`. No torch here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.call_text import CallText, nearest
from ...core.old_names import in_words
from ...core.spec import EXTEND_MODES, require_word
from .decode.case import DecodeCase
from .extend.case import ExtendCase
from .form import NamedCase
from .item import Item
from .mla.case import DENSE, SPARSE, MlaCase

if TYPE_CHECKING:
    from .base import Bench, Subject

Case = NamedCase
"""A case of any kind."""
CALLS: dict[str, type[Case]] = {
    "": DecodeCase,
    "extend": ExtendCase,
    "mla": MlaCase,
}
"""Kind of an attention call -> its class."""
PACKAGE = Path(__file__).resolve().parents[2]

DECODE = "decode"
MODES: dict[str, type[Case]] = {
    DECODE: DecodeCase,
    **dict.fromkeys(EXTEND_MODES, ExtendCase),
    **dict.fromkeys((DENSE, SPARSE), MlaCase),
}
"""Mode of an attention call -> its class; of another case it is the kind."""


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
    return class_of(kind).from_dict(fields)


def class_of(kind: str) -> type[Case]:
    """The class of a kind's cases; ValueError for an unknown kind."""
    if kind == "":
        return CALLS[kind]
    require_word("kind of a case", kind, kinds())
    if kind in CALLS:
        return CALLS[kind]
    module = importlib.import_module(case_modules()[kind])
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, NamedCase) and value.kind == kind:
            return value
    raise ImportError(f"{module.__name__} must have a case of kind {kind!r}, it has none")


def kinds() -> list[str]:
    """Every kind that has a name, sorted."""
    return sorted({*CALLS, *case_modules()} - {""})


@cache
def case_modules() -> dict[str, str]:
    """The kind of cases that are no attention calls -> the module that has it."""
    root = __package__.partition(".")[0]
    modules = {}
    for path in sorted(PACKAGE.glob("*/*/case.py")):
        room, kind, _ = path.relative_to(PACKAGE).parts
        modules[kind] = f"{root}.{room}.{kind}.case"
    return modules


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
    text = in_words(text)
    stated = re.search(r"(?<!\S)mode=(\S+)", text)
    mode = stated[1] if stated else DECODE
    cls = _class_of_mode(mode)
    said = CallText.read(text, own=cls.own_words)
    said.require_only(f"mode={mode}", (*cls.words, *cls.own_words))
    return cls.from_said(said)


def _class_of_mode(mode: str) -> type[Case]:
    if mode in MODES:
        return MODES[mode]
    modes = [*MODES, *case_modules()]
    if mode not in modes:
        near = nearest(mode, modes)
        raise ValueError(f"mode must be one of {', '.join(modes)}, got {mode!r}{near}")
    return class_of(mode)
