"""Who answers: the published records of a study, or this GPU.

Both say what can be chosen (`options`) and what is on record (`records`). Records offer what they
hold and nothing else. This GPU offers the usual sizes, and takes any: what it has measured is kept
in records of the study `explorer`, which is not published.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

from ..core.backends import BACKENDS, MLA_BACKENDS
from ..core.spec import LENGTHS
from ..run import store
from ..run.record import Record, machine_slug
from ..run.study import DISTRIBUTIONS, Study, describe, mode
from ..studies import STUDIES
from .choices import LIVE
from .shapes import MLA, model_of, require_model, variant_of

STUDY = "explorer"
"""Whose records hold what was measured here."""
SIZES = {
    "batch": tuple(2**n for n in range(10)),
    "kv_len": tuple(2**n for n in range(7, 18)),
    "lengths": LENGTHS,
    "timer": ("graph", "graph-cold", "eager", "profiler"),
    "release": ("",),
}
"""What this GPU offers of every model."""
DENSE = {
    "variant": ("bfloat16", "float16", "bfloat16/float8_e4m3fn", "float8_e4m3fn"),
    "page_size": (1, 16, 32, 64, 128),
    "backends": BACKENDS,
    "usual": ("flashinfer-fa2", "flashinfer-fa3"),
}
LATENT = {
    "variant": tuple(
        f"{heads} heads, {read}, {kv_format}"
        for heads in (128, 16)
        for read, kv_format in (
            ("dense", "bfloat16"),
            ("top 2048", "bfloat16"),
            ("top 2048", "fp8-656"),
        )
    ),
    "page_size": (64, 1),
    "backends": MLA_BACKENDS,
    "usual": ("flashinfer-mla-fa2", "flashinfer-mla-fa3"),
}


class Source(Protocol):
    """What answers a view."""

    name: str
    is_open: bool
    """Whether a value may be chosen that is not among the options."""

    def options(self, model: str, axis: str, chosen: Mapping[str, Any]) -> tuple[Any, ...]:
        """What `axis`, or `backends`, can be, the values of earlier axes being `chosen`."""

    def usual(self, model: str, axis: str, chosen: Mapping[str, Any]) -> Any:
        """What it is where nobody asks; of `backends` a tuple."""

    @property
    def records(self) -> tuple[Record, ...]:
        """All that is on record, ceilings too."""

    def unavailable(self) -> str:
        """Why it cannot answer here, or the empty string."""


@dataclass(frozen=True)
class Shelf:
    """The records of a study on one machine."""

    name: str
    machine: str
    records: tuple[Record, ...]
    is_open = False

    @cached_property
    def _entries(self) -> tuple[dict[str, Any], ...]:
        found = ({**axes_of(r), "model": model_of(r.item.case)} for r in self.records)
        return tuple(entry for entry in found if entry["model"] and not entry["seed"])

    def options(self, model: str, axis: str, chosen: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values that are on record, in order; releases oldest first."""
        return tuple(sorted(self._counted(model, axis, chosen), key=_order(axis)))

    def usual(self, model: str, axis: str, chosen: Mapping[str, Any]) -> Any:
        """The value that most records have; all backends."""
        if axis == "backends":
            return self.options(model, axis, chosen)
        return self._counted(model, axis, chosen).most_common(1)[0][0]

    def unavailable(self) -> str:
        """Records are served anywhere."""
        return ""

    def _counted(self, model: str, axis: str, chosen: Mapping[str, Any]) -> Counter[Any]:
        wanted = {**chosen, "model": model}
        release = wanted.pop("release", None)
        name = "backend" if axis == "backends" else axis
        fits = [e for e in self._entries if wanted.items() <= e.items()]
        if release is not None:
            fits = [e for e in fits if fits_release(e["backend"], e["release"], release)]
        if axis == "release" and any(e["release"] for e in fits):
            fits = [e for e in fits if e["release"]]
        return Counter(e[name] for e in fits)


