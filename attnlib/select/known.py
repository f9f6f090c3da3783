"""Known problems as data: data/known/*.yaml, and which of them hold for a stack and a call.

data/known/README.md has the fields. A problem holds, may hold (then the facts that would decide it
are named), or is silent. Sizes are computed from the records (`lab.known_sizes`) or quoted from
a thread; none is typed.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from math import log2
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from ..core.yaml_file import Kind, read_yaml, require_fields
from .facts import FLAGS
from .lines import DETAILS
from .models import DATA
from .rules import Condition, Group, When, conditions
from .situation import (
    LENGTHS,
    OF_LENGTHS,
    OF_SITUATIONS,
    SERVER,
    SERVER_NUMBERS,
    Situation,
    card_named,
)

KNOWN_FOLDER = DATA / "known"
SIZES_FILE = KNOWN_FOLDER / "sizes.json"
SLOWER = "slower"
WHAT = (SLOWER, "wrong output", "crash", "out of memory", "blocked host")
EVIDENCE = ("record", "reported", "read")
NEEDED: dict[str, Kind] = {
    "what": str,
    "says": str,
    "do": str,
    "example": dict,
    "silent": dict,
}
OPTIONAL_KEYS: dict[str, Kind] = {
    "releases": dict,
    "when": list,
    "record": dict,
    "reported": list,
    "read": str,
    "links": list,
    "also": dict,
}
"""Keys of an entry that it must have, and that it may have; the type of each."""
SPAN: dict[str, Kind] = dict.fromkeys(("since", "until", "ends_in"), str | float)
RECORD: dict[str, Kind] = {"study": str, "gpu": str, "pair": list}
WHERE: dict[str, Kind] = {"where": dict, "loaded": str}
REPORT: dict[str, Kind] = {"url": str, "says": str}
AGAINST: dict[str, Kind] = {"against": bool}
HOLDS, MAY_HOLD = "holds", "may hold"
TITLES = {"sglang": "SGLang", "vllm": "vLLM", "flashinfer": "FlashInfer"}
"""Packages that people write otherwise."""
NO_SETTING = "There is no setting for it."
"""How `do` begins where nothing mends a problem."""


@dataclass(frozen=True)
class Span:
    """Releases of a package that have a problem: from `since` to before `ends_in`.

    `until` is the last one of which it is known, where no end is.
    """

    since: Version | None = None
    until: Version | None = None
    ends_in: Version | None = None

    def has(self, release: Version) -> bool | None:
        """Whether a release has it; None for one that is newer than what is known."""
        if self.since and release < self.since:
            return False
        if self.ends_in:
            return release < self.ends_in
        if self.until and release > self.until:
            return None
        return True

    @property
    def end(self) -> str:
        """`ended in 0.6.4`, or the last release of which it is known."""
        if self.ends_in:
            return f"ended in {self.ends_in}"
        return f"known to {self.until}" if self.until else ""

    def __str__(self) -> str:
        since = f"since {self.since}" if self.since else ""
        return ", ".join(filter(None, [since, self.end]))


@dataclass(frozen=True)
class Problem:
    """One entry. Exactly one of `record`, `reported` and `read` says by how much, or how it is
    known."""

    id: str
    what: str
    says: str
    do: str
    component: str
    releases: Mapping[str, Span] = field(default_factory=dict)
    when: tuple[When, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    reported: tuple[Mapping[str, Any], ...] = ()
    read: str = ""
    links: tuple[str, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, Any] = field(default_factory=dict)
    silent: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_size(self) -> bool:
        """Whether records or threads say by how much; `read` alone does not."""
        return not self.read


@dataclass(frozen=True)
class Here:
    """What the records say of a problem at the call that was asked.

    `slowdown` is the time with the problem over the time without; of `nearest` other calls the
    geometric mean, of which `least` and `most` are the ends, of 0 this call's own. An effect within
    `margin` is none.
    """

    slowdown: float
    margin: float
    gpu: str
    nearest: int = 0
    least: float = 0.0
    most: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the nearest calls disagree: the problem slows some of them and others not."""
        bound = 1 + self.margin
        return self.nearest > 0 and self.least <= bound < self.most

    @property
    def costs(self) -> bool:
        """Whether the problem slows the call."""
        return not self.is_open and self.slowdown > 1 + self.margin

    @property
    def is_harmless(self) -> bool:
        """Whether the problem does not slow the call."""
        return not self.is_open and not self.costs

    def __str__(self) -> str:
        card = card_named(self.gpu).upper() or self.gpu
        if self.is_open:
            spread = f"{self.least:.2f} to {self.most:.2f}"
            near = f"the {self.nearest} nearest calls on record"
            return f"inconclusive, {near} have slowdowns of {spread}, {card}"
        where = "on record of this call"
        if self.nearest:
            where = f"in the mean of the {self.nearest} nearest calls on record"
        if self.costs:
            return f"slowdown {self.slowdown:.2f} {where}, {card}"
        is_slower = self.slowdown < 1 / (1 + self.margin)
        effect = "the fix is slower" if is_slower else "the fix changes nothing"
        return f"{where} {effect} (speedup {self.slowdown:.2f}), {card}"


