"""Which release changed the speed: a binary search whose every step is a verdict over rounds.

The older end is the reference, and each step judges a candidate against it: with good < bad it
finds the first release that is `slower` than good, with good > bad the first `faster` than bad. It
assumes one change between the ends, and measures first that they differ.

Steps are ordinary records of a study of its own, `bisect_<study>`. Each record's command lists the
releases searched, so replay goes the same way. Even rounds run the reference first, odd ones the
candidate (A B B A), each release in a fresh process. They are numbered on through all pairs of a
backend and case, so a round belongs to one pair of releases; a round cut short, failed or left out
belongs to none. That is how a search resumes after it was stopped.
"""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from packaging.version import Version

from ..core.backends.table import BACKENDS, COMPARED
from ..core.spec import require_int, require_word
from ..kinds.cases import Case
from ..kinds.item import Item
from ..measure.stats import Ratio, judge_ratios
from . import store
from .jobs import Job
from .record import Record
from .releases import available_releases, parse_release, releases_between
from .study import Study, Sweep, machine_shown, mode

PREFIX = "bisect_"
RELEASES = re.compile(r" --releases (\S+)")
ROUND_LIMIT = 12
"""Rounds after which a verdict that is still ambiguous will not become clear by itself."""
Pair = tuple[Record, Record]
TIMER = "graph"
"""How engines run decode, and what the headline numbers of the studies are taken with."""


@dataclass(frozen=True)
class Step:
    """The verdict on `release` against the reference, and the kernel families that ran."""

    release: str
    verdict: Ratio
    kernel_family: str
    reference_family: str

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON form."""
        ran = {"ran": self.kernel_family, "reference_ran": self.reference_family}
        names = ("ratio", "low", "high", "verdict", "rounds")
        return {"release": self.release, **ran} | {n: getattr(self.verdict, n) for n in names}


@dataclass(frozen=True)
class Bisection:
    """What was asked, the releases searched (the first is the reference), the steps, the answer.

    `changed` is the first release of the new speed; `machine` has the records.
    """

    package: str
    study: str
    case: Case
    backend: str
    good: str
    bad: str
    releases: tuple[str, ...]
    machine: str
    rounds: int
    steps: tuple[Step, ...] = ()
    changed: str = ""

    @property
    def word(self) -> str:
        """`slower` or `faster`: the verdict that is looked for."""
        return "slower" if Version(self.good) < Version(self.bad) else "faster"

    @property
    def command(self) -> str:
        """The command that goes through the same releases again."""
        options = {name: getattr(self, name) for name in ("package", "good", "bad", "study")}
        options |= {"case": self.case.key, "backend": self.backend, "rounds": str(self.rounds)}
        options |= {"releases": ",".join(self.releases)}
        words = " ".join(f"--{name} {shlex.quote(value)}" for name, value in options.items())
        return f"python -m attnlib bisect {words}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form; the case by its key."""
        names = ("package", "study", "backend", "good", "bad", "machine", "command", "word")
        return {name: getattr(self, name) for name in names} | {
            "case": self.case.key,
            "releases": list(self.releases),
            "steps": [step.to_dict() for step in self.steps],
            "changed": self.changed,
        }


