"""Who answers a view: the published records of a study, or this GPU; and what can be chosen there.

Records offer what they hold and nothing else. This GPU offers the usual sizes, and takes any: what
it has measured is kept in records of the study `explorer`, which is not published.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from packaging.version import Version

from ..core.backends.table import BACKENDS, COMPARED, MLA_BACKENDS
from ..core.spec import LENGTHS, MLA, require_word
from ..kinds.decode.case import DecodeCase
from ..kinds.mla.case import MlaCase
from ..run import store
from ..run.record import Record, machine_slug
from ..run.study import describe, mode
from ..studies import STUDIES
from .choices import AXES, LIVE, NAMES, ROUNDS, Choices, model_of, variant_of

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
        f"{heads} heads, {rest}"
        for heads in (128, 16)
        for rest in ("dense, bfloat16", "top 2048, bfloat16", "top 2048, fp8-656")
    ),
    "page_size": (64, 1),
    "backends": MLA_BACKENDS,
    "usual": ("flashinfer-mla-fa2", "flashinfer-mla-fa3"),
}
PREFERRED = {"timer": "graph", "page_size": 16, "lengths": "fixed", "batch": 16, "kv_len": 8192}
BASELINES = ("flashinfer-fa2", "flashinfer-mla-fa2")
"""What others are compared with, where it is among the backends: the kernel of most releases."""


@dataclass(frozen=True)
class Shelf:
    """The records of a study on one machine."""

    name: str
    machine: str
    records: tuple[Record, ...]
    is_open = False

    def options(self, axis: str, before: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of `axis`, or backends, on record with the choices `before` it, in order."""
        order = (lambda release: Version(release or "0")) if axis == "release" else None
        return tuple(sorted(self._counted(axis, before), key=order))

    def usual(self, axis: str, before: Mapping[str, Any]) -> Any:
        """The value that most records have; of backends all."""
        if axis == "backends":
            return self.options(axis, before)
        return self._counted(axis, before).most_common(1)[0][0]

    def unavailable(self) -> str:
        """Nothing: records are served anywhere."""
        return ""

    def _counted(self, axis: str, before: Mapping[str, Any]) -> Counter[Any]:
        same = {name: value for name, value in before.items() if name != "release"}
        fits = [place for place in self._places if same.items() <= place.items()]
        if "release" in before:
            fits = [p for p in fits if fits_release(p["backends"], p["release"], before["release"])]
        if axis == "release":
            fits = [p for p in fits if p["release"]] or fits
        return Counter(place[axis] for place in fits)

    @cached_property
    def _places(self) -> tuple[dict[str, Any], ...]:
        """Where each record of a call lies on the axes, with its model and backend."""
        calls = ((r.item, r.item.case) for r in self.records)
        return tuple(
            {
                "model": model_of(case),
                "backends": item.backend,
                "release": item.release,
                "timer": item.timer,
                "variant": variant_of(case.spec),
                "page_size": case.spec.page_size,
                "lengths": case.lengths,
                "batch": case.batch_size,
                "kv_len": case.kv_len,
            }
            for item, case in calls
            if isinstance(case, DecodeCase | MlaCase) and not case.seed
        )


@dataclass(frozen=True)
class ThisGpu:
    """This machine. It `is_open`: a value may be chosen that is not among the options."""

    device: str = "cuda"
    ceilings: tuple[str, ...] = ("copy", "matmul")
    name: str = LIVE
    is_open = True

    def options(self, axis: str, before: Mapping[str, Any]) -> tuple[Any, ...]:
        """The usual sizes; a backend that cannot run is offered, and says why when measured."""
        return (SIZES | (LATENT if before["model"] == MLA else DENSE))[axis]

    def usual(self, axis: str, before: Mapping[str, Any]) -> Any:
        """The first; of backends FlashInfer's two kernels."""
        offered = self.options("usual" if axis == "backends" else axis, before)
        return offered if axis == "backends" else offered[0]

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


Source = Shelf | ThisGpu


def release_of(backend: str, release: str) -> str:
    """The release that a backend has where `release` is chosen: none for other libraries'."""
    return release if backend.partition("-")[0] in COMPARED else ""


def fits_release(backend: str, own: str, release: str) -> bool:
    """Whether a backend's record of release `own` belongs to a view of `release`."""
    return own in (release, release_of(backend, release))


