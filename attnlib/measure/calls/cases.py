"""The kinds of cases: the JSON form and the key of a case, and what measures it.

Attention calls are here. A case that only one question uses is `case.py` in a folder of a room,
found by the folder's name, which is its kind: it is imported when a record of it is read. `kind` is
a field of the JSON form of every case but `DecodeCase`, which came first. The keys of
decode, extend and MLA cases are read back from lines of text: `32/8,d128,p16,b16,k8192` is a decode
case, `prefill_paged,q512,` before it makes an extend case. No torch here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.spec import require_word
from .decode.case import DecodeCase
from .extend.case import MODES, ExtendCase
from .form import NamedCase, flat_fields
from .item import Item
from .mla.case import MlaCase

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

_LENGTHS = r"\d+(?:\+\d+)*"
_DECODE = (
    r"(?P<num_qo_heads>\d+)/(?P<num_kv_heads>\d+),d(?P<head_dim>\d+),p(?P<page_size>\d+)"
    r",b(?P<batch_size>\d+),k(?P<kv_len>\d+)(?:,w(?P<window>\d+))?"
    r"(?:,(?P<dtype>(?:bfloat16|float)\w*)(?:/(?P<kv_dtype>\w+))?)?"
    rf"(?:,(?!seed|context)(?P<lengths>[a-z_]+|{_LENGTHS}))?(?:,seed(?P<seed>\d+))?"
    r"(?:,context(?P<context>\d+))?"
)
_EXTEND = (
    rf"(?P<mode>{'|'.join(MODES)}),q(?P<q_len>\d+),(?:(?P<mask>tree|chain|causal|full),)?"
    rf"(?:(?P<q_lengths>{_LENGTHS}),)?{_DECODE}"
)
_MLA = (
    r"mla,(?P<num_qo_heads>\d+),heads,(?:dense|top,(?P<top_k>\d+)),(?P<kv_format>[\w-]+)"
    r",page,(?P<page_size>\d+),batch,(?P<batch_size>\d+),kv_len,(?P<kv_len>\d+)"
    rf"(?:,(?!seed|q_len|context)(?P<lengths>[a-z_]+|{_LENGTHS}))?(?:,seed,(?P<seed>\d+))?"
    r"(?:,q_len,(?P<q_len>\d+))?(?:,context,(?P<context>\d+))?"
)
KEYS: dict[str, type[DecodeCase | ExtendCase | MlaCase]] = {
    _DECODE: DecodeCase,
    _EXTEND: ExtendCase,
    _MLA: MlaCase,
}
"""Pattern of a key, its groups named as fields -> class; what a key leaves out is the default."""


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

    ValueError names the line that is no key.
    """
    cases: list[Case] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        try:
            if text and not text.startswith("#"):
                cases.append(_case_of_key(text))
        except ValueError as error:
            raise ValueError(f"line {number} of the cases: {error}") from error
    return tuple(dict.fromkeys(cases))


def _case_of_key(text: str) -> Case:
    for pattern, cls in KEYS.items():
        match = re.fullmatch(pattern, text)
        if not match:
            continue
        form: dict[str, Any] = {}
        for field in flat_fields(cls):
            word = match.groupdict().get(field.name)
            if word:
                read: Any = field.type
                form[field.name] = read(word)
            elif field.default is not MISSING:
                form[field.name] = field.default
        return cls.from_dict(form)
    raise ValueError(f"it must be a key such as 32/8,d128,p16,b16,k8192; got {text!r}")
