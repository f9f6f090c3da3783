"""Published claims, and the verdict that the records give on each one: data/claims.yaml.

| verdict | when |
|---|---|
| confirmed | every decided case supports the claim |
| refuted | every decided case contradicts it |
| partly | some cases support it, some contradict it |
| open | more than half of the cases are ambiguous, or records are missing |
| not measurable here | no record can decide it |

A claim has one check (`CHECKS`), or a fixed `verdict` with its reason where no check can say it.
data/README.md lists the fields.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from ..core.spec import AttnSpec, require_word
from ..measure.stats import AMBIGUOUS, FASTER, NOT_SLOWER, SAME, SLOWER
from ..run import store
from ..run.frame import good_rows, over, side_rows
from ..run.study import record_machine
from ..select import explain
from ..select.models import yaml_loader
from . import STUDIES

CONFIRMED, REFUTED, PARTLY, OPEN = "confirmed", "refuted", "partly", "open"
NOT_HERE = "not measurable here"
VERDICTS = (CONFIRMED, REFUTED, PARTLY, OPEN, NOT_HERE)
CLAIMS = Path(__file__).resolve().parents[1] / "data" / "claims.yaml"
FIELDS = ("id", "source", "quote", "shape", "figure", "measured_on", "note")
PAIRS = "study cases pairs expect timers not_slower somewhere".split()
"""Fields of the check `pairs`."""
EXPECTED = (FASTER, SLOWER, SAME, NOT_SLOWER, "about")
ABOUT = 1.25
"""A measured ratio is about a figure if it lies within a quarter of it."""
LAYER = AttnSpec(32, 8, 128, 16)
"""The layer of a check by rule."""


class MissingRecordsError(ValueError):
    """The study lacks records that a check needs."""


@dataclass(frozen=True)
class Claim:
    """One published claim: its quote, its source (`owner/name #number, date`) and its check."""

    id: str
    source: str
    quote: str
    shape: str
    figure: float | None
    unit: str
    measured_on: str
    note: str
    kind: str
    check: Any

    @property
    def claimed(self) -> str:
        """The figure with its unit, or `yes`."""
        return "yes" if self.figure is None else f"{self.figure:g} {self.unit}"

    @property
    def study(self) -> str:
        """The study whose records decide it; empty for a rule or a fixed verdict."""
        return self.check.get("study", "") if isinstance(self.check, dict) else ""


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, the reason, what was measured and the ids of the records."""

    claim: Claim
    verdict: str
    reason: str
    measured: str = ""
    records: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        names = ("id", "source", "quote", "shape", "measured_on", "claimed", "note")
        claim = {name: getattr(self.claim, name) for name in names}
        result = {"measured": self.measured, "verdict": self.verdict, "reason": self.reason}
        return claim | result | {"records": list(self.records)}


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of the file in order; ValueError names the claim that is not valid."""
    ledger = yaml.load(path.read_text(encoding="utf-8"), yaml_loader())
    claims = [_claim(entry, ledger["sources"]) for entry in ledger["claims"]]
    repeated = [name for name, count in Counter(c.id for c in claims).items() if count > 1]
    if repeated:
        raise ValueError(f"id must be unique, claim {repeated[0]!r} occurs twice")
    return claims


def _claim(entry: dict[str, Any], sources: dict[str, Any]) -> Claim:
    name = entry.get("id", "without id")
    kinds = [kind for kind in (*CHECKS, "verdict") if kind in entry]
    if set(entry) != {*FIELDS, *kinds} or len(kinds) != 1:
        wanted = f"{', '.join(FIELDS)} and one of {', '.join((*CHECKS, 'verdict'))}"
        raise ValueError(f"claim {name!r} must have {wanted}, got {', '.join(entry)}")
    if entry["source"] not in sources:
        raise ValueError(f"source of claim {name!r} must be one of {', '.join(sources)}")
    if kinds == ["verdict"] and entry["verdict"] not in VERDICTS:
        raise ValueError(f"verdict of claim {name!r} must be one of {', '.join(VERDICTS)}")
    source, figure = sources[entry["source"]], entry["figure"] or {}
    if kinds == ["pairs"]:
        _require_pairs(name, entry["pairs"], figure)
    return Claim(
        **{name: entry[name] for name in ("id", "quote", "shape", "measured_on", "note")},
        source=f"{source['repo']} #{source['pull']}, {source['date']}",
        figure=figure.get("value"),
        unit=figure.get("unit", ""),
        kind=kinds[0],
        check=entry[kinds[0]],
    )


def _require_pairs(name: str, check: dict[str, Any], figure: dict[str, Any]) -> None:
    """ValueError for an unknown field or expectation, or an `about` without a figure."""
    if unknown := [field for field in check if field not in PAIRS]:
        raise ValueError(f"pairs of claim {name!r} may have {', '.join(PAIRS)}, got {unknown}")
    for word in check.get("expect") or [None]:
        require_word(f"expect of claim {name!r}", word, EXPECTED)
    if "about" in check["expect"] and (check["expect"] != ["about"] or not figure.get("value")):
        raise ValueError(f"expect of claim {name!r} must be [about] alone, with a figure")


def verdicts(ids: Sequence[str] = ()) -> list[Judged]:
    """Every claim, or those of `ids`, with its verdict from the records that each study shows.

    Raises ValueError for an unknown id.
    """
    claims = load_claims()
    by_id = {claim.id: claim for claim in claims}
    for name in ids:
        if name not in by_id:
            close = difflib.get_close_matches(name, by_id) or list(by_id)
            raise ValueError(f"ID must be one of {', '.join(close)}, got {name!r}")
    chosen = [by_id[name] for name in dict.fromkeys(ids)] if ids else claims
    return [judge(claim) for claim in chosen]


def judge(claim: Claim) -> Judged:
    """The verdict on one claim; `open` if records are missing."""
    if claim.kind == "verdict":
        return Judged(claim, claim.check, claim.note)
    try:
        return CHECKS[claim.kind](claim)
    except MissingRecordsError as error:
        return Judged(claim, OPEN, f"Records of {claim.study} are missing: {error}.")


def vote(support: int, against: int, undecided: int = 0) -> str:
    """The verdict of so many cases; ValueError without a case."""
    cases = support + against + undecided
    if not cases:
        raise ValueError("a verdict must have at least one case, got none")
    if 2 * undecided > cases:
        return OPEN
    if not against:
        return CONFIRMED
    return PARTLY if support else REFUTED


def _rows(claim: Claim) -> pd.DataFrame:
    """The records of the claim's study at its cases, whatever their status."""
    study = STUDIES[claim.study]
    machine = record_machine(study)
    if machine not in store.machines(study.name):
        raise MissingRecordsError(f"{machine} has none")
    frame = store.load(study.name, machine)
    group = claim.check["cases"]
    module = import_module(f"{__package__}.{study.name}")
    cases = study.cases if group == "all" else getattr(module, group.upper())
    return frame[frame.case.isin(cases)]