def studies_of(model: str) -> dict[str, str]:
    """Study -> machine, of all whose published records hold cases of `model`."""
    require_word("model", model, NAMES)
    named = os.environ.get("ATTNLIB_MACHINE")
    own = [s for s in STUDIES.values() if not s.borrows and model in map(model_of, s.cases)]
    found = {study.name: named or study.reference_machine for study in own}
    return {name: machine for name, machine in found.items() if machine in store.machines(name)}


def usual_records(model: str) -> str:
    """Who answers where nobody was asked: live in live mode, else the first study with the model.

    Live also where live cannot be had, and where no study has the model.
    """
    return LIVE if _mode()[0] == LIVE else next(iter(studies_of(model)), LIVE)


def source_of(model: str, records: str) -> Source:
    """The source called `records` (empty: `usual_records`); ValueError lists those there are."""
    studies = studies_of(model)
    if not studies and not records and why_not_live():
        raise ValueError(f"no records on {model} are published; it is measured live only, on a GPU")
    name = records or usual_records(model)
    if name == LIVE:
        return ThisGpu()
    if name not in studies:
        have = ", ".join((LIVE, *studies))
        raise ValueError(f"records must be one of {have}, which can serve {model}; got {records!r}")
    return _shelf(name, studies[name], store.stamp(name, studies[name]))


@lru_cache(maxsize=4)
def _shelf(study: str, machine: str, stamp: object) -> Shelf:
    # The stamp is of the files as they were: changed ones are read again.
    return Shelf(study, machine, tuple(store.read(study, machine)))


def why_not_live() -> str:
    """Why nothing can be measured here, or the empty string."""
    asked, problem = _mode()
    if asked == LIVE:
        return problem
    if os.environ.get("ATTNLIB_MODE") == "replay":
        return "ATTNLIB_MODE=replay asks for records; unset it to measure on a CUDA GPU"
    return "no CUDA GPU is here: torch sees none"


def _mode() -> tuple[str, str]:
    """`live` or `replay`, and why it cannot be had, or the empty string."""
    try:
        return mode(), ""
    except (RuntimeError, ValueError) as error:
        return LIVE, str(error)


@dataclass(frozen=True)
class Narrowed:
    """Choices, what could be chosen instead, and a note for each wish that could not be had."""

    choices: Choices
    options: dict[str, tuple[Any, ...]]
    notes: tuple[str, ...]


def narrow(source: Source, asked: Mapping[str, Any], *, strict: bool = True) -> Narrowed:
    """Choose each axis of `asked["model"]`: as asked (None is no wish), or what is usual.

    An axis offers what the source has for the axes before it; usual is the size nearest to that of
    `PREFERRED`, else what the source says. A wish that cannot be had is a ValueError listing what
    can or, if not `strict`, a note.
    """
    made: dict[str, Any] = {"model": asked["model"]}
    options: dict[str, tuple[Any, ...]] = {}
    notes: list[str] = []

    def refuse(axis: str, wish: Any, instead: str) -> None:
        if strict:
            have = ", ".join(map(repr, options[axis]))
            why = f"{source.name!r} has no other for the choices before it"
            raise ValueError(f"{axis} must be one of {have}: {why}; got {wish!r}")
        name = axis.replace("_", " ")
        notes.append(f"{name} {wish!r} is not on record with these choices{instead}.")

    def choose(axis: str, usual: Any) -> None:
        wish = asked.get(axis)
        made[axis] = wish if wish in options[axis] else usual
        if wish is not None and wish != made[axis]:
            refuse(axis, wish, f", {usual!r} is shown" if usual else "")

    for axis in AXES:
        options[axis] = source.options(axis, made)
        if source.is_open and asked.get(axis) not in (None, *options[axis]):
            options[axis] += (asked[axis],)
        choose(axis, _usual(source, axis, made, options[axis]))
    options["backends"] = source.options("backends", made)
    wishes = asked.get("backends") or ()
    for name in wishes:
        if name not in options["backends"]:
            refuse("backends", name, "")
    picked = tuple(name for name in options["backends"] if name in wishes)
    made["backends"] = options["against"] = picked or source.usual("backends", made)
    baselines = (name for name in BASELINES if name in options["against"])
    choose("against", next(baselines, options["against"][0]))
    rounds = ROUNDS if asked.get("rounds") is None else asked["rounds"]
    return Narrowed(Choices(records=source.name, rounds=rounds, **made), options, tuple(notes))


def _usual(source: Source, axis: str, before: Mapping[str, Any], options: tuple[Any, ...]) -> Any:
    usual = PREFERRED.get(axis)
    if usual in options:
        return usual
    if isinstance(usual, int):
        return min(options, key=lambda size: abs(math.log(size / usual)))
    return source.usual(axis, before)
