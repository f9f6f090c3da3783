"""The keys of cases, and what measures a case.

The keys of decode, extend and MLA cases are read back from lines of text: `32/8,d128,p16,b16,k8192`
is a decode case, `prefill_paged,q512,` before it makes an extend case. No torch here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any

from .decode.case import DecodeCase
from .extend.case import MODES, ExtendCase
from .form import NamedCase, flat_fields
from .mla.case import MlaCase

if TYPE_CHECKING:
    from .base import Bench, Subject

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


def parse_cases(lines: Iterable[str]) -> tuple[NamedCase, ...]:
    """The cases of `lines`, each once; empty lines and those from `#` on are skipped.

    ValueError names the line that is no key.
    """
    cases: list[NamedCase] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        try:
            if text and not text.startswith("#"):
                cases.append(_case_of_key(text))
        except ValueError as error:
            raise ValueError(f"line {number} of the cases: {error}") from error
    return tuple(dict.fromkeys(cases))


def _case_of_key(text: str) -> NamedCase:
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
