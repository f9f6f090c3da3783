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

from ..core.spec import MLA_HEAD_DIM, AttnSpec, MlaSpec
from ..kinds.cost import Ceilings, DecodeCost, decode_cost, mla_cost
from ..kinds.mla.case import MlaCase
from ..measure.stats import judge
from ..run import frame as rows
from ..run import store
from ..run.record import Record
from ..select import Call, explain
from ..studies.measurement_trust import tables as trust
from .choices import Choices
from .sources import Source, fits_release

ENGINES = ("sglang==0.5.23", "vllm==0.33.0")
"""The newest releases whose rules were read."""
TRUST = "measurement_trust"
"""The study that says how far two processes of one machine lie apart."""
LIBRARY = "flashinfer-python"
NOTHING = "-"
SAMPLE = ("id", "study", "gpu", "gpu_id", "started_at", "backend", "round", "run_us")
"""Columns of a view's samples: what a figure's footer names, and what it draws."""


@dataclass(frozen=True)
class Found:
    """The records of a view: `mine` of the chosen backends, `around` of any backend and release.

    `good` has a row per record of `mine` that may be timed by. `limit` is None where the records
    hold no ceilings, and `why_no_limit` says so. `noise` is how far two processes lie apart, as a
    fraction, 0 where the machine has no record of that. `releases` are those of FlashInfer whose
    rules are asked.
    """

    choices: Choices
    mine: tuple[Record, ...]
    around: tuple[Record, ...]
    good: pd.DataFrame
    machine: dict[str, Any]
    cost: DecodeCost
    limit: Ceilings | None
    why_no_limit: str
    noise: float
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
    chosen = (r for r in around if r.item.backend in choices.backends)
    mine = tuple(r for r in chosen if fits_release(r.item.backend, r.item.release, choices.release))
    limit, why_no_limit = _ceilings(records)
    return Found(
        choices=choices,
        mine=mine,
        around=around,
        good=_good_rows(mine),
        machine=records[-1].machine if records else {},
        cost=mla_cost(case) if isinstance(case, MlaCase) else decode_cost(case),
        limit=limit,
        why_no_limit=why_no_limit,
        noise=_noise(mine),
        releases=_releases(source, records, choices.release, choices.model),
    )


def times(found: Found) -> pd.DataFrame:
    """A row per backend: median time (us), what ran, launches, plan (us), rounds, share.

    A backend without a good record has NaN for its time, and its status for what ran.
    """
    table = []
    for name in found.choices.backends:
        good = found.good[found.good.backend == name]
        status = [r.status for r in found.mine if r.item.backend == name] or ["not on record"]
        families = ", ".join(sorted(set(good.kernel_family) - {""})) or NOTHING
        ran = families if len(good) else status[-1]
        us, plan_us = float(good.run_us.median()), float(good.plan_us.median())
        launches = sum(k["launches"] for k in _newest_kernels(found, name)) or math.nan
        table.append((name, us, ran, launches, plan_us, len(good), found.floor_us / us))
    columns = ["backend", "us", "ran", "launches", "plan_us", "rounds", "share"]
    return pd.DataFrame(table, columns=columns)


def kernels(found: Found) -> pd.DataFrame:
    """A row per kernel of a backend's newest good record: launches per call, us per call."""
    table = [
        (name, kernel["name"], kernel["launches"], kernel["gpu_us"])
        for name in found.choices.backends
        for kernel in _newest_kernels(found, name)
    ]
    return pd.DataFrame(table, columns=["backend", "kernel", "launches", "us"])


def comparison(found: Found) -> pd.DataFrame:
    """A row per backend that shares rounds with `choices.against`: ratio, low, high, verdict."""
    columns = ["backend", "against", "ratio", "low", "high", "pairs", "verdict", "margin"]
    against, measured = found.choices.against, set(found.good.backend)
    table = []
    for name in found.choices.backends:
        if name == against or not {name, against} <= measured:
            continue
        for _, above, below in rows.paired_times(found.good, name, against):
            verdict = judge(above, below, noise=found.noise)
            said = {"verdict": verdict.word, "margin": verdict.margin}
            table.append({"backend": name, "against": against, **vars(verdict.ratio), **said})
    return pd.DataFrame(table, columns=columns)


