"""Which backend decodes fastest, by measurement: rates of a GPU's kernels, and what is near adds.

A backend's time is predicted from its work plan with rates fitted to all measured calls of its
kernel (`times`, `kernel_of`). The `NEIGHBOURS` nearest cases, of whatever layers, correct it by the
mean of their measured over predicted times; nearer ones count more (`OCTAVES`). How sure the choice
is follows from its lead over the second and from how much the neighbours differ.

So any layer is answered, with the plan of its own heads. A kernel that was not measured has the
rates of the nearest that were (`apart`), which makes the choice less sure.

Constants were chosen by leaving out measured layers (LOG.md, 2026-11-23).
`save` writes a policy as JSON, `load` needs NumPy alone; `python -m attnlib policy` makes one.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ..backends.limits import why_not
from ..backends.table import entry_of
from ..spec import ELEMENT_BYTES, AttnSpec
from .plans import Lengths, can_plan, lengths
from .times import Gpu, Rates, planned_load, predict

T = TypeVar("T")
Kernel: TypeAlias = tuple[int, int, str, str]
"""Group size (1 where it changes nothing), head_dim, dtypes of queries and cache."""
SCHEMA, KIND = 3, "attnlib decode policy"
SINGLE = ("gpu", "gpu_id", "num_sms", "l2_mib", "study", "timer")
"""Fields of a policy that are one word or number."""
NEIGHBOURS = 16
OCTAVES = np.array([0.35, 0.3, 0.25, 0.35, 0.15, 0.07, 0.3, 0.6, 0.4])
"""What an octave of each coordinate counts: batch size, mean length, longest over mean, KV heads,
group size, page size, head_dim, bytes of a query's and of a cache's element."""
NEAREST = 0.2
"""Nearer neighbours count no more than this far ones: rounds differ by as much."""
KIN = 3
"""Measured kernels that answer for one that was not."""
APART = np.array([3.0, 6.0, 2.0, 2.0])
"""What an octave counts between two kernels: of group size, head_dim, bytes of both elements."""
UNSURE, WIDER = 0.06, 1.5
"""Log ratio by which a kernel that was not measured lies off what its kin say, an octave away; and
what spreads are multiplied by, so that choices are as sure as right in layers left out."""
NOISE = 0.01
"""Log ratio that rounds of one case differ by in the median (A/A); no lead is surer than it."""


@dataclass(frozen=True)
class Point:
    """A measured case: its lengths in brief, and microseconds of each backend: the measured median,
    and what the fitted rates give for its plan."""

    batch_size: int
    mean_len: float
    longest: int
    run_us: Mapping[str, float]
    predicted_us: Mapping[str, float]

    def log_error(self, backend: str) -> float:
        """Log of measured over predicted time."""
        return math.log(self.run_us[backend] / self.predicted_us[backend])


@dataclass(frozen=True)
class Pick:
    """A choice: `slowdown` is each backend's predicted time over the chosen one's.

    `confidence` is the chance that no other is faster, from 0.5 (a tie) to 1. `inside` says whether
    the batch lies within the measured sizes and lengths. `refused` backends cannot run the layer,
    ran none of its cases, or have no work plan there. `apart` is how far the measured kernels lie
    whose rates the choice has: 0 for its own.
    """

    backend: str
    slowdown: Mapping[str, float]
    confidence: float
    inside: bool
    refused: tuple[str, ...]
    apart: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What a call takes, in us, and the log ratio that it may be off by."""

    us: float
    spread: float


def _once(method: Callable[..., T]) -> Callable[..., T]:
    """A policy does not change: what `method` gave for the same arguments is kept."""

    def kept(self: "Policy", *asked: Any) -> T:
        key = method.__name__, asked
        if key not in self._kept:
            self._kept[key] = method(self, *asked)
        return self._kept[key]

    return wraps(method)(kept)