def bisect(
    study: Study,
    case: Case,
    *,
    package: str,
    good: str,
    bad: str,
    backend: str = "flashinfer-auto",
    rounds: int = 3,
    releases: Sequence[str] = (),
    overlays: dict[str, Path] | None = None,
    on_round: Callable[[str], object] | None = None,
) -> Bisection:
    """Find the first release of `package` between `good` and `bad` at which `case` changed speed.

    `releases` are those to search; without them, those on record (replay, no overlays given) or
    those that can be had (`available_releases`). `on_round` gets a line per round measured.
    Raises ValueError for what cannot be asked and for ends that do not differ, RuntimeError for a
    release that fails or stays ambiguous, FileNotFoundError for records that replay lacks.
    """
    _require_askable(study, case, package, backend, rounds=rounds)
    first, last = _in_order(good, bad)
    live, name, sweep = mode() == "live", PREFIX + study.name, Sweep(overlays=overlays or {})
    published = study.bisect_machine or study.reference_machine
    machine = machine_shown(name, study.device, published)
    if not releases and (live or overlays):
        early = any(Version(end).is_prerelease for end in (first, last))
        releases = available_releases(package, sweep.overlays, early=early)
    if not releases:
        records = _records(name, machine, backend, case)
        releases = recorded_releases(records, first, last, where=f"{name!r} on {machine!r}")
    inside = tuple(releases_between(releases, first, last))
    ends = (inside[0], inside[-1]) if good == first else (inside[-1], inside[0])
    question = Bisection(package, study.name, case, backend, *ends, inside, machine, rounds)
    return _Search(question, study.device, sweep if live else None, on_round).run()


@dataclass(frozen=True)
class _Search:
    """A bisection under way, from the rounds on record and, with a `sweep`, new ones."""

    question: Bisection
    device: str
    sweep: Sweep | None
    on_round: Callable[[str], object] | None

    def run(self) -> Bisection:
        question, steps = self.question, list[Step]()

        def differs(release: str) -> bool:
            steps.append(self.step(release))
            return steps[-1].verdict.verdict == question.word

        reference, last = question.releases[0], question.releases[-1]
        if not differs(last):
            words = _words(steps[0].verdict)
            raise ValueError(
                f"release {last} must be {question.word} than {reference}, it is {words}"
            )
        changed = first_changed(question.releases, differs)
        return replace(question, steps=tuple(steps), changed=changed)

    def step(self, release: str) -> Step:
        """The verdict on a release; `ambiguous` doubles the rounds, up to `ROUND_LIMIT`."""
        count = self.question.rounds
        looks = 1 + max(0, math.ceil(math.log2(ROUND_LIMIT / count)))
        while True:
            references, candidates = zip(*self.at_least(count, release), strict=True)
            (verdict,) = judge_ratios([(times_of(candidates), times_of(references))], looks=looks)
            if verdict.verdict != "ambiguous":
                return Step(release, verdict, families_of(candidates), families_of(references))
            if verdict.rounds >= ROUND_LIMIT:
                words = _words(verdict)
                raise RuntimeError(f"release {release} must get a verdict, it stays {words}")
            count = min(2 * verdict.rounds, ROUND_LIMIT)

    def records(self) -> list[Record]:
        question = self.question
        return _records(PREFIX + question.study, question.machine, question.backend, question.case)

    def pairs(self, release: str) -> list[Pair]:
        """The good rounds of the reference and a release."""
        by_item = good_rounds(self.records(), (self.question.releases[0], release))
        return next(iter(by_item.values()), [])

    def at_least(self, count: int, release: str) -> list[Pair]:
        """`pairs`, of which there must be `count`: measured now where missing.

        A round that is left out is measured again; RuntimeError after `ROUND_LIMIT` too many.
        """
        pairs, reference = self.pairs(release), self.question.releases[0]
        if len(pairs) >= count:
            return pairs
        if self.sweep is None:
            raise FileNotFoundError(
                f"release {release} must have {count} rounds against {reference} on record to be "
                f"replayed, it has {len(pairs)} in {PREFIX + self.question.study!r} on "
                f"{self.question.machine!r}"
            )
        start = 1 + max((record.round for record in self.records()), default=-1)
        for number in range(start, start + count + ROUND_LIMIT):
            for side in (release, reference) if number % 2 else (reference, release):
                self.measure(self.sweep, number, side)
            if self.on_round:
                self.on_round(f"round {number}: {release} against {reference}")
            if len(pairs := self.pairs(release)) >= count:
                return pairs
        raise RuntimeError(
            f"release {release} must have {count} rounds that are not throttled, "
            f"it has {len(pairs)}, after {count + ROUND_LIMIT} more"
        )

    def measure(self, sweep: Sweep, number: int, release: str) -> None:
        question = self.question
        item = Item(question.backend, TIMER, question.case, release)
        name = PREFIX + question.study
        sweep.run([Job(name, number, self.device, release, (item,), question.command)])
        for record in self.records():
            if (record.round, record.item) == (number, item) and record.status != "ok":
                words = " ".join(record.reason.split())
                raise RuntimeError(f"release {release} must run, it was {record.status}: {words}")