def _judge_pairs(claim: Claim) -> Judged:
    """Cases vote by the verdict on side a over side b.

    With `expect: [about]` a case votes by whether its ratio is about the claim's figure. With
    `somewhere: true` one case that is as expected confirms the claim.
    """
    check, rows = claim.check, _rows(claim)
    expect = check["expect"]
    parts, ids = [], list[str]()
    for timer in check.get("timers", ["graph"]):
        timed = good_rows(rows, timer)
        for a, b in check["pairs"]:
            parts.append(over(timed, a, b, not_slower=check.get("not_slower", 0.0)))
            ids += side_rows(timed, a).id.tolist() + side_rows(timed, b).id.tolist()
    table = pd.concat(parts, ignore_index=True)
    if table.empty:
        raise MissingRecordsError("the two sides share no round")
    counts = Counter(table.verdict)
    words = ", ".join(f"{word} in {count}" for word, count in counts.most_common())
    reason = f"{' and '.join(f'{a} / {b}' for a, b in check['pairs'])}: {words} of {len(table)}."
    support, undecided = sum(counts[word] for word in expect), counts[AMBIGUOUS]
    if expect == ["about"]:
        assert claim.figure
        is_about = table.ratio.between(claim.figure / ABOUT, claim.figure * ABOUT)
        support, undecided = int(is_about.sum()), 0
        reason += f" {support} of {len(table)} ratios are within a quarter of {claim.figure:g}."
    verdict = vote(support, len(table) - support - undecided, undecided)
    if check.get("somewhere"):
        verdict = CONFIRMED if support else OPEN if undecided else REFUTED
    low, middle, high = table.ratio.quantile([0, 0.5, 1])
    measured = f"{low:.2f} to {high:.2f} x, median {middle:.2f}"
    return Judged(claim, verdict, reason, measured, tuple(ids))


