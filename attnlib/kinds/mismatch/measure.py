"""Metadata that does not fit its call: run once in a process of its own, judged, named."""

from __future__ import annotations

from typing import Any

from ...core import backends
from ...measure.timer import run_timer
from ..base import Bench, timed_fields
from ..item import Item
from .run import run_one

STATUS = {
    "refused by the guard": "refused",
    "refused by the library": "error",
    "wrong": "incorrect",
}
"""Outcome of `mismatch.run_one` -> status of the record; a crash is an error that poisons."""


class MismatchSubject:
    """Runs the entry that an item's case names; only a harmless one gets a time."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def measure(self, item: Item) -> dict[str, Any]:
        """One attention call with metadata of another call's facts."""
        missing = backends.unavailable("fa3")
        if missing:
            return {"status": "refused", "reason": missing}
        found = run_one(item.case.name, guard=item.case.guard, device=self.bench.device)
        if found["outcome"] == "crashed":
            raise RuntimeError(f"CUDA error: {found['reason']}")
        seen = {
            "oracle_error": found["relative_error"],
            "oracle_budget": found["budget"],
            "reported_backend": found["outcome"],
        }
        splits = f"splits {found['splits_in_metadata']}, right {found['splits_right']}"
        if found["outcome"] != "harmless":
            reason = found["reason"] or f"{splits}, cap of the call {found['cap_of_call']}"
            return {"status": STATUS[found["outcome"]], "reason": reason, **seen}
        timing = run_timer(item.timer)(found["call"])
        return timed_fields(timing, kernels=(), work_per_call=0.0) | {"reason": splits, **seen}