def rules(found: Found) -> pd.DataFrame:
    """A row per library: what its rule takes, why, and that backend's time where it is on record.

    FlashInfer's `auto` stands there once per release, engines once.
    """
    gpu = "sm" + found.machine.get("compute_capability", "").replace(".", "")
    releases = {f"flashinfer=={release}": release for release in found.releases}
    table = []
    for library in (*releases, *ENGINES) if gpu != "sm" else ():
        chosen, why = _rule(found.choices.case.spec, library, gpu)
        own = (chosen, releases.get(library, "") if found.choices.release else "")
        took = _good_rows([r for r in found.around if (r.item.backend, r.item.release) == own])
        table.append((library, chosen, float(took.run_us.median()), why))
    return pd.DataFrame(table, columns=["library", "chooses", "us", "because"])


def _rule(spec: AttnSpec | MlaSpec, library: str, gpu: str) -> tuple[str, str]:
    """What `library` (`flashinfer==0.6.3`) runs by its own rule on a GPU such as `sm90`, and why.

    By our name where we have the backend, else by the library's own word.
    """
    mode, call = "decode", Call()
    if isinstance(spec, MlaSpec):
        mode, call = "sparse_mla" if spec.top_k else "mla", Call(topk=spec.top_k)
        kv_dtype = "bfloat16" if spec.kv_format == "bfloat16" else "float8_e4m3fn"
        spec = AttnSpec(spec.num_qo_heads, 1, MLA_HEAD_DIM, spec.page_size, kv_dtype=kv_dtype)
    try:
        choice = explain(spec, mode=mode, gpu=gpu, library=library, call=call, env={})
    except ValueError as error:
        return NOTHING, f"no rule on record says: {error}"
    if choice.problem:
        return NOTHING, f"cannot run it: {choice.problem}"
    return (
        choice.ours or choice.kernel or NOTHING,
        f"{choice.decided_by.why} ({choice.decided_by.source})",
    )


def _good_rows(records: Sequence[Record]) -> pd.DataFrame:
    good = store.frame(r for r in records if r.status == "ok" and not r.throttled)
    columns = [*SAMPLE, "plan_us", "kernel_family"]
    return good if len(good) else pd.DataFrame(columns=columns, dtype=float)


def _ceilings(records: Sequence[Record]) -> tuple[Ceilings | None, str]:
    measured = store.frame(r for r in records if r.item.case is None)
    if measured.empty:
        return None, "these records hold no ceiling"
    try:
        return rows.ceilings(measured, needed=("copy",)), ""
    except ValueError as error:
        return None, str(error)


def _noise(records: Sequence[Record]) -> float:
    try:
        return trust.noise_of(store.load(TRUST, records[0].machine_slug)) if records else 0.0
    except (FileNotFoundError, ValueError):
        return 0.0


def _releases(
    source: Source, records: Sequence[Record], release: str, model: str
) -> tuple[str, ...]:
    """The releases on record or chosen; where none is named, that which ran or is installed."""
    named = {release, *source.options("release", {"model": model})} - {""}
    if named:
        return tuple(sorted(named, key=Version))
    ran = [r.versions[LIBRARY] for r in records if LIBRARY in r.versions]
    try:
        return (ran[-1] if ran else metadata.version(LIBRARY),)
    except metadata.PackageNotFoundError:
        return ()


def _newest_kernels(found: Found, backend: str) -> tuple[dict[str, Any], ...]:
    good = (r for r in reversed(found.mine) if r.item.backend == backend and r.status == "ok")
    return next((record.kernels for record in good), ())