@dataclass(frozen=True)
class Found:
    """A problem that holds, or, with `missing` facts or releases, one that may hold.

    `package` is the one of the stack whose release has it; empty for a setting. `here` is what the
    records say of the call, where one was asked that is on record, or others like it are.
    `requests` are those of the call, 0 where they are not known.
    """

    problem: Problem
    missing: tuple[str, ...] = ()
    package: str = ""
    here: Here | None = None
    requests: int = 0

    @property
    def is_sized(self) -> bool:
        """Whether it holds, and records or threads say by how much."""
        return self.verdict == HOLDS and self.problem.has_size

    @property
    def costs(self) -> bool:
        """Whether it holds, has a size, and no record says that it costs this call nothing; calls
        that disagree do not say it."""
        return self.is_sized and not self.is_harmless

    @property
    def is_harmless(self) -> bool:
        """Whether it holds and the records say that it costs this call nothing."""
        return self.verdict == HOLDS and self.here is not None and self.here.is_harmless

    @property
    def is_open(self) -> bool:
        """Whether it holds and the records of calls like this disagree on what it costs."""
        return self.verdict == HOLDS and self.here is not None and self.here.is_open

    @property
    def verdict(self) -> str:
        """`holds` or `may hold`."""
        return MAY_HOLD if self.missing else HOLDS

    @property
    def is_newer(self) -> bool:
        """Whether only the release is open: the stack's is newer than what is known."""
        return any(" after " in name for name in self.missing)

    def is_open_in(self, stack: Mapping[str, Version]) -> bool:
        """Whether a stack has a release that is newer than what is known of the problem."""
        span = self.problem.releases.get(self.package, Span())
        return self.package in stack and span.has(stack[self.package]) is None

    @property
    def releases(self) -> str:
        """`sglang since 0.5.16, known to 0.5.23`, of the stack's package."""
        if not self.package:
            return ""
        return f"{self.package} {self.problem.releases[self.package]}"

    @property
    def heading(self) -> str:
        """`Slower since SGLang 0.5.16 (known to 0.5.23)`; a note where no size is known."""
        what = self.problem.what.capitalize()
        if not self.problem.has_size:
            what = f"Note, {self.problem.what}"
        if self.is_harmless:
            what = f"Not {self.problem.what} at this call, at others"
        if self.is_open:
            what = f"Inconclusive at this call, {self.problem.what} at others"
        if not self.package:
            return what
        name = TITLES.get(self.package, self.package)
        span = self.problem.releases[self.package]
        end = f"ended in {span.ends_in}" if span.ends_in else f"known to {span.until}"
        if span.since:
            return f"{what} since {name} {span.since} ({end})"
        return f"{what} in {name} ({end})"

    @property
    def confirmed_by(self) -> str:
        """What a user has to pass, so that the missing facts are known; or, of a release that is
        newer than what is known, that it is."""
        if self.is_newer:
            return f"not known of {self.missing[0]}"
        return f"pass {' '.join(map(_option_for, self.missing))}"


def _option_for(name: str) -> str:
    """The option of `explain` that states a fact."""
    if name == "model":
        return "--model NAME"
    if name == LENGTHS:
        return "--call kv_lens=LENS"
    option = "--call"
    if name in (*SERVER, *SERVER_NUMBERS):
        option = "--server"
    is_flag = name in (*SERVER, *FLAGS)
    return f"{option} {name}" if is_flag else f"{option} {name}=N"


