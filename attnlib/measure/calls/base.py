"""What subjects share: where they measure, and fields of a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..spans import Kernel
    from ..timer import Timing
    from .check import OracleCheck
    from .form import Item


@dataclass(frozen=True)
class Bench:
    """Where a worker measures: device, machine (`describe_machine`), versions of libraries."""

    device: str
    machine: dict[str, Any]
    versions: dict[str, str]

    def require_release(self, distribution: str, release: str) -> None:
        """RuntimeError unless `release` of `distribution` is what this process imports."""
        imported = self.versions.get(distribution, "none")
        if release and imported != release:
            raise RuntimeError(f"release must be {distribution} {release}, imported was {imported}")


class Subject:
    """Measures items of one kind."""

    _case: object = None
    _inputs: Any = None

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def prepare(self, case: Any) -> Any:
        """The tensors of a case on the bench's device, and what judges its output."""
        raise NotImplementedError

    def prepared(self, case: Any) -> Any:
        """What `prepare` made of the case, kept until the next one; first the last one's go."""
        if self._case != case:
            self._case = self._inputs = None
            self._inputs = self.prepare(case)
            self._case = case
        return self._inputs

    def measure(self, item: Item) -> dict[str, Any]:
        """The record's fields that a measurement of `item` gives; may raise."""
        raise NotImplementedError


def oracle_fields(verdict: OracleCheck) -> dict[str, Any]:
    """A record's fields for the oracle's verdict; JSON has no infinity, so None stands for it."""
    fields = {
        "oracle_error": verdict.error if verdict.error != float("inf") else None,
        "oracle_budget": verdict.budget,
        "oracle_rows": verdict.rows,
    }
    if verdict.passed:
        return fields
    reason = f"{verdict.counts} {verdict.error:.3g} over budget {verdict.budget:.3g}"
    return {"status": "incorrect", "reason": reason, **fields}


def timed_fields(
    timing: Timing,
    *,
    kernels: tuple[Kernel, ...],
    work_per_call: float,
) -> dict[str, Any]:
    """A record's fields for samples that were taken after the check passed."""
    return {
        "status": "ok",
        "run_us": timing.samples_us,
        "calls_per_sample": timing.calls_per_sample,
        "settle_us": timing.settle_us,
        "power_w": timing.power_w,
        "sm_clock_mhz": timing.sm_clock_mhz,
        "kernels": tuple(kernel._asdict() for kernel in kernels),
        "work_per_call": work_per_call,
    }
