"""The tables of a view: from records to numbers.

A share is the time at the ceiling over the time taken. The ceiling is the longer of two: the bytes
that must move at the copy bandwidth, the useful FLOPs at the matmul rate, both measured on the same
GPU in the same study. Nothing is compared but rounds that hold both backends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pandas as pd
from packaging.version import Version

from ..kinds.cost import Ceilings, DecodeCost, decode_cost, mla_cost
from ..kinds.mla.case import MlaCase
from ..measure.stats import MIN_EFFECT, judge
from ..run import frame as rows
from ..run import store
from ..run.record import Record
from ..studies.measurement_trust import tables as trust
from .choices import Choices
from .rules import ENGINES, chosen_by
from .sources import Source, fits_release

TRUST = "measurement_trust"
"""The study that says how far two processes of one machine lie apart."""
LIBRARY = "flashinfer-python"
NOTHING = "-"
SAMPLE = ("id", "study", "gpu", "gpu_id", "started_at", "backend", "round", "run_us")
"""Columns of a view's samples: what a figure's footer names, and what it draws."""


@dataclass(frozen=True)
class Found:
    """The records of a view: `mine` of the chosen backends, `around` of any backend and release.

    `good` has a row a record of `mine` that may be timed by. `limit` is None where the records hold
    no ceilings, and `why_no_limit` says so.
    """

    mine: tuple[Record, ...]
    around: tuple[Record, ...]
    good: pd.DataFrame
    machine: dict[str, Any]
    cost: DecodeCost
    limit: Ceilings | None
    why_no_limit: str
    margin: float
    releases: tuple[str, ...]

    @property
    def bounds_us(self) -> dict[str, float]:
        """Microseconds that bytes and FLOPs take at their ceilings, of those that there are."""
        if self.limit is None:
            return {}
        flops_us = self.cost.flops / (self.limit.matmul_tflops * 1e6)
        bounds = {"bytes": self.cost.floor_us(self.limit), "FLOPs": flops_us}
        return {name: us for name, us in bounds.items() if math.isfinite(us)}

    @property
    def floor_us(self) -> float:
        """The time at the ceiling, NaN without ceilings."""
        return max(self.bounds_us.values(), default=math.nan)


def gather(source: Source, choices: Choices) -> Found:
    """All that a view stands on."""
    case, records = choices.case, source.records
    around = tuple(r for r in records if (r.item.case, r.item.timer) == (case, choices.timer))
    wanted = set(choices.backends)
    mine = tuple(
        r
        for r in around
        if r.item.backend in wanted
        and fits_release(r.item.backend, r.item.release, choices.release)
    )
    machine = records[-1].machine if records else {}
    limit, why = _ceilings(records)
    return Found(
        mine=mine,
        around=around,
        good=_good_rows(mine),
        machine=machine,
        cost=mla_cost(case) if isinstance(case, MlaCase) else decode_cost(case),
        limit=limit,
        why_no_limit=why,
        margin=max(MIN_EFFECT, _aa_floor(mine)),
        releases=_releases(source, records, choices),
    )


def times(found: Found, choices: Choices) -> pd.DataFrame:
    """A row a backend: median time and plan (us), share, what ran, kernels, launches, rounds.

    A backend without a good record has NaN for its time, and its status for what ran.
    """
    table = [_time_row(found, name) for name in choices.backends]
    return pd.DataFrame(table)


def kernels(found: Found, choices: Choices) -> pd.DataFrame:
    """A row a kernel of a backend's newest good record: launches a call, us a call."""
    table = [
        {"backend": name, "kernel": k["name"], "launches": k["launches"], "us": k["gpu_us"]}
        for name in choices.backends
        for k in _newest_kernels(found, name)
    ]
    return pd.DataFrame(table, columns=["backend", "kernel", "launches", "us"])


def comparison(found: Found, choices: Choices) -> pd.DataFrame:
    """A row a backend that shares rounds with `choices.against`: ratio, low, high, verdict."""
    columns = ["backend", "against", "ratio", "low", "high", "pairs", "verdict", "margin"]
    others = [name for name in choices.backends if name != choices.against]
    table = [
        {"backend": name, "against": choices.against, **_verdict(above, below, found.margin)}
        for name in others
        for _, above, below in _pairs(found, name, choices.against)
    ]
    return pd.DataFrame(table, columns=columns)