def truth(part: When, facts: Mapping[str, Any]) -> bool | None:
    """Whether a condition holds, or None where a fact that decides it is unknown."""
    if isinstance(part, Condition):
        return part.holds(facts) if part.fact in facts else None  # type: ignore[arg-type]
    parts = [truth(inner, facts) for inner in part.of]
    decides = part.joint == "or"
    if decides in parts:
        return decides
    return None if None in parts else not decides


def unknown(part: When, facts: Mapping[str, Any]) -> set[str]:
    """What a user has to give, so that a condition is decided; the lengths under one name."""
    if truth(part, facts) is not None:
        return set()
    if isinstance(part, Group):
        names: set[str] = set()
        for inner in part.of:
            names |= unknown(inner, facts)
        return names
    if part.fact in OF_LENGTHS:
        return {LENGTHS}
    return {"context" if part.fact == "near_context" else part.fact}


def found(problem: Problem, situation: Situation) -> Found | None:
    """Whether a problem holds in a situation, or may hold; None if it does not.

    In a release that is newer than what is known it may hold only where every fact holds.
    """
    name = next((name for name in problem.releases if name in situation.stack), "")
    has: bool | None = not problem.releases
    if name:
        has = problem.releases[name].has(situation.stack[name])
    if has is False:
        return None
    missing: set[str] = set()
    for part in problem.when:
        if truth(part, situation.facts) is False:
            return None
        missing |= unknown(part, situation.facts)
    if has is None:
        if missing:
            return None
        missing = {f"{name} after {problem.releases[name].until}"}
    return Found(
        problem=problem,
        missing=tuple(sorted(missing)),
        package=name,
        requests=situation.facts.get("batch_size", 0),
    )


def known_problems(
    situation: Situation,
    problems: Iterable[Problem] | None = None,
) -> list[Found]:
    """The problems that hold in a situation, then those that may hold, each in the files' order."""
    tried = PROBLEMS.values() if problems is None else problems
    answers = [found(problem, situation) for problem in tried]
    some = [answer for answer in answers if answer is not None]
    return sorted(some, key=lambda answer: bool(answer.missing))


def load_problems(folder: Path = KNOWN_FOLDER) -> dict[str, Problem]:
    """Every problem by id; ValueError names file, line, entry and field of what is not valid."""
    problems: dict[str, Problem] = {}
    for path in sorted(folder.glob("*.yaml")):
        for document in read_yaml(path):
            for name, entry in document.items():
                where = f"{getattr(entry, 'place', path.name)}, {name}"
                if name in problems:
                    raise ValueError(f"{where}: an id must be unique, another file has it")
                problems[name] = _problem(
                    name=name,
                    entry=entry,
                    component=path.stem,
                    where=where,
                )
    return problems


def _problem(
    name: str,
    entry: Mapping[str, Any],
    component: str,
    where: str,
) -> Problem:
    require_fields(entry, where, NEEDED, OPTIONAL_KEYS)
    for key in NEEDED:
        if not entry[key]:
            raise ValueError(f"{where}: {key} must be given")
    if entry["what"] not in WHAT:
        raise ValueError(f"{where}: what must be one of {', '.join(WHAT)}, got {entry['what']!r}")
    evidence = [key for key in EVIDENCE if key in entry]
    if len(evidence) != 1:
        raise ValueError(f"{where}: one of {', '.join(EVIDENCE)} must be given, got {evidence}")
    if "record" in entry:
        require_fields(entry["record"], f"{where}, record", RECORD, WHERE)
    for report in entry.get("reported", ()):
        require_fields(report, f"{where}, reported", REPORT, AGAINST)
        if not report["url"].startswith("https://"):
            raise ValueError(f"{where}, reported: url must be https, got {report['url']!r}")
    spans = {}
    for package, span in entry.get("releases", {}).items():
        spans[package] = _span(span, f"{where}, releases, {package}")
    try:
        when = conditions(entry.get("when", []), OF_SITUATIONS)
    except ValueError as error:
        raise ValueError(f"{where}, when: {error}") from error
    return Problem(
        id=name,
        what=entry["what"],
        says=entry["says"],
        do=entry["do"],
        component=component,
        releases=spans,
        when=when,
        record=entry.get("record", {}),
        reported=tuple(entry.get("reported", ())),
        read=entry.get("read", ""),
        links=tuple(entry.get("links", ())),
        example=entry["example"],
        also=entry.get("also", {}),
        silent=entry["silent"],
    )


