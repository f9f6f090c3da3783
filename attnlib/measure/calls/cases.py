"""The text of a case, and what measures it.

What a text (`core.call_text`) says is a case of the class that its mode names. No torch here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...core.call_text import CallText, did_you_mean
from ...core.spec import EXTEND_MODES
from .decode.case import DecodeCase
from .extend.case import ExtendCase
from .form import DECODE, NamedCase, class_of, kinds
from .mla.case import DENSE, SPARSE, MlaCase

if TYPE_CHECKING:
    from .base import Bench, Subject

MODES: dict[str, type[NamedCase]] = {
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


def parse_cases(lines: Iterable[str]) -> tuple[NamedCase, ...]:
    """The cases of `lines`, each once; empty lines and those from `#` on are skipped.

    ValueError names the line that is no call.
    """
    cases: list[NamedCase] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        try:
            if text and not text.startswith("#"):
                cases.append(read_case(text))
        except ValueError as error:
            raise ValueError(f"line {number} of the cases: {error}") from error
    return tuple(dict.fromkeys(cases))


def read_case(text: str) -> NamedCase:
    """The case of a text (`core.call_text`).

    Inverse of a case's `label`. ValueError names the word, what it must be and what it was.
    """
    stated = re.search(r"(?<!\S)mode=(\S+)", text)
    mode = stated[1] if stated else DECODE
    cls = _class_of_mode(mode)
    return case_of(CallText.read(text, own=cls.own_words))


def case_of(said: CallText) -> NamedCase:
    """The case of what a text says; of a model with a latent cache, a call of MLA."""
    said = said.of_latent_model
    mode = said.mode or DECODE
    cls = _class_of_mode(mode)
    said.require_only(f"mode={mode}", (*cls.words, *cls.own_words))
    return cls.from_said(said)


def _class_of_mode(mode: str) -> type[NamedCase]:
    if mode in MODES:
        return MODES[mode]
    calls = {cls.kind for cls in MODES.values()}
    modes = [*MODES, *sorted({*kinds()} - calls)]
    if mode not in modes:
        near = did_you_mean(mode, modes)
        raise ValueError(f"mode must be one of {', '.join(modes)}, got {mode!r}{near}")
    return class_of(mode)
