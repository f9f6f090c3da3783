"""One measurement, one frozen Record, one JSON line. data/README.md lists the fields.

No check, no time: a record carries samples only when its status is `ok`, and a record with a case
is `ok` only when the oracle's error lies within its budget.

| status | meaning |
|---|---|
| ok | output right, samples taken |
| incorrect | output outside the oracle's budget: no samples |
| refused | the backend, library or GPU says beforehand that it cannot run this |
| error | a Python exception, in `reason` |
| crashed | the process died or the CUDA context was lost |
| timeout | no answer within the item's time limit |
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from ..kinds.item import Item

SCHEMA = 1
POWER_CAP = 0x4
"""NVML's throttle reason for the software power cap: the GPU is at its power limit. That is how a
heavy kernel runs, day after day, so it is shown and not left out."""
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, software and hardware thermal slowdown, power brake: the machine is not well,
and a measurement taken then says nothing of the kernel."""
STATUSES = ("ok", "incorrect", "refused", "error", "crashed", "timeout")


class Kernel(NamedTuple):
    """One kernel of a call, by the trace: launches per call, GPU microseconds per call."""

    name: str
    launches: float
    gpu_us: float


@dataclass(frozen=True)
class Record:
    """One item of one round of a study on one machine. Times in microseconds per call."""

    study: str
    round: int
    item: Item
    status: str
    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    started_at: str
    reason: str = ""
    reported_backend: str = ""
    kernel_family: str = ""
    kernels: tuple[dict[str, Any], ...] = ()
    run_us: tuple[float, ...] = ()
    calls_per_sample: int = 0
    plan_us: tuple[float, ...] = ()
    oracle_error: float | None = None
    oracle_budget: float | None = None
    oracle_rows: int = 0
    work_per_call: float = 0.0
    state_before: dict[str, Any] = field(default_factory=dict)
    state_after: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        if (self.status == "ok") != bool(self.run_us):
            raise ValueError(
                f"run_us must hold samples exactly when status is ok, "
                f"got {len(self.run_us)} samples with status {self.status!r}"
            )
        _require_times("run_us", self.run_us)
        _require_times("plan_us", self.plan_us)
        if self.status == "ok" and self.item.case is not None:
            _require_oracle(self.oracle_error, self.oracle_budget)

    @cached_property
    def id(self) -> str:
        """Content key: the same item, round, study and GPU have the same id."""
        return record_id(self.study, self.round, self.item, self.machine["gpu_id"])

    @property
    def throttle_reasons(self) -> int:
        """NVML's reasons (bits) before or after the measurement."""
        states = (self.state_before, self.state_after)
        return states[0].get("throttle_reasons", 0) | states[1].get("throttle_reasons", 0)

    @property
    def throttled(self) -> bool:
        """Taken on a machine that was not well: marked, and left out of every comparison."""
        return bool(self.throttle_reasons & THROTTLED)

    @property
    def power_capped(self) -> bool:
        """Taken at the power limit."""
        return bool(self.throttle_reasons & POWER_CAP)

    @property
    def machine_slug(self) -> str:
        """Folder of the machine's records."""
        return machine_slug(self.machine)

    def to_form(self) -> dict[str, Any]:
        """The fields of `MEANING` with their values, as JSON has them."""
        flat = {f.name: getattr(self, f.name) for f in fields(self)}
        item = flat.pop("item").to_dict()
        return {"id": self.id, **flat, **item}

    def to_json(self) -> str:
        """One line, keys sorted, no NaN."""
        return json.dumps(self.to_form(), sort_keys=True, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_form(cls, form: dict[str, Any]) -> Record:
        """Inverse of `to_form`. Records older than a field that has a default load with it.

        Raises ValueError for a newer schema, a field that is missing or unknown, and a wrong id.
        """
        schema = form.get("schema")
        if not isinstance(schema, int) or schema > SCHEMA:
            raise ValueError(
                f"schema must be an integer <= {SCHEMA}, got {schema!r}: update attnlib"
            )
        wrong = sorted((form.keys() - MEANING.keys()) | (_REQUIRED - form.keys()))
        if wrong:
            raise ValueError(f"a record must have the fields of data/README.md; differs in {wrong}")
        flat = dict(form)
        stored_id = flat.pop("id")
        item = Item.from_dict({name: flat.pop(name) for name in _ITEM_FIELDS & form.keys()})
        for name in ("run_us", "plan_us", "kernels"):
            flat[name] = tuple(flat.get(name, ()))
        record = cls(item=item, **flat)
        if record.id != stored_id:
            raise ValueError(f"id must be the content key {record.id}, got {stored_id}")
        return record

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Inverse of `to_json`; ValueError as of `from_form`."""
        return cls.from_form(json.loads(line))


_ITEM_FIELDS = {f.name for f in fields(Item)}
_REQUIRED = {"id", "schema"} | {
    f.name
    for f in (*fields(Record), *fields(Item))
    if f.name != "item" and f.default is MISSING and f.default_factory is MISSING
}
MEANING = {
    "id": "16 hex digits of SHA-256 over study, round, backend, timer, case, release and GPU",
    "schema": "version of this table",
    "study": "name in `attnlib.studies`; `bisect_` and that name: the steps of a version bisect; "
    "`explorer`: what the explorer measured",
    "round": "number of the fresh process: the unit of statistics",
    "backend": "what was asked for: a backend, a design of the metadata, or a ceiling (`copy`, "
    "`matmul`)",
    "release": "release of the backend's distribution; empty where none is compared",
    "timer": "`graph`, `graph-cold`, `eager`, `profiler` or `host`; "
    "`attnlib/measure/timer.py` says what each of them times",
    "case": "the workload, as `attnlib/kinds` describes it; none of a ceiling, no `kind` of a "
    "decode case",
    "status": "`ok`, `incorrect`, `refused`, `error`, `crashed` or `timeout`; only `ok` has times",
    "reason": "why it is not `ok`",
    "reported_backend": "the library's own word for what it chose, after `plan`; of a mismatch, "
    "what came of it",
    "kernel_family": "what the traced kernel names prove to have run: `fa2`, `fa3`, `cuda-cores`, "
    "`flash-attn-3`, `mla-fa2`, `mla-fa3`, `flashmla-dense`, `flashmla-sparse`; or empty",
    "kernels": "every kernel of a call: its name, launches per call and microseconds per call "
    "(torch.profiler)",
    "run_us": "microseconds of a call of `run`, a value per sample",
    "calls_per_sample": "calls between the two events of a sample",
    "plan_us": "microseconds of the host in a call of `plan`, a value per call",
    "oracle_error": "worst relative L2 error of an output row against float64; of metadata, how "
    "many words differ",
    "oracle_budget": "the largest `oracle_error` with which the record is `ok`",
    "oracle_rows": "output rows (request, query head) that were checked",
    "work_per_call": "bytes that a call must move (attention, `copy`), or FLOPs (`matmul`)",
    "machine": "what was measured on; `gpu_id` is a hash of the GPU's UUID",
    "state_before": "clocks (MHz), temperature (C), power (W) and throttle reasons (bits of NVML)",
    "state_after": "the same, after the measurement",
    "versions": "Python, CUDA and the libraries that decide a number, as far as they are installed",
    "command": "the command that measures the study again",
    "started_at": "UTC, ISO 8601",
}
"""Field of a record on disk -> what it is. data/README.md has this table."""


def record_id(study: str, round_: int, item: Item, gpu_id: str) -> str:
    """Sixteen hex digits of SHA-256 over who a measurement is."""
    identity = json.dumps([study, round_, item.to_dict(), gpu_id], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def machine_slug(machine: dict[str, Any]) -> str:
    """Folder name of a machine's records: `nvidia-h200-1a2b3c4d`, or `cpu-x86_64`."""
    if not machine["gpu"]:
        return f"cpu-{machine['cpu']}"
    return f"{machine['gpu'].lower().replace(' ', '-')}-{machine['gpu_id']}"


def strip_folders(text: str) -> str:
    """`text` with absolute paths cut to their last part: folders say nothing to a reader."""
    return re.sub(r"(?<![\w.])/[^\s'\"]*/", "", text)


def _require_times(name: str, times: tuple[float, ...]) -> None:
    bad = [t for t in times if not (isinstance(t, int | float) and math.isfinite(t) and t > 0)]
    if bad:
        raise ValueError(f"{name} must be finite microseconds > 0, got {bad[0]!r}")


def _require_oracle(error: float | None, budget: float | None) -> None:
    passed = error is not None and budget is not None and math.isfinite(error) and error <= budget
    if not passed:
        raise ValueError(
            f"oracle_error must be finite and within oracle_budget for status ok, "
            f"got {error} of {budget}"
        )