def _judge_families(claim: Claim) -> Judged:
    """Records vote by the kernel family that ran; `releases` maps a release to families."""
    check, rows = claim.check, _rows(claim)
    rows = rows[(rows.backend == check["backend"]) & rows.release.isin(check["releases"])]
    if set(rows.release) != set(check["releases"]):
        raise MissingRecordsError(f"of releases {', '.join(check['releases'])} some are missing")
    ran = rows.kernel_family.where(rows.status == "ok", rows.status)
    pairs = list(zip(ran, rows.release, strict=True))
    held = sum(name in check["releases"][release] for name, release in pairs)
    reason = f"As claimed in {held} of {len(rows)} records."
    seen = "; ".join(f"{release}: {name}" for name, release in dict.fromkeys(pairs))
    return Judged(claim, vote(held, len(rows) - held), reason, seen, tuple(rows.id))


def _judge_launches(claim: Claim) -> Judged:
    """Traces vote by how often a call launches `kernel` (an empty name: any): `count` times."""
    check, rows = claim.check, _rows(claim)
    rows = side_rows(rows[rows.status == "ok"], check["backend"])
    if rows.empty:
        raise MissingRecordsError(f"{check['backend']} has none that is ok")
    name, low = check["kernel"], check.get("at_least", check.get("count"))
    launches = rows.kernels.map(lambda ks: sum(k.launches for k in ks if k.name.startswith(name)))
    good = (launches >= low) & (launches <= check.get("count", float("inf")))
    held = int(good.sum())
    reason = f"As claimed in {held} of {len(rows)} traces."
    measured = f"{launches.min():g} to {launches.max():g} launches of {name or 'kernels'}"
    return Judged(claim, vote(held, len(rows) - held), reason, measured, tuple(rows.id))


def _judge_rule(claim: Claim) -> Judged:
    """Releases vote by the backend that their source names first (`select.explain`)."""
    check, held = claim.check, 0
    libraries: dict[str, list[str]] = {}
    for call in check["calls"]:
        policy = call.get("policy", "auto")
        choice = explain(
            LAYER, mode=check["mode"], gpu=check["gpu"], library=call["library"], policy=policy
        )
        row = next(reason for reason in choice.reasons if reason.matched)
        held += row.subject == call["picks"]
        libraries.setdefault(f"{row.subject} ({row.source})", []).append(choice.library)
    answers = [f"{answer} in {', '.join(names)}" for answer, names in libraries.items()]
    reason = f"Read in the source: {'; '.join(answers)}."
    return Judged(claim, vote(held, len(check["calls"]) - held), reason)


CHECKS: dict[str, Callable[[Claim], Judged]] = {
    "pairs": _judge_pairs,
    "ran": _judge_families,
    "launches": _judge_launches,
    "rule": _judge_rule,
}
"""Key of a claim's check in the file -> the function that judges it."""


def as_frame(judged: Iterable[Judged]) -> pd.DataFrame:
    """A row per claim: id, claimed, measured, verdict."""
    rows = [(j.claim.id, j.claim.claimed, j.measured, j.verdict) for j in judged]
    return pd.DataFrame(rows, columns=["id", "claimed", "measured", "verdict"])


def details(judged: Judged) -> str:
    """All fields of one claim, a line each, and the first records."""
    fields = judged.to_dict() | {"records": ", ".join(judged.records[:4]) or "none"}
    if judged.claim.note == judged.reason:
        del fields["note"]
    rows = [f"  {name:<13}{text}" for name, text in fields.items() if text and name != "id"]
    return "\n".join([judged.claim.id, *rows])
