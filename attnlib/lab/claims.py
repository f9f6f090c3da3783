"""Published claims, and the verdict that the records give on each one: data/claims.yaml.

| verdict | when |
|---|---|
| confirmed | every decided case supports the claim |
| refuted | every decided case contradicts it |
| partly | some cases support it, some contradict it |
| open | more than half of the cases are inconclusive |
| not measured | GPUs on record could decide it; no record does |
| not measurable here | it is about a GPU, or more GPUs of one host, than are on record |

A claim has one check (`CHECKS`). data/README.md lists the fields.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd

from .. import studies
from ..core.spec import AttnSpec, require_word
from ..core.yaml_file import Entry, Kind, read_yaml, require_fields
from ..measure.stats import FASTER, INCONCLUSIVE, NOT_SLOWER, SAME, SLOWER
from ..run import store
from ..run.frame import good_rows, over, side_rows
from ..run.study import record_machine
from ..select import explain

CONFIRMED, REFUTED, PARTLY, OPEN = "confirmed", "refuted", "partly", "open"
NOT_MEASURED, NOT_HERE = "not measured", "not measurable here"
VERDICTS = (CONFIRMED, REFUTED, PARTLY, OPEN, NOT_MEASURED, NOT_HERE)
CLAIMS = Path(__file__).resolve().parents[1] / "data" / "claims.yaml"
TOLD = ("id", "source", "quote", "shape", "measured_on", "claimed", "note")
"""Fields of a claim that its JSON form has."""
CLAIM_COLUMNS = ("id", "claimed", "measured", "verdict")
EXPECTED = (FASTER, SLOWER, SAME, NOT_SLOWER, "about")
TIMERS = ("graph", "profiler")
"""Timers whose records are judged."""
MOST_SLOWER = 0.04
"""Slower by less than that is `not slower`, where a claim expects it."""
ABOUT_RATIO = 1.25
"""A measured ratio is about a figure if it lies within a quarter of it."""
RULE_LAYER = AttnSpec(32, 8, 128, 16)
"""The layer of a check by rule."""


SOURCE: dict[str, Kind] = {
    "repo": str,
    "pull": int,
    "date": date | str,
}
ENTRY: dict[str, Kind] = {
    "id": str,
    "source": str,
    "quote": str,
    "shape": str,
    "figure": dict | None,
    "measured_on": str,
    "note": str,
}
"""Fields of a claim as it is written, and the type of each."""
CHECKED: dict[str, Kind] = {
    "pairs": dict,
    "ran": dict,
    "rule": dict,
    "served": dict,
    "verdict": str,
}
"""A claim's check is one of these fields."""
FORMS: dict[str, tuple[dict[str, Kind], dict[str, Kind]]] = {
    "pairs": (
        {"study": str, "cases": str, "pairs": list, "expect": list},
        {"somewhere": bool},
    ),
    "ran": ({"study": str, "cases": str, "backend": str, "releases": dict}, {}),
    "rule": ({"mode": str, "gpu": str, "calls": list}, {}),
    "served": ({"cases": str, "pair": list, "metric": str, "expect": str}, {}),
}
"""Fields of a check: those that must be given, and those that may."""


class MissingRecordsError(ValueError):
    """The study lacks records that a check needs."""


@dataclass(frozen=True)
class Claim:
    """One published claim: its quote, its source (`owner/name #number, date`) and its check."""

    id: str
    source: str
    quote: str
    shape: str
    figure: Mapping[str, Any] | None
    measured_on: str
    note: str
    check: Any

    @property
    def claimed(self) -> str:
        """The figure with its unit, or `yes`."""
        return f"{self.figure['value']:g} {self.figure['unit']}" if self.figure else "yes"

    @property
    def study(self) -> str:
        """The study whose records decide it; empty for a rule or a fixed verdict."""
        return getattr(self.check, "study", "")


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
        told = {name: getattr(self.claim, name) for name in TOLD}
        return {
            **told,
            "measured": self.measured,
            "verdict": self.verdict,
            "reason": self.reason,
            "records": list(self.records),
        }


