"""Published claims, one by one: what was said, and what the records say of it.

`data/claims.yaml` holds the claims. Each says what it expects of the records (`expected`), or names
a function in the `checks.py` of a study; `evidence` says what a verdict means.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any

import pandas as pd

from ..run import store
from ..run.study import Study, record_machine
from . import STUDIES
from .evidence import NOT_HERE, OPEN, Check, Finding, MissingRecordsError
from .expected import Expected, expected, require_known

PUBLISHED = "published"
CLAIMS = Path(__file__).resolve().parents[2] / "data" / "claims.yaml"
UNCHECKED = {"open": OPEN, "elsewhere": NOT_HERE}
"""What `check` may say in place of a check: no study measures it yet; no record of ours can."""
SHOWN_RECORDS = 4
COLUMNS = ("id", "claimed", "measured", "verdict")


@dataclass(frozen=True)
class Source:
    """A public pull request and the day it was opened (ISO 8601)."""

    repo: str
    pull: int
    date: str

    @property
    def label(self) -> str:
        """`owner/name #number, date`."""
        return f"{self.repo} #{self.pull}, {self.date}"


@dataclass(frozen=True)
class Figure:
    """The number a claim names, and its unit."""

    value: float
    unit: str

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}"


@dataclass(frozen=True)
class Claim:
    """One published claim; `figure` is None where it can only be right or wrong.

    `check` is the name of a check, one of `UNCHECKED`, or the fields of an `expected.Expected`.
    """

    id: str
    source: Source
    quote: str
    shape: str
    figure: Figure | None
    measured_on: str
    check: str | dict[str, Any]
    note: str

    @property
    def claimed(self) -> str:
        """The figure, or `yes`."""
        return str(self.figure) if self.figure else "yes"


@dataclass(frozen=True)
class CheckedClaim:
    """A claim and what was found."""

    claim: Claim
    finding: Finding

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the claim's fields, then the finding's."""
        return {**asdict(self.claim), "claimed": self.claim.claimed, **asdict(self.finding)}


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of a ledger, in its order; ValueError, naming the claim, for one that is wrong."""
    import yaml

    from ..select.libraries import yaml_loader

    try:
        ledger = yaml.load(path.read_text(encoding="utf-8"), yaml_loader())
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} must be YAML: {' '.join(str(error).split())}") from error
    _require_fields("the ledger", ledger, ("sources", "claims"))
    sources = {name: _source(name, entry) for name, entry in ledger["sources"].items()}
    claims = [_claim(number, entry, sources) for number, entry in enumerate(ledger["claims"], 1)]
    counts = Counter(claim.id for claim in claims)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"id must be unique, claim {twice[0]!r} stands there twice")
    return claims


def verdicts(machine: str | None = None, ids: Sequence[str] = ()) -> list[CheckedClaim]:
    """Every claim (or those of `ids`) with its verdict, from the records of `machine`.

    By default those that each study is shown from (`study.record_machine`), for `PUBLISHED` each
    study's own, if they are there. Where another than the published one lacks a study, its claims
    are open. ValueError for an unknown id, FileNotFoundError where published records are not there.
    """
    claims = choose(load_claims(), ids)
    names = sorted({study for claim in claims for study in studies_of(claim)})
    frames = {name: _records(STUDIES[name], machine) for name in names}
    return [CheckedClaim(claim, _find(claim, frames)) for claim in claims]


def studies_of(claim: Claim) -> tuple[str, ...]:
    """The studies whose records judge a claim; none for one that nothing checks."""
    check = check_of(claim)
    return check.studies if check else ()


def check_of(claim: Claim) -> Check | Expected | None:
    """What judges a claim; None for one that nothing checks."""
    if isinstance(claim.check, dict):
        return expected(f"claim {claim.id!r}", claim.check)
    return checks().get(claim.check)


@cache
def checks() -> dict[str, Check]:
    """The checks of all studies, by name: the public functions of their `checks.py`."""
    found: dict[str, Check] = {}
    for study in STUDIES:
        if find_spec(f"{__package__}.{study}.checks"):
            module = import_module(f"{__package__}.{study}.checks")
            reads = getattr(module, "READS", {})
            for name, function in getmembers(module, isfunction):
                if function.__module__ == module.__name__ and not name.startswith("_"):
                    found[name] = Check(reads.get(name, (study,)), function)
    return found


def as_frame(checked: Iterable[CheckedClaim]) -> pd.DataFrame:
    """A row a claim, for a notebook."""
    rows = [(c.claim.id, c.claim.claimed, c.finding.measured, c.finding.verdict) for c in checked]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def reasons(checked: Iterable[CheckedClaim]) -> pd.DataFrame:
    """What the sources say, in their words, with each verdict and why."""
    rows = [(c.claim.quote, c.finding.verdict, c.finding.reason) for c in checked]
    return pd.DataFrame(rows, columns=["claim", "verdict", "reason"])


def choose(claims: list[Claim], ids: Sequence[str]) -> list[Claim]:
    """The claims of `ids`, in that order, or all; ValueError with close matches for another id."""
    by_id = {claim.id: claim for claim in claims}
    for name in ids:
        if name not in by_id:
            known = difflib.get_close_matches(name, by_id) or list(by_id)
            raise ValueError(f"ID must be one of {', '.join(known)}, got {name!r}")
    return [by_id[name] for name in dict.fromkeys(ids)] if ids else claims


def render_table(checked: Iterable[CheckedClaim]) -> str:
    """A line a claim, in aligned columns, with a head."""
    found = as_frame(checked).replace({"measured": {"": "-"}})
    rows = [COLUMNS, *found.itertuples(index=False)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def render_details(checked: CheckedClaim) -> str:
    """All there is on one claim, a line a field."""
    claim, finding = checked.claim, checked.finding
    more = len(finding.records) - SHOWN_RECORDS
    shown = [*finding.records[:SHOWN_RECORDS], *([f"and {more} more"] if more > 0 else [])]
    check = claim.check
    if isinstance(check, dict):
        check = ", ".join(f"{name}: {value}" for name, value in check.items() if name != "says")
    lines = {
        "source": claim.source.label,
        "quote": claim.quote,
        "shape": claim.shape,
        "measured on": claim.measured_on,
        "claimed": claim.claimed,
        "measured": finding.measured or "-",
        "verdict": finding.verdict,
        "because": finding.reason,
        "note": claim.note,
        "check": check,
        "records": ", ".join(shown) or "none",
    }
    return "\n".join([claim.id, *(f"  {name:<12}{text}" for name, text in lines.items())])


def _records(study: Study, machine: str | None) -> pd.DataFrame:
    place = study.reference_machine if machine == PUBLISHED else machine or record_machine(study)
    must = place == study.reference_machine and machine != PUBLISHED
    if not must and place not in store.machines(study.name):
        return pd.DataFrame()
    return store.load(study.name, place)


def _find(claim: Claim, frames: dict[str, Any]) -> Finding:
    check = check_of(claim)
    if check is None:
        return Finding(UNCHECKED[str(claim.check)], claim.note)
    try:
        for study in check.studies:
            if frames[study].empty:
                raise MissingRecordsError(f"this machine has none of {study}")
        frame = pd.concat([frames[study] for study in check.studies], ignore_index=True)
        return check.find(frame, claim.figure.value if claim.figure else None)
    except MissingRecordsError as error:
        return Finding(OPEN, f"Records of {' or '.join(check.studies)} are missing: {error}.")


def _source(name: str, entry: Any) -> Source:
    _require_fields(f"source {name!r}", entry, [field.name for field in fields(Source)])
    return Source(entry["repo"], int(entry["pull"]), str(entry["date"]))


def _claim(number: int, entry: Any, sources: dict[str, Source]) -> Claim:
    named = f"claim {entry.get('id', number)!r}" if isinstance(entry, dict) else f"claim {number}"
    _require_fields(named, entry, [field.name for field in fields(Claim)])
    for name in ("id", "quote", "shape", "measured_on", "note"):
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise ValueError(f"{name} of {named} must be a text, got {entry[name]!r}")
    require_known(f"source of {named}", entry["source"], sources)
    if not isinstance(entry["check"], dict):
        require_known(f"check of {named}", entry["check"], {**UNCHECKED, **checks()})
    figure = _figure(named, entry["figure"])
    claim = Claim(**{**entry, "source": sources[entry["source"]], "figure": figure})
    check = check_of(claim)
    if check and check.needs_figure and figure is None:
        raise ValueError(f"figure of {named} must be a number, its check compares with it")
    return claim


def _figure(named: str, entry: Any) -> Figure | None:
    if entry is None:
        return None
    _require_fields(f"figure of {named}", entry, [field.name for field in fields(Figure)])
    value = entry["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"value in the figure of {named} must be a number, got {value!r}")
    return Figure(float(value), str(entry["unit"]))


def _require_fields(what: str, entry: Any, names: Sequence[str]) -> None:
    have = set(entry) if isinstance(entry, dict) else set()
    if have != set(names):
        raise ValueError(f"{what} must have the fields {', '.join(names)}, got {sorted(have)}")
