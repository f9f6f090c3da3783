"""The tables of a view: from records to numbers.

A share is the time at the ceiling over the time taken. The ceiling is the longer of two: the bytes
that must move at the copy bandwidth, the useful FLOPs at the matmul rate, both measured on the same
GPU in the same study.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
from packaging.version import Version

from ..core.backends.table import installed_version
from ..core.spec import MLA_HEAD_DIM, AttnSpec, MlaSpec
from ..kinds.cost import CallCost, Ceilings
from ..run import frame as rows
from ..run import store
from ..run.record import Record
from ..select import Call, explain
from .choices import Choices
from .sources import Source, fits_release

ENGINES = ("sglang==0.5.23", "vllm==0.33.0")
"""The newest releases whose rules were read."""
LIBRARY = "flashinfer-python"
NOTHING = "-"
SAMPLE = ("id", "study", "gpu", "gpu_id", "started_at", "backend", "round", "run_us")
"""Columns of a view's samples: what a figure's footer names, and what it draws."""


@dataclass(frozen=True, eq=False, repr=False)
class Tables:
    """What the source's `records` say of `choices`; `around` are those of the case and timer."""

    choices: Choices
    source: Source
    records: tuple[Record, ...]
    around: tuple[Record, ...]

    @cached_property
    def times(self) -> pd.DataFrame:
        """A row per backend: median time (us), what ran, launches, plan (us), rounds, share.

        A backend without a good record has NaN for its time, and its status for what ran.
        """
        table = []
        for name in self.choices.backends:
            good = self._good[self._good.backend == name]
            status = [r.status for r in self.mine if r.item.backend == name] or ["not on record"]
            families = ", ".join(sorted(set(good.kernel_family) - {""})) or NOTHING
            ran = families if len(good) else status[-1]
            us, plan_us = float(good.run_us.median()), float(good.plan_us.median())
            launches = sum(k["launches"] for k in self._newest_kernels(name)) or math.nan
            table.append((name, us, ran, launches, plan_us, len(good), self.floor_us / us))
        columns = ["backend", "us", "ran", "launches", "plan_us", "rounds", "share"]
        return pd.DataFrame(table, columns=columns)

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """A row per kernel of a backend's newest good record: launches per call, us per call."""
        table = [
            (name, kernel["name"], kernel["launches"], kernel["gpu_us"])
            for name in self.choices.backends
            for kernel in self._newest_kernels(name)
        ]
        return pd.DataFrame(table, columns=["backend", "kernel", "launches", "us"])

    @cached_property
    def comparison(self) -> pd.DataFrame:
        """A row per backend that shares rounds with `choices.against`: ratio, interval, verdict."""
        columns = ["backend", "against", "ratio", "low", "high", "rounds", "verdict", "margin"]
        against, measured = self.choices.against, set(self._good.backend)
        found = [
            rows.over(self._good, name, against).assign(backend=name, against=against)
            for name in self.choices.backends
            if name != against and {name, against} <= measured
        ]
        if not found:
            return pd.DataFrame(columns=columns)
        return pd.concat(found, ignore_index=True)[columns]

    @cached_property
    def rules(self) -> pd.DataFrame:
        """A row per engine and release of FlashInfer: its choice, why, that backend's time (us)."""
        gpu = "sm" + self.machine.get("compute_capability", "").replace(".", "")
        releases = {f"flashinfer=={release}": release for release in self._releases()}
        table = []
        for library in (*releases, *ENGINES) if gpu != "sm" else ():
            chosen, why = _rule(self.choices.case.spec, library, gpu)
            own = (chosen, releases.get(library, "") if self.choices.release else "")
            took = _good_rows(r for r in self.around if (r.item.backend, r.item.release) == own)
            table.append((library, chosen, float(took.run_us.median()), why))
        return pd.DataFrame(table, columns=["library", "chooses", "us", "because"])

    @property
    def samples(self) -> pd.DataFrame:
        """A row per round of a backend that is ok: its record's id, its median time (us)."""
        return self._good[[*SAMPLE]].reset_index(drop=True)

    @cached_property
    def mine(self) -> tuple[Record, ...]:
        """The records of the chosen backends and release."""
        chosen = (r for r in self.around if r.item.backend in self.choices.backends)
        release = self.choices.release
        return tuple(r for r in chosen if fits_release(r.item.backend, r.item.release, release))

    @property
    def machine(self) -> dict[str, Any]:
        """The machine of the records, empty without any."""
        return self.records[-1].machine if self.records else {}

    @cached_property
    def cost(self) -> CallCost:
        """Bytes that the case must move, and its useful work."""
        return self.choices.case.cost

    @cached_property
    def limit(self) -> Ceilings | str:
        """The ceilings that the records hold, or why there are none."""
        measured = store.frame(r for r in self.records if r.item.case is None)
        if measured.empty:
            return "these records hold no ceiling"
        try:
            return rows.ceilings(measured, needed=("copy",))
        except ValueError as error:
            return str(error)

    @property
    def bounds_us(self) -> dict[str, float]:
        """Microseconds that bytes and FLOPs take at their ceilings, of those that there are."""
        if isinstance(self.limit, str):
            return {}
        flops_us = self.cost.flops / (self.limit.matmul_tflops * 1e6)
        bounds = {"bytes": self.cost.floor_us(self.limit), "FLOPs": flops_us}
        return {name: us for name, us in bounds.items() if math.isfinite(us)}

    @property
    def floor_us(self) -> float:
        """The time at the ceiling, NaN without ceilings."""
        return max(self.bounds_us.values(), default=math.nan)

    @cached_property
    def _good(self) -> pd.DataFrame:
        return _good_rows(self.mine)

    def _newest_kernels(self, backend: str) -> tuple[dict[str, Any], ...]:
        good = (r for r in reversed(self.mine) if r.item.backend == backend and r.status == "ok")
        return next((record.kernels for record in good), ())

    def _releases(self) -> tuple[str, ...]:
        """The releases on record or chosen; where none is named, that which ran or is installed."""
        offered = self.source.options("release", {"model": self.choices.model})
        if named := {self.choices.release, *offered} - {""}:
            return tuple(sorted(named, key=Version))
        ran = [r.versions[LIBRARY] for r in self.records if LIBRARY in r.versions]
        return tuple(filter(None, (ran or [installed_version(LIBRARY)])[-1:]))


def _rule(spec: AttnSpec | MlaSpec, library: str, gpu: str) -> tuple[str, str]:
    """What `library` runs by its own rule on a GPU such as `sm90`, by our name if any, and why."""
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
    why = f"{choice.decided_by.why} ({choice.decided_by.source})"
    return choice.ours or choice.kernel or NOTHING, why


def _good_rows(records: Iterable[Record]) -> pd.DataFrame:
    good = store.frame(r for r in records if r.status == "ok" and not r.throttled)
    columns = [*SAMPLE, "plan_us", "kernel_family"]
    return good if len(good) else pd.DataFrame(columns=columns, dtype=float)