@dataclass(frozen=True)
class ThisGpu:
    """This machine; `device` and `ceilings` are other than the GPU's in tests only."""

    device: str = "cuda"
    ceilings: tuple[str, ...] = ("copy", "matmul")
    name: str = LIVE
    is_open = True

    def options(self, model: str, axis: str, chosen: Mapping[str, Any]) -> tuple[Any, ...]:
        """The usual sizes; a backend that cannot run is offered, and says why when measured."""
        return _offers(model)[axis]

    def usual(self, model: str, axis: str, chosen: Mapping[str, Any]) -> Any:
        """The first; FlashInfer's two kernels."""
        return _offers(model)["usual"] if axis == "backends" else _offers(model)[axis][0]

    def unavailable(self) -> str:
        """Why nothing can be measured here: no GPU, or records were asked for."""
        return why_not_live() if self.device == "cuda" else ""

    @property
    def machine(self) -> str:
        """Folder of this machine's records."""
        return machine_slug(describe(self.device))

    @property
    def records(self) -> tuple[Record, ...]:
        """What was measured here, so far; a killed writer's half line is set aside first."""
        return tuple(store.recover(STUDY, self.machine))


def release_of(backend: str, release: str) -> str:
    """The release that a backend has where `release` is chosen: none for other libraries'."""
    return release if backend.partition("-")[0] in DISTRIBUTIONS else ""


def fits_release(backend: str, own: str, release: str) -> bool:
    """Whether a backend's record of release `own` belongs to a view of `release`."""
    return own in (release, release_of(backend, release))


def axes_of(record: Record) -> dict[str, Any]:
    """A record's place on the axes of `choices`, with backend and seed; a ceiling has few."""
    item, case = record.item, record.item.case
    place = {"backend": item.backend, "release": item.release, "timer": item.timer}
    if not model_of(case):
        return {**place, "seed": 0}
    sizes = {"batch": case.batch_size, "kv_len": case.kv_len, "lengths": case.lengths}
    spec = {"variant": variant_of(case.spec), "page_size": case.spec.page_size}
    return {**place, **sizes, **spec, "seed": case.seed}


def studies_of(model: str) -> dict[str, str]:
    """Study -> machine, of all whose published records hold cases of `model`."""
    require_model(model)
    named = os.environ.get("ATTNLIB_MACHINE", "")
    found = {s.name: named or s.reference_machine for s in STUDIES.values() if _holds(s, model)}
    return {name: at for name, at in found.items() if at in store.machines(name)}


def usual_records(model: str) -> str:
    """Who answers where nobody was asked: live in live mode, also where that cannot be had.

    In replay mode the first study that has the model, and live where none has.
    """
    studies = studies_of(model)
    try:
        return next(iter(studies), LIVE) if mode() == "replay" else LIVE
    except (RuntimeError, ValueError):
        return LIVE


def source_of(model: str, records: str) -> Source:
    """The source called `records`; empty means `usual_records`.

    ValueError for a study without records of the model, which lists those that have some.
    """
    studies = studies_of(model)
    name = records or usual_records(model)
    if not studies and not records and why_not_live():
        raise ValueError(f"no records on {model} are published; it is measured live only, on a GPU")
    if name == LIVE:
        return ThisGpu()
    if name not in studies:
        have = ", ".join((LIVE, *studies))
        raise ValueError(f"records must be one of {have}, which can serve {model}; got {records!r}")
    return _shelf(name, studies[name])


def why_not_live() -> str:
    """Why nothing can be measured here, or the empty string."""
    try:
        if mode() == LIVE:
            return ""
    except (RuntimeError, ValueError) as error:
        return str(error)
    if os.environ.get("ATTNLIB_MODE") == "replay":
        return "ATTNLIB_MODE=replay asks for records; unset it to measure on a CUDA GPU"
    return "no CUDA GPU is here: torch sees none"


def _shelf(study: str, machine: str) -> Shelf:
    return _read_shelf(study, machine, store.stamp(study, machine))


@lru_cache(maxsize=4)
def _read_shelf(study: str, machine: str, stamp: object) -> Shelf:
    # The stamp is the file as it was: a changed one is read again.
    return Shelf(study, machine, tuple(store.read(study, machine)))


def _offers(model: str) -> dict[str, Any]:
    return SIZES | (LATENT if model == MLA else DENSE)


def _holds(study: Study, model: str) -> bool:
    return not study.borrows and any(model_of(case) == model for case in study.cases)


def _order(axis: str) -> Any:
    if axis != "release":
        return None
    from packaging.version import Version

    return lambda release: Version(release or "0")