def good_rounds(records: Iterable[Record], releases: tuple[str, str]) -> dict[Item, list[Pair]]:
    """By item, less its release: both records of every round in which both `releases` are ok."""
    rounds: dict[Item, dict[int, dict[str, Record]]] = {}
    for record in records:
        item_rounds = rounds.setdefault(replace(record.item, release=""), {})
        item_rounds.setdefault(record.round, {})[record.item.release] = record
    pairs_of = {}
    for item, seen in rounds.items():
        whole = [both for _, both in sorted(seen.items()) if set(releases) <= both.keys()]
        pairs = [(both[releases[0]], both[releases[1]]) for both in whole]
        pairs_of[item] = [p for p in pairs if all(r.status == "ok" and not r.throttled for r in p)]
    return pairs_of


def first_changed(releases: Sequence[str], differs: Callable[[str], bool]) -> str:
    """The first of `releases` that differs, by binary search.

    The first one must not differ and the last one must; one change lies between them.
    """
    low, high = 0, len(releases) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if differs(releases[middle]):
            high = middle
        else:
            low = middle
    return releases[high]


def recorded_releases(records: Sequence[Record], first: str, last: str, *, where: str) -> list[str]:
    """The releases that the newest search in `records` from `first` to `last` went through.

    Raises FileNotFoundError saying what is not on record `where`.
    """
    ends = {Version(first), Version(last)}
    seen: set[Version] = set()
    for record in reversed(records):
        option = RELEASES.search(record.command)
        listed = option[1].split(",") if option else []
        seen |= set(map(Version, listed))
        if ends <= set(map(Version, listed)):
            return listed
    missing = ", ".join(map(str, sorted(ends - seen))) or f"{first} to {last}"
    have = ", ".join(map(str, sorted(seen))) or "none"
    raise FileNotFoundError(
        f"release {missing} must be on record to be replayed, in {where} are: {have}"
    )


def _records(study: str, machine: str, backend: str, case: Case) -> list[Record]:
    mine = (backend, TIMER, case)
    records = store.find(study, machine)
    return [r for r in records if (r.item.backend, r.item.timer, r.item.case) == mine]


def times_of(records: Iterable[Record]) -> list[float]:
    """The median time of each record, us."""
    return [float(np.median(record.run_us)) for record in records]


def families_of(records: Iterable[Record]) -> str:
    """The kernel families that ran."""
    return ", ".join(sorted({record.kernel_family for record in records} - {""})) or "unknown"


def _words(ratio: Ratio) -> str:
    return (
        f"{ratio.verdict} after {ratio.rounds} rounds: {ratio.ratio:.3f} of its time "
        f"({ratio.low:.3f} to {ratio.high:.3f}), margin {ratio.margin:.0%}"
    )


def _in_order(good: str, bad: str) -> tuple[str, str]:
    a, b = parse_release("good", good), parse_release("bad", bad)
    if a == b:
        raise ValueError(f"good and bad must be two releases, got {good} and {bad}")
    return (good, bad) if a < b else (bad, good)


def _require_askable(study: Study, case: Case, package: str, backend: str, *, rounds: int) -> None:
    packages = {name: COMPARED.get(name.partition("-")[0]) for name in BACKENDS}
    known = list(dict.fromkeys(filter(None, packages.values())))
    require_word("package", package, known)
    able = [name for name in BACKENDS if packages[name] == package]
    require_word(f"backend for {package}", backend, able)
    require_int("rounds", rounds)
    study.case_named(case.key)