@dataclass(frozen=True)
class Policy:
    """What GPUs of one kind measured: cases by layer, rates by backend and kernel.

    `study`, `timer` and `releases` say how; `releases` has the release of each backend whose
    library has several on record.
    """

    gpu: str
    gpu_id: str
    num_sms: int
    l2_mib: float
    study: str
    timer: str
    releases: Mapping[str, str]
    points: Mapping[AttnSpec, tuple[Point, ...]]
    rates: Mapping[str, Mapping[Kernel, Rates]]

    def choose(self, spec: AttnSpec, seq_lens: Lengths, *, backends: Sequence[str] = ()) -> Pick:
        """The fastest of `backends` (default: all measured) for requests of `seq_lens` tokens.

        Raises ValueError for lengths below 1, an unknown backend, or where none can run the layer.
        """
        told = self.predict(spec, seq_lens, backends=backends)
        if not told:
            asked = ", ".join(backends or self.backends)
            raise ValueError(f"backends must hold one that ran {spec}, got {asked}")
        order = sorted(told, key=lambda name: told[name].us)
        first, place = order[0], _place(spec, lengths(seq_lens))[:3]
        sizes = self._cases(first)[0][:, :3]
        return Pick(
            backend=first,
            slowdown={name: told[name].us / told[first].us for name in order},
            confidence=confidence_of(told.values()),
            inside=bool(((sizes.min(0) <= place) & (place <= sizes.max(0))).all()),
            refused=tuple(name for name in backends or self.backends if name not in told),
            apart=self.kin(first, kernel_of(first, spec))[0][0],
        )

    def predict(
        self, spec: AttnSpec, seq_lens: Lengths, *, backends: Sequence[str] = ()
    ) -> dict[str, Prediction]:
        """What a call takes, by each of `backends` that can run the layer.

        Raises ValueError for lengths below 1 and for an unknown backend.
        """
        lens = lengths(seq_lens)
        if unknown := [name for name in backends if name not in self.backends]:
            known = ", ".join(self.backends)
            raise ValueError(f"backends must be of {known}, got {', '.join(unknown)}")
        place = _place(spec, lens)
        able = (name for name in backends or self.backends if self._takes(name, spec))
        return {name: self._say(name, spec, lens, place) for name in able}

    def _say(self, name: str, spec: AttnSpec, lens: np.ndarray, place: np.ndarray) -> Prediction:
        places, errors = self._cases(name)
        near, octaves = _nearest(places, place)
        mean, spread = _mean(errors[near], octaves)
        kin = self.kin(name, kernel_of(name, spec))
        load = planned_load(name, spec, lens.tobytes(), Gpu(self.num_sms, self.l2_mib))
        times = [predict(self.rates[name][kernel], [load]) for _, kernel in kin]
        log_us, differ = _mean(np.log(times)[:, 0], np.array([away for away, _ in kin]))
        unsure = math.hypot(spread, differ, UNSURE * kin[0][0])
        return Prediction(math.exp(log_us + mean), WIDER * unsure)

    @_once
    def kin(self, name: str, kernel: Kernel) -> list[tuple[float, Kernel]]:
        """The measured kernels whose rates answer, nearest first: itself, or `KIN` others."""
        found = sorted((apart(kernel, each), each) for each in self.rates[name])
        return found[: KIN if found[0][0] else 1]

    @_once
    def _takes(self, name: str, spec: AttnSpec) -> bool:
        """Whether the backend can run the layer and has a plan there."""
        if spec in self.points:
            return any(name in point.run_us for point in self.points[spec])
        entry = entry_of(name)
        if entry.library.compared:
            release = self.releases.get(name, "")
            refused = bool(why_not(entry.asks, spec, mode="decode", release=release))
        else:
            refused = spec.dtype != spec.kv_dtype
        return not refused and can_plan(name, spec)

    @_once
    def _cases(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Of the cases that a backend ran the places [cases, 9] and log errors [cases]."""
        points, places = self._every
        ran = [at for at, point in enumerate(points) if name in point.run_us]
        return places[ran], np.array([points[at].log_error(name) for at in ran])

    @cached_property
    def _every(self) -> tuple[list[Point], np.ndarray]:
        every = [(spec, point) for spec, points in self.points.items() for point in points]
        places = _scaled([_sizes(s, p.batch_size, p.mean_len, p.longest) for s, p in every])
        return [point for _, point in every], places

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def backends(self) -> tuple[str, ...]:
        """Every backend that ran at least one case, sorted."""
        return tuple(sorted({name for point in self._every[0] for name in point.run_us}))


def save(policy: Policy, path: Path | str) -> Path:
    """Write `policy` as one JSON file, whole or not at all; raises OSError where it cannot."""
    form: dict[str, Any] = {"schema": SCHEMA, "kind": KIND}
    form |= {name: getattr(policy, name) for name in (*SINGLE, "releases")}
    form["specs"] = [
        {**asdict(spec), "points": [asdict(point) for point in points]}
        for spec, points in policy.points.items()
    ]
    form["rates"] = [
        {"backend": name, "kernel": kernel, **asdict(rates)}
        for name, kernels in policy.rates.items()
        for kernel, rates in kernels.items()
    ]
    part = Path(f"{path}.{os.getpid()}.part")
    part.write_text(json.dumps(form) + "\n", encoding="utf-8")
    return part.replace(path)


def load(path: Path | str) -> Policy:
    """Read what `save` wrote; ValueError for a file of another kind or schema."""
    form = json.loads(Path(path).read_text(encoding="utf-8"))
    found = (form.get("kind"), form.get("schema")) if isinstance(form, dict) else (None, None)
    if found != (KIND, SCHEMA):
        raise ValueError(f"{path} must be a {KIND!r} of schema {SCHEMA}, got {found}")
    points, rates = {}, dict[str, dict[Kernel, Rates]]()
    for entry in form["specs"]:
        measured = entry.pop("points")
        points[AttnSpec(**entry)] = tuple(Point(**point) for point in measured)
    for entry in form["rates"]:
        kernels = rates.setdefault(entry.pop("backend"), {})
        kernel, entry["token_ns"] = tuple(entry.pop("kernel")), tuple(entry["token_ns"])
        kernels[kernel] = Rates(**entry)
    told = {name: form[name] for name in (*SINGLE, "releases")}
    return Policy(**told, points=points, rates=rates)


def kernel_of(name: str, spec: AttnSpec) -> Kernel:
    """What decides about a backend's rates: on tensor cores heads of any group fill a tile."""
    group = spec.group_size if entry_of(name).family == "cuda-cores" else 1
    return group, spec.head_dim, spec.dtype, spec.kv_dtype


def apart(one: Kernel, other: Kernel) -> float:
    """How far two kernels are from each other, in octaves as `APART` counts them."""
    sizes = [(k[0], k[1], ELEMENT_BYTES[k[2]], ELEMENT_BYTES[k[3]]) for k in (one, other)]
    return float(np.sqrt(((APART * np.diff(np.log2(sizes), axis=0)) ** 2).sum()))


def confidence_of(told: Iterable[Prediction]) -> float:
    """Chance that the fastest is faster than the second, both uncertain by their spread."""
    order = sorted(told, key=lambda each: each.us)
    if len(order) == 1:
        return 1.0
    unsure = math.hypot(order[0].spread, order[1].spread, NOISE)
    return 0.5 * (1 + math.erf(math.log(order[1].us / order[0].us) / unsure / math.sqrt(2)))


def _mean(values: np.ndarray, away: np.ndarray) -> tuple[float, float]:
    """Mean and spread of values, nearer ones counting more."""
    weights = 1 / (away + NEAREST) ** 2
    weights /= weights.sum()
    mean = float(weights @ values)
    return mean, math.sqrt(weights @ (values - mean) ** 2)


def _place(spec: AttnSpec, lens: np.ndarray) -> np.ndarray:
    return _scaled([_sizes(spec, lens.size, float(lens.mean()), int(lens.max()))])[0]


def _nearest(places: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which places are the nearest, and how far."""
    octaves = np.sqrt(((places - place) ** 2).sum(axis=1))
    near = np.argsort(octaves, kind="stable")[:NEIGHBOURS]
    return near, octaves[near]


def _sizes(spec: AttnSpec, batch_size: int, mean_len: float, longest: int) -> tuple[float, ...]:
    """What a case is near another by, as in `OCTAVES`."""
    lens = (batch_size, mean_len, longest / mean_len)
    heads = (spec.num_kv_heads, spec.group_size, spec.page_size, spec.head_dim)
    return (*lens, *heads, ELEMENT_BYTES[spec.dtype], ELEMENT_BYTES[spec.kv_dtype])


def _scaled(sizes: Sequence[tuple[float, ...]]) -> np.ndarray:
    return OCTAVES * np.log2(sizes)