@dataclass(frozen=True)
class Pairs:
    """Cases vote by the verdict on side a over side b, of each pair of sides.

    With `expect: [about]` a case votes by whether its ratio is about the claim's figure. With
    `somewhere: true` one case that is as expected confirms the claim.
    """

    study: str
    cases: str
    pairs: Sequence[Sequence[str]]
    expect: Sequence[str]
    somewhere: bool = False

    def __post_init__(self) -> None:
        _require_cases(self.study, self.cases)
        for word in self.expect:
            require_word("expect", word, EXPECTED)
        for pair in self.pairs:
            _require_texts("pairs", pair)
            if len(pair) != 2:
                raise ValueError(f"pairs must be lists of two sides, got {pair!r}")

    def judge(self, claim: Claim) -> Judged:
        """The vote of the cases of all pairs."""
        table, ids = self._ratios()
        counts = Counter(table.verdict)
        sides = " and ".join(f"{a} / {b}" for a, b in self.pairs)
        words = ", ".join(f"{word} in {count}" for word, count in counts.most_common())
        reason = f"{sides}: {words} of {len(table)}."
        support = sum(counts[word] for word in self.expect)
        undecided = counts[INCONCLUSIVE]
        if claim.figure and "about" in self.expect:
            figure = claim.figure["value"]
            is_about = table.ratio.between(figure / ABOUT_RATIO, figure * ABOUT_RATIO)
            support = int(is_about.sum())
            undecided = 0
            reason += f" {support} of {len(table)} ratios are within a quarter of {figure:g}."
        verdict = vote(
            support=support,
            against=len(table) - support - undecided,
            undecided=undecided,
        )
        if self.somewhere and support:
            verdict = CONFIRMED
        elif self.somewhere and undecided:
            verdict = OPEN
        low, middle, high = table.ratio.quantile([0, 0.5, 1])
        measured = f"{low:.2f} to {high:.2f} x, median {middle:.2f}"
        return Judged(
            claim=claim,
            verdict=verdict,
            reason=reason,
            measured=measured,
            records=tuple(ids),
        )

    def _ratios(self) -> tuple[pd.DataFrame, list[str]]:
        """Ratios of all pairs by each timer on record, and the ids of their records."""
        rows = _rows(self.study, self.cases)
        margin = MOST_SLOWER if NOT_SLOWER in self.expect else 0.0
        tables = []
        ids: list[str] = []
        for timer in TIMERS:
            timed = good_rows(rows, timer)
            for a, b in self.pairs if len(timed) else ():
                tables.append(over(timed, a, b, not_slower=margin))
                ids += side_rows(timed, a).id.tolist()
                ids += side_rows(timed, b).id.tolist()
        if not any(len(table) for table in tables):
            raise MissingRecordsError("the two sides share no round")
        return pd.concat(tables, ignore_index=True), ids


@dataclass(frozen=True)
class Served:
    """Loads on a server vote by what an arm saves of the base, with an interval that excludes 0.

    `pair` is the arm and its base, `metric` one of `served.METRICS`.
    """

    cases: str
    pair: Sequence[str]
    metric: str
    expect: str
    study: str = studies.served.STUDY.name

    def __post_init__(self) -> None:
        _require_cases(self.study, self.cases)
        _require_texts("pair", self.pair)
        require_word("metric", self.metric, studies.served.METRICS)
        require_word(
            name="expect",
            value=self.expect,
            words=(FASTER, SLOWER),
        )

    def judge(self, claim: Claim) -> Judged:
        """The vote of every case."""
        rows = _loads(self.cases)
        arm, base = self.pair
        rows = rows[rows.backend.isin(self.pair)]
        if rows.empty:
            raise MissingRecordsError("none is of such a load")
        table = studies.served.saved(rows, [(arm, base)], self.metric)
        if table.empty:
            raise MissingRecordsError("the two arms share no round")
        counts = Counter(table.verdict)
        undecided = counts[INCONCLUSIVE]
        support = counts[self.expect]
        verdict = vote(
            support=support,
            against=len(table) - support - undecided,
            undecided=undecided,
        )
        said = []
        for row in table.itertuples():
            said.append(f"{row.saved:.1f} % ({row.low:.1f} to {row.high:.1f})")
        measured = f"saves {', '.join(said)}"
        reason = f"{arm} / {base}, {self.metric}, {table.rounds.min()} rounds: {measured}."
        return Judged(
            claim=claim,
            verdict=verdict,
            reason=reason,
            measured=measured,
            records=tuple(rows.id),
        )


