"""From what was asked to choices that a source can answer, axis by axis.

Each axis offers what the source has for the axes before it. What nobody asked for is a usual size
or the nearest to it, else what the source says is usual; the view shows which it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .choices import AXES, ROUNDS, Choices
from .sources import Source

PREFERRED = {"timer": "graph", "page_size": 16, "lengths": "fixed", "batch": 16, "kv_len": 8192}
BASELINES = ("flashinfer-fa2", "flashinfer-mla-fa2")
"""What others are compared with, where it is among the backends: the kernel of most releases."""


@dataclass(frozen=True)
class Narrowed:
    """Choices, what could be chosen instead, and a line for each wish that could not be had."""

    choices: Choices
    options: dict[str, tuple[Any, ...]]
    notes: tuple[str, ...]


def narrow(
    source: Source, model: str, wanted: Mapping[str, Any], *, strict: bool = True
) -> Narrowed:
    """Choose every axis of `model`: as `wanted` (None is no wish), or what is usual.

    A wish that the source cannot answer is a ValueError listing what it has, or, if not `strict`,
    a note beside the value taken instead.
    """
    step = _Step(source, model, wanted, strict)
    for axis in AXES:
        step.choose(axis)
    backends = step.choose_backends()
    against = step.choose_baseline(backends)
    rounds = ROUNDS if wanted.get("rounds") is None else wanted["rounds"]
    own = {"backends": backends, "against": against, "rounds": rounds}
    choices = Choices(model, source.name, **step.chosen, **own)
    return Narrowed(choices, step.options, tuple(step.notes))


class _Step:
    """Walks the axes; what it has chosen narrows what comes next."""

    def __init__(self, source: Source, model: str, wanted: Mapping[str, Any], strict: bool) -> None:
        self.source, self.model, self.wanted, self.strict = source, model, wanted, strict
        self.chosen: dict[str, Any] = {}
        self.options: dict[str, tuple[Any, ...]] = {}
        self.notes: list[str] = []

    def choose(self, axis: str) -> None:
        """Choose one axis and keep its options."""
        options = self.source.options(self.model, axis, self.chosen)
        value = self.wanted.get(axis)
        if value is not None and value not in options and self.source.is_open:
            options = (*options, value)
        usual = self._usual(axis, options)
        if value is not None and value not in options:
            self._refuse(axis, value, options, instead=usual)
            value = None
        self.options[axis] = options
        self.chosen[axis] = usual if value is None else value

    def choose_backends(self) -> tuple[str, ...]:
        """The backends wanted, of those there are, in the order of the options."""
        options = self.source.options(self.model, "backends", self.chosen)
        self.options["backends"] = options
        usual = self.source.usual(self.model, "backends", self.chosen)
        wanted = tuple(self.wanted.get("backends") or ())
        for name in (name for name in wanted if name not in options):
            self._refuse("backends", name, options, instead="")
        return tuple(name for name in options if name in wanted) or usual

    def choose_baseline(self, backends: tuple[str, ...]) -> str:
        """The backend that the others are compared with."""
        self.options["against"] = backends
        usual = next((name for name in BASELINES if name in backends), backends[0])
        value = self.wanted.get("against")
        if value is not None and value not in backends:
            self._refuse("against", value, backends, instead=usual)
            value = None
        return usual if value is None else value

    def _usual(self, axis: str, options: tuple[Any, ...]) -> Any:
        usual = PREFERRED.get(axis)
        if usual in options:
            return usual
        if isinstance(usual, int):
            return min(options, key=lambda size: abs(math.log(size / usual)))
        return self.source.usual(self.model, axis, self.chosen)

    def _refuse(self, axis: str, value: Any, options: tuple[Any, ...], *, instead: Any) -> None:
        if self.strict:
            have = ", ".join(repr(option) for option in options)
            raise ValueError(
                f"{axis} must be one of {have}: {self.source.name!r} has no other for the choices "
                f"before it; got {value!r}"
            )
        shown = f", {instead!r} is shown" if instead else ""
        name = axis.replace("_", " ")
        self.notes.append(f"{name} {value!r} is not on record with these choices{shown}.")
