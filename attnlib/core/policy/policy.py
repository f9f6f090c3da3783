"""Which backend decodes fastest, by measurement: rates of a GPU, and what its nearest cases add.

A backend's time is predicted from its work plan with rates fitted to the measured cases (`times`).
The `NEIGHBOURS` nearest cases, in log2 of batch size, mean length and longest over mean, correct it
by the mean of their measured over predicted times; nearer ones count more. How sure the choice is
follows from its lead over the second and from how much the neighbours differ.

Constants were chosen by leaving out measured cases; held-out ones were looked at between versions
(LOG.md, 2026-11-21).
`save` writes a policy as JSON, `load` needs NumPy alone; study `backend_policy` makes one.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..spec import AttnSpec
from .plans import Lengths, lengths, plan
from .times import Gpu, Rates, load_of, predict

SCHEMA, KIND = 2, "attnlib decode policy"
NEIGHBOURS = 16
SINGLE = ("gpu", "gpu_id", "num_sms", "l2_mib", "study", "timer")
"""Fields of a policy that are one word or number."""
SCALE = np.array([1.0, 1.0, 0.5])
"""What an octave of each coordinate counts: batch size, mean length, longest over mean."""
NEAREST_OCTAVES = 0.5
"""Nearer neighbours count no more than this far ones: rounds differ by as much."""
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
        return _place(self.batch_size, self.mean_len, self.longest)

    def log_error(self, backend: str) -> float:
        """Log of measured over predicted time."""
        return math.log(self.run_us[backend] / self.predicted_us[backend])


@dataclass(frozen=True)
class Pick:
    """A choice: `slowdown` is each backend's predicted time over the chosen one's.

    `confidence` is the chance that no other is faster, from 0.5 (a tie) to 1. `inside` says whether
    the batch lies within the measured sizes and lengths. `refused` backends ran this spec nowhere.
    """

    backend: str
    slowdown: Mapping[str, float]
    confidence: float
    inside: bool
    refused: tuple[str, ...]
    nearest: tuple[Point, ...]


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

        Raises ValueError for lengths below 1, an unknown backend, or a spec that was not measured,
        listing those that were.
        """
        lens = lengths(seq_lens)
        if spec not in self.points:
            have = "; ".join(_spec_word(each) for each in self.points)
            raise ValueError(f"spec must be one that was measured: {have}; got {_spec_word(spec)}")
        if unknown := [name for name in backends if name not in self.backends]:
            known = ", ".join(self.backends)
            raise ValueError(f"backends must be of {known}, got {', '.join(unknown)}")
        asked = tuple(backends) or self.backends
        able = [name for name in asked if any(name in p.run_us for p in self.points[spec])]
        if not able:
            raise ValueError(f"backends must hold one that ran {spec}, got {', '.join(asked)}")
        place = _place(lens.size, float(lens.mean()), int(lens.max()))
        # A case in which one of them failed says nothing about which is the faster.
        points = tuple(point for point in self.points[spec] if set(able) <= set(point.run_us))
        if not points:
            raise ValueError(f"backends must share a case that all ran, {', '.join(able)} do not")
        places = np.array([point.place for point in points])
        octaves = np.sqrt(((places - place) ** 2).sum(axis=1))
        near = np.argsort(octaves, kind="stable")[:NEIGHBOURS]
        nearest = tuple(points[i] for i in near)
        weights = 1 / (octaves[near] + NEAREST_OCTAVES) ** 2
        weights /= weights.sum()
        predicted, spread = {}, {}
        for name in able:
            errors = np.array([point.log_error(name) for point in nearest])
            mean = float(weights @ errors)
            made = plan(name, spec, lens, num_sms=self.num_sms)
            load = load_of(made, spec, lens, Gpu(self.num_sms, self.l2_mib))
            predicted[name] = math.log(predict(self.rates[spec][name], [load])[0]) + mean
            spread[name] = math.sqrt(weights @ (errors - mean) ** 2)
        order = sorted(able, key=lambda name: predicted[name])
        return Pick(
            backend=order[0],
            slowdown={name: math.exp(predicted[name] - predicted[order[0]]) for name in order},
            confidence=_confidence(order, predicted, spread),
            inside=bool(((places.min(0) <= place) & (place <= places.max(0))).all()),
            refused=tuple(name for name in asked if name not in able),
            nearest=nearest,
        )

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


def _place(batch_size: int, mean_len: float, longest: int) -> np.ndarray:
    return SCALE * np.log2([batch_size, mean_len, longest / mean_len])


def _spec_word(spec: AttnSpec) -> str:
    return f"{spec.heads} d{spec.head_dim} page {spec.page_size} {spec.dtypes}"