def _span(written: Mapping[str, Any], where: str) -> Span:
    require_fields(written, where, {}, SPAN)
    if not ("until" in written or "ends_in" in written):
        raise ValueError(f"{where}: until or ends_in must be given")
    try:
        bounds = {name: Version(str(release)) for name, release in written.items()}
        return Span(**bounds)
    except InvalidVersion as error:
        raise ValueError(f"{where}: {error}") from error


PROBLEMS = load_problems()


@cache
def sizes() -> dict[str, dict[str, Any]]:
    """Id -> what the records say of its size (`lab.known_sizes` writes them)."""
    return dict(json.loads(SIZES_FILE.read_text()))


def how_much(problem: Problem) -> list[str]:
    """By how much, by records or as threads report it, a line each."""
    if problem.read:
        return [f"Size not measured. Source: {problem.read}."]
    if problem.reported:
        lines = []
        for report in problem.reported:
            word = "reported against it" if report.get("against") else "reported"
            lines.append(f"{word}: {report['says']} ({report['url']})")
        return lines
    lines = []
    for size in sizes().get(problem.id, {}).get("sizes", ()):
        spread = f"{size['least']:.2f} to {size['most']:.2f}"
        words = f"{_median_slowdown(size)} {size['unit']} ({spread})"
        if "slow_us" in size:
            words = _us_per_step(size, f", median slowdown {size['median']:.2f}")
        lines.append(f"on record: {words}; {problem.record['study']}, {size['gpu']}")
    loaded = sizes().get(problem.id, {}).get("loaded")
    if loaded:
        lines.append(
            f"under load: slowdown {loaded['least']:.2f} to {loaded['most']:.2f} of tokens/s over "
            f"{loaded['cases']} loads of {loaded['model']}; served, {loaded['gpu']}"
        )
    return lines


def _median_slowdown(size: Mapping[str, Any]) -> str:
    """`median slowdown 1.77 over 253`."""
    return f"median slowdown {size['median']:.2f} over {size['cases']}"


def _us_per_step(size: Mapping[str, Any], more: str = "") -> str:
    """Of metadata, which is a small part of a step: the times, least to most."""
    slow, fast = (
        f"{least:.1f} to {most:.1f}" for least, most in (size["slow_us"], size["fast_us"])
    )
    calls = f"{size['cases']} calls on record"
    return f"{slow} us of metadata per step instead of {fast} ({calls}{more})"


def _us_of_nearest(size: Mapping[str, Any], requests: int) -> str:
    """The times of the recorded call whose number of requests is nearest, of several the slowest;
    of all where that of the call is not known."""
    if not requests:
        return _us_per_step(size)
    recorded, slow, fast = min(
        size["calls"],
        key=lambda call: (abs(log2(call[0] / requests)), -call[1]),
    )
    times = f"{slow:.1f} us of metadata per step instead of {fast:.1f}"
    return f"{times} for {recorded} request{'s' * (recorded > 1)} (nearest on record)"


def size_in_brief(problem: Problem, card: str, requests: int = 0) -> str:
    """By how much, in a line: by the records of a card, of all where none is named or on record,
    or as it was reported. Metadata is that of a call of as many `requests`, or nearly."""
    words = []
    for report in problem.reported:
        against = " against it" if report.get("against") else ""
        words.append(f"reported{against}: {report['says']}")
    recorded = sizes().get(problem.id, {}).get("sizes", ())
    of_card = [size for size in recorded if card and card_named(size["gpu"]) == card]
    for size in of_card or recorded:
        gpu = card_named(size["gpu"]).upper() or size["gpu"]
        said = f"{_median_slowdown(size)} recorded {size['unit']}"
        if "slow_us" in size:
            said = _us_of_nearest(size, requests)
        elif words:  # the same study on another card
            said = f"{size['median']:.2f} over {size['cases']}"
        words.append(f"{said}, {gpu}")
    return "; ".join(words)


def size_on_record(problem: Problem) -> str:
    """The median ratios by the records, one a GPU; else who says that it is known."""
    if problem.read:
        return "read, not measured"
    if problem.reported:
        return "reported"
    words = []
    for size in sizes().get(problem.id, {}).get("sizes", ()):
        words.append(f"{size['median']:.2f} x on {size['gpu']}")
    return ", ".join(words)


def what_to_do(problem: Problem, of: str = "") -> str:
    """`fix: ...`, or `fix of NAME: ...`, or that no setting mends it."""
    if problem.do.startswith(NO_SETTING):
        return problem.do
    if of:
        return f"fix of {of}: {problem.do}"
    return f"fix: {problem.do}"


