"""One measurement, one frozen Record, one JSON line. data/README.md lists the fields.

No check, no time: a record carries samples only when its status is `ok`, and a record with a case
is `ok` only when the oracle's error lies within its budget; else it is `incorrect`. `refused` is
what backend, library or GPU says beforehand that it cannot run, `error` a Python exception,
`crashed` a process that died or lost its CUDA context, `timeout` no answer in the item's time.
"""

import hashlib
import json
import math
import re
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any

from ..core.spec import require_word
from ..kinds.cases import item_from_dict
from ..kinds.item import Item

SCHEMA = 1
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, software and hardware thermal slowdown, power brake: the machine is not well,
and a measurement taken then is left out."""
STATUSES = ("ok", "incorrect", "refused", "error", "crashed", "timeout")


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
    settle_us: float = 0.0
    power_w: tuple[int, ...] = ()
    sm_clock_mhz: tuple[int, ...] = ()
    plan_us: tuple[float, ...] = ()
    oracle_error: float | None = None
    oracle_budget: float | None = None
    oracle_rows: int = 0
    peak_bytes: int = 0
    work_per_call: float = 0.0
    state_before: dict[str, Any] = field(default_factory=dict)
    state_after: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        require_word("status", self.status, STATUSES)
        if (self.status == "ok") != bool(self.run_us):
            raise ValueError(
                f"run_us must hold samples exactly when status is ok, "
                f"got {len(self.run_us)} samples with status {self.status!r}"
            )
        _require_times("run_us", self.run_us)
        _require_times("plan_us", self.plan_us)
        if self.status == "ok" and self.item.case is not None:
            error, budget = self.oracle_error, self.oracle_budget
            if error is None or budget is None or not math.isfinite(error) or not error <= budget:
                raise ValueError(
                    f"oracle_error must be finite and within oracle_budget for status ok, "
                    f"got {error} of {budget}"
                )

    @cached_property
    def id(self) -> str:
        """Content key: the same item, round, study and GPU have the same id."""
        return record_id(self.study, self.round, self.item, self.machine["gpu_id"])

    @property
    def throttled(self) -> bool:
        """Taken on a machine that was not well: marked, and left out of every comparison."""
        states = (self.state_before, self.state_after)
        return any(state.get("throttle_reasons", 0) & THROTTLED for state in states)

    @property
    def machine_slug(self) -> str:
        """Folder of the machine's records."""
        return machine_slug(self.machine)

    def to_form(self) -> dict[str, Any]:
        """The id, the fields and, flat beside them, those of the item, as JSON has them."""
        flat = {f.name: getattr(self, f.name) for f in fields(self)}
        item = flat.pop("item").to_dict()
        return {"id": self.id, **flat, **item}

    def to_json(self) -> str:
        """One line, keys sorted, no NaN."""
        return json.dumps(self.to_form(), sort_keys=True, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_form(cls, form: dict[str, Any]) -> "Record":
        """Inverse of `to_form`. Records older than a field that has a default load with it.

        Raises ValueError for a newer schema, a field that is missing or unknown, and a wrong id.
        """
        require_schema(form.get("schema"))
        if not REQUIRED <= form.keys() <= KNOWN:
            wrong = sorted((form.keys() - KNOWN) | (REQUIRED - form.keys()))
            raise ValueError(f"a record must have the fields of data/README.md; differs in {wrong}")
        flat = dict(form)
        stored_id = flat.pop("id")
        item = item_from_dict({name: flat.pop(name) for name in _ITEM_FIELDS & form.keys()})
        for name in ("run_us", "plan_us", "kernels", "power_w", "sm_clock_mhz"):
            flat[name] = tuple(flat.get(name, ()))
        record = cls(item=item, **flat)
        if stored_id != record.id:
            raise ValueError(f"id must be the content key {record.id}, got {stored_id}")
        return record


_ITEM_FIELDS = {f.name for f in fields(Item)}
_FIELDS = [f for f in (*fields(Record), *fields(Item)) if f.name != "item"]
KNOWN = {"id", *(f.name for f in _FIELDS)}
REQUIRED = {"id", "schema"} | {
    f.name for f in _FIELDS if f.default is MISSING and f.default_factory is MISSING
}


def require_schema(schema: object) -> None:
    """ValueError unless records of this schema are known here."""
    if type(schema) is not int or not 0 < schema <= SCHEMA:
        raise ValueError(f"schema must be 1 to {SCHEMA}, got {schema!r}: update attnlib")


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
    if {*map(type, times)} <= {float} and min(times, default=1) > 0 and math.isfinite(sum(times)):
        return  # one pass in C, as nearly all go
    bad = [t for t in times if not (isinstance(t, (int, float)) and math.isfinite(t) and t > 0)]
    if bad:
        raise ValueError(f"{name} must be finite microseconds > 0, got {bad[0]!r}")