@dataclass(frozen=True)
class Ran:
    """Records vote by what ran: `releases` maps a release to kernel families, or to kernels.

    A kernel is named by how its name in the trace begins. What did not run has its status.
    """

    study: str
    cases: str
    backend: str
    releases: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        _require_cases(self.study, self.cases)
        for families in self.releases.values():
            _require_texts("releases", families)

    def judge(self, claim: Claim) -> Judged:
        """The vote of every record of the backend and the releases."""
        rows = _rows(self.study, self.cases)
        rows = rows[rows.backend == self.backend]
        rows = rows[rows.release.isin(list(self.releases))]
        if set(rows.release) != set(self.releases):
            raise MissingRecordsError(f"of releases {', '.join(self.releases)} some are missing")
        held = 0
        seen: dict[str, None] = {}
        for row in rows.itertuples():
            wanted = self.releases[row.release]
            ran = [row.kernel_family if row.status == "ok" else row.status]
            for word in wanted:
                if any(kernel.name.startswith(word) for kernel in row.kernels):
                    ran.insert(0, word)
            held += ran[0] in wanted
            seen[f"{row.release}: {ran[0]}"] = None
        reason = f"As claimed in {held} of {len(rows)} records."
        verdict = vote(held, len(rows) - held)
        return Judged(
            claim=claim,
            verdict=verdict,
            reason=reason,
            measured="; ".join(seen),
            records=tuple(rows.id),
        )


@dataclass(frozen=True)
class PickedByRule:
    """Releases vote by the backend that their source names first (`select.explain`)."""

    mode: str
    gpu: str
    calls: Sequence[Mapping[str, str]]

    def __post_init__(self) -> None:
        for call in self.calls:
            require_fields(
                entry=call,
                where="calls",
                required={"library": str, "picks": str},
                optional={"policy": str},
            )

    def judge(self, claim: Claim) -> Judged:
        """The vote of `calls`: library, what it `picks`, and the engine's policy, if any."""
        held = 0
        libraries: dict[str, list[str]] = {}
        for call in self.calls:
            choice = explain(
                RULE_LAYER,
                mode=self.mode,
                gpu=self.gpu,
                library=call["library"],
                policy=call.get("policy", "auto"),
            )
            row = next(reason for reason in choice.reasons if reason.matched)
            held += row.subject == call["picks"]
            libraries.setdefault(f"{row.subject} ({row.source})", []).append(choice.library)
        answers = [f"{answer} in {', '.join(names)}" for answer, names in libraries.items()]
        reason = f"Read in the source: {'; '.join(answers)}."
        return Judged(
            claim=claim,
            verdict=vote(held, len(self.calls) - held),
            reason=reason,
        )


@dataclass(frozen=True)
class Fixed:
    """A verdict that no other check can say; the claim's note is the reason."""

    verdict: str

    def __post_init__(self) -> None:
        require_word("verdict", self.verdict, VERDICTS)

    def judge(self, claim: Claim) -> Judged:
        """The verdict as it is written."""
        return Judged(claim, self.verdict, claim.note)