def problem_lines(
    answer: Found,
    here: Iterable[str] | None = None,
    fix_of: str = "",
) -> list[str]:
    """A problem that holds: what it is, how much, what to do, where to read; a line each.

    `here` is what the records say of the calls that were asked, where they are several; `fix_of`
    names those that the fix is for, where it is not for all.
    """
    problem = answer.problem
    lines = [f"{answer.heading}: {problem.says} [{problem.id}]"]
    if here is None:
        here = [str(answer.here)] if answer.here else []
    lines += [f"  {line}" for line in here]
    lines += [f"  {line}" for line in how_much(problem)]
    where = "at other calls, " if answer.is_harmless else ""
    lines.append(f"  {where or _if_slower(answer)}{what_to_do(problem, fix_of)}")
    if problem.links:
        lines.append(f"  see: {', '.join(problem.links)}")
    return lines


def _if_slower(answer: Found) -> str:
    """How the line of a fix begins where records do not say whether the problem costs time."""
    return f"if {answer.problem.what} here, " if answer.is_open else ""


def in_brief(answer: Found) -> str:
    """A problem that holds, in a line: what it is, and what to do."""
    problem = answer.problem
    return f"known problem, {problem.what}: {problem.says} [{problem.id}] Do: {problem.do}"


def report(answers: Iterable[Found]) -> list[str]:
    """The problems that hold, each in a few lines, and in one line those that may hold."""
    lines: list[str] = []
    open_words = []
    for answer in answers:
        if answer.missing:
            open_words.append(f"{answer.problem.id} ({answer.confirmed_by})")
        else:
            lines += problem_lines(answer)
    if open_words:
        lines.append(f"Possible, if you confirm it: {'; '.join(open_words)}.")
    return lines


def report_in_brief(answers: Iterable[Found], card: str = "") -> list[str]:
    """The problems that hold and have a size, in three lines each, and how many others there are.

    `card` is the one whose records say the size, where none are of the call or of calls like it.
    One that costs the call nothing has no line of what to do.
    """
    answers = list(answers)
    lines: list[str] = []
    for answer in answers:
        if answer.is_sized:
            requests = answer.requests
            size = answer.here or size_in_brief(answer.problem, card, requests)
            lines += sized_in_brief(answer, str(size))
    return lines + others_in_brief(answers, is_first=not lines)


def sized_in_brief(answer: Found, size: str, fix_of: str = "") -> list[str]:
    """A problem that holds and has a size, in three lines; what costs nothing has no fix."""
    problem = answer.problem
    first_sentence, _, _ = problem.says.partition(". ")
    what = f"{first_sentence.removesuffix('.')}. [{problem.id}]"
    lines = [f"{answer.heading}: {what}", f"  size: {size}"]
    if not answer.is_harmless:
        lines.append(f"  {_if_slower(answer)}{what_to_do(problem, fix_of)}")
    return lines


def others_in_brief(answers: Iterable[Found], is_first: bool) -> list[str]:
    """How many problems hold without a size, and how many may hold."""
    answers = list(answers)
    possible = sum(bool(answer.missing) for answer in answers)
    unsized = sum(not answer.missing and not answer.problem.has_size for answer in answers)
    lines = []
    if unsized:
        lines.append(f"{_others(unsized, is_first)} without a measured size: {DETAILS}")
    if possible:
        lines.append(f"{_others(possible, is_first)} may hold, if you state more: {DETAILS}")
    return lines


def _others(count: int, is_first: bool) -> str:
    """`2 more`, or `2 known problems` where none was told of."""
    if not is_first:
        return f"{count} more"
    return "1 known problem" if count == 1 else f"{count} known problems"


def to_data(answers: Iterable[Found]) -> list[dict[str, Any]]:
    """The same as JSON data."""
    data = []
    for answer in answers:
        problem = answer.problem
        row = {
            "id": problem.id,
            "what": problem.what,
            "verdict": answer.verdict,
            "missing": list(answer.missing),
            "says": problem.says,
            "releases": answer.releases,
            "how_much": how_much(problem),
            "here": answer.here and asdict(answer.here) | {"costs": answer.here.costs},
            "do": problem.do,
            "links": list(problem.links),
        }
        data.append(row)
    return data