def rules(found: Found, choices: Choices) -> pd.DataFrame:
    """A row a library: what its rule takes, why, and that backend's time where it is on record.

    FlashInfer's `auto` stands there once a release, engines once.
    """
    gpu = "sm" + found.machine.get("compute_capability", "").replace(".", "")
    releases = {f"flashinfer=={release}": release for release in found.releases}
    table = []
    for library in (*releases, *ENGINES) if gpu != "sm" else ():
        chosen = chosen_by(choices.case.spec, library=library, gpu=gpu)
        named = {"library": chosen.library, "chooses": chosen.backend or chosen.word or NOTHING}
        took = _time_in(found, chosen.backend, releases.get(library, "") if choices.release else "")
        table.append({**named, "us": took, "because": chosen.reason})
    return pd.DataFrame(table, columns=["library", "chooses", "us", "because"])


def _good_rows(records: Sequence[Record]) -> pd.DataFrame:
    good = store.frame([r for r in records if r.status == "ok" and not r.throttled])
    return good if len(good) else pd.DataFrame(columns=[*SAMPLE, "plan_us"])


def _ceilings(records: Sequence[Record]) -> tuple[Ceilings | None, str]:
    measured = store.frame([r for r in records if r.item.case is None])
    if measured.empty:
        return None, "these records hold no ceiling"
    try:
        return rows.ceilings(measured, needed=("copy",)), ""
    except ValueError as error:
        return None, str(error)


def _aa_floor(records: Sequence[Record]) -> float:
    """The machine's A/A floor where it has one on record, else 0: the least effect holds."""
    machine = records[0].machine_slug if records else ""
    if not machine or machine not in store.machines(TRUST):
        return 0.0
    try:
        return trust.floor_of(store.load(TRUST, machine))
    except ValueError:
        return 0.0


def _releases(source: Source, records: Sequence[Record], choices: Choices) -> tuple[str, ...]:
    named = (choices.release, *source.options(choices.model, "release", {}))
    if any(named):
        return tuple(sorted({*filter(None, named)}, key=Version))
    ran = [r.versions[LIBRARY] for r in records if LIBRARY in r.versions]
    if ran:
        return (ran[-1],)
    try:
        return (metadata.version(LIBRARY),)
    except metadata.PackageNotFoundError:
        return ()


def _time_row(found: Found, backend: str) -> dict[str, Any]:
    good = found.good[found.good.backend == backend]
    newest = [r for r in found.mine if r.item.backend == backend]
    us = float(good.run_us.median()) if len(good) else math.nan
    families = sorted({f for f in good.get("kernel_family", ()) if f})
    launches = sum(k["launches"] for k in _newest_kernels(found, backend)) or math.nan
    return {
        "backend": backend,
        "us": us,
        "share": found.floor_us / us,
        "ran": (", ".join(families) or NOTHING) if len(good) else _status(newest),
        "launches": launches,
        "plan_us": float(good.plan_us.median()) if len(good) else math.nan,
        "rounds": len(good),
    }


def _status(records: Sequence[Record]) -> str:
    return records[-1].status if records else "not on record"


def _newest_kernels(found: Found, backend: str) -> tuple[dict[str, Any], ...]:
    good = [r for r in found.mine if r.item.backend == backend and r.status == "ok"]
    return good[-1].kernels if good else ()


def _pairs(found: Found, backend: str, against: str) -> list[tuple[Any, list[float], list[float]]]:
    if not {backend, against} <= set(found.good.backend):
        return []
    return list(rows.paired_times(found.good, backend, against))


def _verdict(above: list[float], below: list[float], margin: float) -> dict[str, Any]:
    verdict = judge(above, below, floor=margin)
    return {**vars(verdict.ratio), "verdict": verdict.word, "margin": verdict.margin}


def _time_in(found: Found, backend: str, release: str) -> float:
    mine = [r for r in found.around if (r.item.backend, r.item.release) == (backend, release)]
    good = _good_rows(mine)
    return float(good.run_us.median()) if len(good) else math.nan