CHECKS: dict[str, Any] = {
    "pairs": Pairs,
    "ran": Ran,
    "rule": PickedByRule,
    "served": Served,
    "verdict": Fixed,
}
"""Key of a claim's check in the file -> the class that judges it."""


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of the file in order; ValueError names the claim that is not valid."""
    documents = read_yaml(path)
    if len(documents) != 1:
        raise ValueError(f"{path.name}: must hold one document, it holds {len(documents)}")
    (ledger,) = documents
    require_fields(
        entry=ledger,
        where=ledger.place,
        required={"sources": dict, "claims": list},
    )
    sources = ledger["sources"]
    for name, source in sources.items():
        require_fields(source, f"{sources.place}, {name}", SOURCE)
    claims: dict[str, Claim] = {}
    for entry in ledger["claims"]:
        place = getattr(entry, "place", ledger.place)
        require_fields(entry, place, ENTRY, CHECKED)
        name = entry["id"]
        if name in claims:
            raise ValueError(f"{place}: id must be unique, claim {name!r} occurs twice")
        try:
            claims[name] = _claim(entry, sources)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: claim {name!r} must be valid: {error}") from error
    return list(claims.values())


def _claim(written: Entry, sources: dict[str, Any]) -> Claim:
    entry = dict(written)
    named = entry.pop("source")
    require_word("source", named, sources)
    source = sources[named]
    kinds = [kind for kind in CHECKS if kind in entry]
    if len(kinds) != 1:
        raise ValueError(f"it must have one of {', '.join(CHECKS)}, got {kinds}")
    (kind,) = kinds
    form = entry.pop(kind)
    if entry["figure"] is not None:
        require_fields(
            entry=entry["figure"],
            where="figure",
            required={"value": float | int, "unit": str},
        )
    if kind == "verdict":
        check = Fixed(form)
    else:
        required, optional = FORMS[kind]
        require_fields(form, kind, required, optional)
        check = CHECKS[kind](**form)
    if "about" in getattr(check, "expect", ()) and not entry["figure"]:
        raise ValueError("expect must not be about without a figure")
    return Claim(
        source=f"{source['repo']} #{source['pull']}, {source['date']}", check=check, **entry
    )


def verdicts(ids: Sequence[str] = ()) -> list[Judged]:
    """Every claim, or those of `ids`, with its verdict from the records that each study shows.

    Raises ValueError for an unknown id.
    """
    by_id = {claim.id: claim for claim in load_claims()}
    for name in ids:
        near = difflib.get_close_matches(name, by_id) or by_id
        if name not in by_id:
            raise ValueError(f"ID must be one of {', '.join(near)}, got {name!r}")
    return [judge(by_id[name]) for name in dict.fromkeys(ids or by_id)]


def judge(claim: Claim) -> Judged:
    """The verdict on one claim; `not measured` if records are missing."""
    try:
        return claim.check.judge(claim)
    except MissingRecordsError as error:
        missing = f"Records of {claim.study} are missing: {error}."
        return Judged(claim, NOT_MEASURED, missing)


def vote(support: int, against: int, undecided: int = 0) -> str:
    """The verdict of so many cases, at least one."""
    cases = support + against + undecided
    if not cases:
        raise ValueError("a verdict must have at least one case, got none")
    if 2 * undecided > cases:
        return OPEN
    if not against:
        return CONFIRMED
    return PARTLY if support else REFUTED


def _require_texts(name: str, texts: Any) -> None:
    """ValueError unless `texts` is a list of texts."""
    is_list = isinstance(texts, list | tuple)
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} must hold lists of texts, got {texts!r}")


def _require_cases(name: str, group: str) -> None:
    """ValueError unless there is a study of this name, with this group of cases."""
    studies.require_sound(name)
    require_word("study", name, studies.STUDIES)
    _cases(name, group)


def _cases(name: str, group: str) -> Sequence[Any]:
    """A study's group of cases: `all`, or a constant of its module in lower case."""
    if group == "all":
        return studies.STUDIES[name].cases
    module = getattr(studies, name)
    cases = getattr(module, group.upper(), None)
    if not isinstance(cases, tuple):
        raise ValueError(f"cases must be all, or a group of {name}'s cases, got {group!r}")
    return cases


def _rows(name: str, group: str) -> pd.DataFrame:
    """The records of a study at a group of its cases (`_cases`), whatever their status."""
    study = studies.STUDIES[name]
    if not store.machines(name):
        raise MissingRecordsError("no machine has any")
    machine = record_machine(study)
    if machine not in store.machines(name):
        raise MissingRecordsError(f"{machine} has none")
    frame = store.load(name, machine)
    return frame[frame.case.isin(_cases(name, group))]


def _loads(group: str) -> pd.DataFrame:
    """The published records of servers at a group of loads."""
    served = studies.served
    on_record = {*store.machines(served.STUDY.name)}
    if not {*served.MACHINES} <= on_record:
        raise MissingRecordsError(f"{' or '.join(served.MACHINES)} has none")
    frame = served.load_all()
    return frame[frame.case.isin(_cases(served.STUDY.name, group))]


def as_frame(judged: Iterable[Judged]) -> pd.DataFrame:
    """A row per claim: id, claimed, measured, verdict."""
    rows = []
    for each in judged:
        told = each.to_dict()
        rows.append({name: told[name] for name in CLAIM_COLUMNS})
    return pd.DataFrame(rows, columns=list(CLAIM_COLUMNS))


def details(judged: Judged) -> str:
    """All fields of one claim, a line each, and the first records."""
    fields = judged.to_dict()
    fields["records"] = ", ".join(judged.records[:4]) or "none"
    if judged.claim.note == judged.reason:
        del fields["note"]
    lines = [fields.pop("id")]
    for name, text in fields.items():
        if text:
            lines.append(f"  {name:<13}{text}")
    return "\n".join(lines)
