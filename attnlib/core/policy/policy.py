"""Which backend decodes fastest, by measurement: rates of a GPU, and what its nearest cases add.

A backend's time is predicted from its work plan with rates fitted to the measured cases (`times`).
The `NEIGHBOURS` nearest cases, in log2 of batch size, mean length and longest over mean, correct it
by the mean of their measured over predicted times; nearer ones count more. How sure the choice is
follows from its lead over the second and from how much the neighbours differ.

Rates are of a GPU, backend, group size, head_dim, page size and dtypes, so layers that share these
share them. A layer that was not measured is answered by its nearest of kin (`apart`), with the
plan of its own heads; how far kin disagree makes the choice less sure.

Constants were chosen by leaving out measured cases, those of kin by leaving out measured layers
(LOG.md, 2026-11-21 and 2026-11-23).
`save` writes a policy as JSON, `load` needs NumPy alone; `python -m attnlib policy` makes one.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..backends.limits import why_not
from ..backends.table import entry_of
from ..spec import ELEMENT_BYTES, AttnSpec
from .plans import Lengths, can_plan, lengths, plan
from .times import Gpu, Rates, load_of, predict_by

T = TypeVar("T")
SCHEMA, KIND = 2, "attnlib decode policy"
NEIGHBOURS = 16
SINGLE = ("gpu", "gpu_id", "num_sms", "l2_mib", "study", "timer")
"""Fields of a policy that are one word or number."""
SCALE = np.array([1.0, 1.0, 0.5])
"""What an octave of each coordinate counts: batch size, mean length, longest over mean."""
NEAREST_OCTAVES = 0.5
"""Nearer neighbours count no more than this far ones: rounds differ by as much."""
KIN = 8
"""Measured layers that answer for one that was not."""
APART = np.array([3.0, 0.1, 6.0, 2.0, 2.0])
"""What an octave counts: of group size, page size, head_dim, bytes of a query's and a cache's
element."""
UNSURE, WIDER = 0.06, 2.0
"""Log ratio by which a backend of a layer left out lay off what its kin said, an octave away; and
what spreads of kin are multiplied by, so that choices in layers left out are as sure as right."""
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

    @cached_property
    def place(self) -> np.ndarray:
        """Scaled coordinates [3] of the point."""
        return _scaled(self.batch_size, self.mean_len, self.longest)

    def log_error(self, backend: str) -> float:
        """Log of measured over predicted time."""
        return math.log(self.run_us[backend] / self.predicted_us[backend])


@dataclass(frozen=True)
class Pick:
    """A choice: `slowdown` is each backend's predicted time over the chosen one's.

    `confidence` is the chance that no other is faster, from 0.5 (a tie) to 1. `inside` says whether
    the batch lies within the measured sizes and lengths. `refused` backends cannot run the layer,
    did nowhere, or have no work plan there. `apart` is how far the measured layers lie that answer:
    0 for its own.
    """

    backend: str
    slowdown: Mapping[str, float]
    confidence: float
    inside: bool
    refused: tuple[str, ...]
    nearest: tuple[Point, ...]
    apart: float = 0.0


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
    """What one GPU measured, spec by spec; `study`, `timer` and `releases` say how.

    `releases` has the release of each backend whose library has several on record.
    """

    gpu: str
    gpu_id: str
    num_sms: int
    l2_mib: float
    study: str
    timer: str
    releases: Mapping[str, str]
    points: Mapping[AttnSpec, tuple[Point, ...]]
    rates: Mapping[AttnSpec, Mapping[str, Rates]]

    def choose(self, spec: AttnSpec, seq_lens: Lengths, *, backends: Sequence[str] = ()) -> Pick:
        """The fastest of `backends` (default: all measured) for requests of `seq_lens` tokens.

        Raises ValueError for lengths below 1, an unknown backend, or where none can run the layer.
        """
        lens = lengths(seq_lens)
        if unknown := [name for name in backends if name not in self.backends]:
            known = ", ".join(self.backends)
            raise ValueError(f"backends must be of {known}, got {', '.join(unknown)}")
        asked = tuple(backends) or self.backends
        kin = {name: self.kin(spec, name) for name in asked if self._takes(name, spec)}
        able = tuple(name for name in kin if kin[name])
        if not able:
            raise ValueError(f"backends must hold one that ran {spec}, got {', '.join(asked)}")
        # Of its own cases those count that all ran: a failure says nothing about which is faster.
        shared, place = able if spec in self.points else (), _place(lens)
        predicted, spread, near = {}, {}, {}
        for name in able:
            made = plan(name, spec, lens, num_sms=self.num_sms)
            load = load_of(made, spec, lens, Gpu(self.num_sms, self.l2_mib))
            rates = [self.rates[each][name] for _, each in kin[name]]
            told = [self._say(each, place, (name, *shared)) for _, each in kin[name]]
            off, spreads = np.array([numbers for numbers, _ in told]).T
            means = np.log(predict_by(rates, load)) + off
            weights = np.array([1 / (away + NEAREST_OCTAVES) ** 2 for away, _ in kin[name]])
            predicted[name] = float(np.average(means, weights=weights))
            variance = spreads**2 + (means - predicted[name]) ** 2
            variance += (UNSURE * kin[name][0][0]) ** 2
            wider = 1.0 if spec in self.points else WIDER
            spread[name] = wider * math.sqrt(np.average(variance, weights=weights))
            near[name] = told[0][1]
        order = sorted(able, key=lambda name: predicted[name])
        return Pick(
            backend=order[0],
            slowdown={name: math.exp(predicted[name] - predicted[order[0]]) for name in order},
            confidence=_confidence(order, predicted, spread),
            inside=_within(self._ran_by_all(kin[order[0]][0][1], ())[1], place),
            refused=tuple(name for name in asked if name not in able),
            nearest=near[order[0]],
            apart=kin[order[0]][0][0],
        )

    @_once
    def kin(self, spec: AttnSpec, name: str) -> list[tuple[float, AttnSpec]]:
        """The layers that answer for `spec`, nearest first: itself, or all that share its rates."""
        ran = [
            each for each, points in self.points.items() if any(name in p.run_us for p in points)
        ]
        if spec in self.points:
            return [(0.0, spec)] if spec in ran else []
        found = sorted(((apart(spec, each), at) for at, each in enumerate(ran)))
        count = max(KIN, sum(not away for away, _ in found))
        kin = [(away, ran[at]) for away, at in found[:count]]
        return [each for each in kin if not each[0]] or kin

    @_once
    def _takes(self, name: str, spec: AttnSpec) -> bool:
        """Whether the backend can run the layer and has a plan there."""
        entry = entry_of(name)
        if entry.library.compared:
            release = self.releases.get(name, "")
            refused = bool(why_not(entry.asks, spec, mode="decode", release=release))
        else:
            refused = spec.dtype != spec.kv_dtype
        return (spec in self.points or not refused) and can_plan(name, spec)

    def _say(
        self, spec: AttnSpec, place: np.ndarray, names: tuple[str, ...]
    ) -> tuple[tuple[float, float], tuple[Point, ...]]:
        """By how much `names[0]` was off its rates at `spec`, in the nearest of its cases that all
        of `names` ran: mean and spread of logs, and these cases."""
        points, places, errors = self._ran_by_all(spec, names)
        octaves = np.sqrt(((places - place) ** 2).sum(axis=1))
        near = np.argsort(octaves, kind="stable")[:NEIGHBOURS]
        weights = 1 / (octaves[near] + NEAREST_OCTAVES) ** 2
        weights /= weights.sum()
        mean = float(weights @ errors[near])
        spread = math.sqrt(weights @ (errors[near] - mean) ** 2)
        return (mean, spread), tuple(points[i] for i in near)

    @_once
    def _ran_by_all(
        self, spec: AttnSpec, names: tuple[str, ...]
    ) -> tuple[tuple[Point, ...], np.ndarray, np.ndarray]:
        """The layer's cases that all of `names` ran, their places [cases, 3], and the log errors of
        `names[0]` there [cases]."""
        points = tuple(p for p in self.points[spec] if {*names} <= p.run_us.keys())
        if not points:
            both = ", ".join(sorted({*names}))
            raise ValueError(f"backends must share a case that all ran, {both} do not")
        errors = [point.log_error(name) for point in points for name in names[:1]]
        return points, np.array([point.place for point in points]), np.array(errors)

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def backends(self) -> tuple[str, ...]:
        """Every backend that ran at least one case, sorted."""
        points = (point for points in self.points.values() for point in points)
        return tuple(sorted({name for point in points for name in point.run_us}))


def save(policy: Policy, path: Path) -> Path:
    """Write `policy` as one JSON file, whole or not at all; raises OSError where it cannot."""
    form: dict[str, Any] = {"schema": SCHEMA, "kind": KIND}
    form |= {name: getattr(policy, name) for name in (*SINGLE, "releases")}
    form["specs"] = [
        {
            **asdict(spec),
            "points": [asdict(point) for point in points],
            "rates": {name: asdict(rates) for name, rates in policy.rates[spec].items()},
        }
        for spec, points in policy.points.items()
    ]
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(form) + "\n", encoding="utf-8")
    return part.replace(path)


def load(path: Path) -> Policy:
    """Read what `save` wrote; ValueError for a file of another kind or schema."""
    form = json.loads(path.read_text(encoding="utf-8"))
    found = (form.get("kind"), form.get("schema")) if isinstance(form, dict) else (None, None)
    if found != (KIND, SCHEMA):
        raise ValueError(f"{path.name} must be a {KIND!r} of schema {SCHEMA}, got {found}")
    points, rates = {}, {}
    for entry in form["specs"]:
        measured, fitted = entry.pop("points"), entry.pop("rates")
        spec = AttnSpec(**entry)
        points[spec] = tuple(Point(**point) for point in measured)
        lists = {name: tuple(each.pop("token_ns")) for name, each in fitted.items()}
        rates[spec] = {n: Rates(**each, token_ns=lists[n]) for n, each in fitted.items()}
    told = {name: form[name] for name in (*SINGLE, "releases")}
    return Policy(**told, points=points, rates=rates)


def _confidence(
    order: list[str], predicted: Mapping[str, float], spread: Mapping[str, float]
) -> float:
    """Chance that the first is faster than the second, both uncertain by their spread."""
    if len(order) == 1:
        return 1.0
    first, second = order[:2]
    lead = predicted[second] - predicted[first]
    unsure = math.sqrt(spread[first] ** 2 + spread[second] ** 2 + NOISE**2)
    return 0.5 * (1 + math.erf(lead / unsure / math.sqrt(2)))


def _place(lens: np.ndarray) -> np.ndarray:
    return _scaled(lens.size, float(lens.mean()), int(lens.max()))


def _scaled(batch_size: int, mean_len: float, longest: int) -> np.ndarray:
    return SCALE * np.log2([batch_size, mean_len, longest / mean_len])


def _within(places: np.ndarray, place: np.ndarray) -> bool:
    return bool(((np.min(places, 0) <= place) & (place <= np.max(places, 0))).all())


def apart(one: AttnSpec, other: AttnSpec) -> float:
    """How far the kernels of two layers are from each other, 0 where they share their rates."""
    return float(np.sqrt(((APART * (_kernel(one) - _kernel(other))) ** 2).sum()))


def _kernel(spec: AttnSpec) -> np.ndarray:
    sizes = [spec.group_size, spec.page_size, spec.head_dim]
    return np.log2([*sizes, ELEMENT_BYTES[spec.dtype], ELEMENT_BYTES[spec.kv_dtype]])
