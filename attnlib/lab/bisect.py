"""Which release changed the speed: a binary search whose every step is a verdict over rounds.

The older end is the reference, and each step judges a candidate against it: with good < bad it
finds the first release that is `slower` than good, with good > bad the first `faster` than bad. It
assumes one change between the ends, and measures first that they differ.

Steps are ordinary records of a study of its own, `bisect_<study>`; their rounds are those of
`pairs`. Each record's command lists the releases searched, so replay goes the same way.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from packaging.version import Version

from ..core.backends.table import BACKENDS, compared_package
from ..core.call_text import shortened
from ..core.spec import require_int, require_type, require_word
from ..measure.calls.form import Item, NamedCase
from ..measure.stats import INCONCLUSIVE, Ratio
from ..run import store
from ..run.frame import intervals
from ..run.missing import NotOnRecordError, NoVerdictError
from ..run.pairs import (
    PREFIX,
    SPARE_ROUNDS,
    TIMER,
    Comparison,
    families_of,
    next_round,
)
from ..run.releases import available_releases, parse_release, releases_between
from ..run.study import Study, Sweep, machine_shown, mode, study_given
from ..select.lines import command_lines, fitted
from .cards import Brief, Card, fact_lines, in_columns, in_words

RELEASES = re.compile(r" --releases (\S+)")
ROUND_LIMIT = 12
"""Rounds after which a verdict that is still inconclusive will not become clear by itself."""
SHOWN_COMMAND = 600
"""Letters of the longest command that a card shows."""
UNKNOWN = "unknown"
"""The kernel family of what has none."""


@dataclass(frozen=True)
class Step:
    """The verdict on `release` against the reference, and the kernel families that ran."""

    release: str
    verdict: Ratio
    kernel_family: str
    reference_family: str

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON form."""
        return {
            "release": self.release,
            "ran": self.kernel_family,
            "reference_ran": self.reference_family,
            "ratio": self.verdict.ratio,
            "low": self.verdict.low,
            "high": self.verdict.high,
            "verdict": self.verdict.verdict,
            "rounds": self.verdict.rounds,
        }


@dataclass(frozen=True, repr=False)
class Bisection(Brief):
    """What was asked, the releases searched (the first is the reference), the steps, the answer.

    `changed` is the first release of the new speed; `machine` has the records.
    """

    package: str
    study: str
    case: NamedCase
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
        if Version(self.good) < Version(self.bad):
            return "slower"
        return "faster"

    @property
    def command(self) -> str:
        """The command that goes through the same releases again."""
        options = {
            "package": self.package,
            "good": self.good,
            "bad": self.bad,
            "study": self.study,
            "case": self.case.label,
            "backend": self.backend,
            "rounds": str(self.rounds),
            "releases": ",".join(self.releases),
        }
        words = " ".join(f"--{name} {shlex.quote(value)}" for name, value in options.items())
        return f"python -m attnlib bisect {words}"

    @property
    def _time(self) -> str:
        """The column of the table that has ratios of times."""
        return f"time / time of {self.releases[0]}"

    @property
    def _ratio_in_words(self) -> str:
        """How the short text heads that column."""
        if self.word == "slower":
            return "slowdown"
        return self._time

    @property
    def table(self) -> pd.DataFrame:
        """The steps in order: release over the reference, and the kernels of both."""
        steps = pd.DataFrame([step.to_dict() for step in self.steps])
        reference = self.releases[0]
        names = {
            "release": "release",
            "ran": "kernel",
            "reference_ran": f"kernel of {reference}",
            "ratio": self._time,
            "95 % CI": "95 % CI",
            "verdict": "verdict",
            "rounds": "rounds",
        }
        steps["95 % CI"] = intervals(steps)
        if set(steps.ran) == {UNKNOWN}:  # such as of metadata, which has no kernel family
            del names["ran"], names["reference_ran"]
        table = steps.round({"ratio": 2})
        return table[[*names]].rename(columns=names)

    def brief(self) -> list[str]:
        """The first release of the new speed, and the steps by time against the reference."""
        reference = self.releases[0]
        if (family := self.steps[0].reference_family) != UNKNOWN:
            reference += f" ({family})"
        head = [
            f"first {self.word} release: {self.changed}",
            f"{self.package} on {self.machine}, backend {self.backend} against {reference}",
            shortened(self.case.label),
            "",
        ]
        rows = self.table.rename(columns={self._time: self._ratio_in_words})
        rows = rows.drop(columns=f"kernel of {self.releases[0]}", errors="ignore")
        return head + in_columns(in_words(rows, {self._ratio_in_words: ".2f"}))

    @property
    def details(self) -> str:
        """The short text, what was searched, and the line that repeats it."""
        return self.details_with("")

    def details_with(self, options: str) -> str:
        """The details; the line that repeats the search has further options."""
        lines = [
            *self.brief(),
            "",
            f"searched {', '.join(self.releases)}",
            f"records of {self.records_of}",
            "repeat with:",
        ]
        return "\n".join([fitted(lines), *command_lines(self.command + options)])

    def card(self) -> Card:
        """The first release of the new speed, and the steps that led to it."""
        return Card(
            title=f"{self.package}: first {self.word} release {self.changed}",
            notes=[],
            facts=fact_lines([{"call": shortened(self.case.label), "backend": self.backend}]),
            table=self.table,
            caption="Steps of the search:",
            footer=f"Records of {self.records_of} on {self.machine}.",
            code=self.command if len(self.command) <= SHOWN_COMMAND else "",
            code_caption="The same search in a shell:",
        )

    @property
    def looks(self) -> list[int]:
        """The numbers of rounds at which a step is judged: twice as many each time."""
        looks = [self.rounds]
        while looks[-1] < ROUND_LIMIT:
            looks.append(min(2 * looks[-1], ROUND_LIMIT))
        return looks

    @property
    def records_of(self) -> str:
        """The study that the records are of."""
        return PREFIX + self.study

    def records(self) -> pd.DataFrame:
        """The records of the case and backend."""
        rows = store.find(self.records_of, self.machine)
        rows = rows[rows.backend == self.backend]
        rows = rows[rows.timer == TIMER]
        return rows[rows.case == self.case]

    def to_dict(self) -> dict[str, Any]:
        """JSON form; the case as its text."""
        return {
            "package": self.package,
            "study": self.study,
            "backend": self.backend,
            "good": self.good,
            "bad": self.bad,
            "machine": self.machine,
            "command": self.command,
            "word": self.word,
            "case": self.case.label,
            "releases": list(self.releases),
            "steps": [step.to_dict() for step in self.steps],
            "changed": self.changed,
        }


def bisect(
    study: Study | str,
    case: NamedCase | str,
    *,
    package: str,
    good: str,
    bad: str,
    backend: str = "flashinfer-auto",
    rounds: int = 3,
    releases: Sequence[str] = (),
    overlays: dict[str, Path] | None = None,
) -> Bisection:
    """Find the first release of a package between two at which a case changed speed.

    Parameters
    ----------
    study : Study or str
        Whose records or grids are asked, or its name in `attnlib.STUDIES`.
    case : NamedCase or str
        A case of the study, or its text.
    package : str
        A distribution: `flashinfer-python`, `sglang` or `sglang-kernel`.
    good, bad : str
        Releases of it, the ends of the search.
    backend : str
        What is timed.
    rounds : int
        Fresh processes per release.
    releases : sequence of str, optional
        Those to search; by default those on record (replay, no overlays given) or those that can be
        had (`available_releases`).
    overlays : dict of str to Path, optional
        `NAME==VERSION` -> a folder with that release.

    Returns
    -------
    Bisection
        The first slower release, and a row per step.

    Raises
    ------
    ValueError
        For what cannot be asked and for ends that do not differ.
    RuntimeError
        For a release that fails or stays inconclusive.
    FileNotFoundError
        For records that replay lacks.

    Examples
    --------
    >>> import attnlib
    >>> found = attnlib.bisect(
    ...     "fa3_decode_regression",
    ...     "heads=32/8 head_dim=128 page=16 lens=8192x16",
    ...     package="flashinfer-python",
    ...     good="0.5.3",
    ...     bad="0.6.3",
    ... )
    >>> found.changed
    '0.6.0'
    """
    study = study_given(study)
    require_type("case", case, NamedCase | str)
    case = study.case_named(str(getattr(case, "label", case)))
    _require_backend(study, case, backend, package)
    require_int("rounds", rounds)
    good_version = parse_release("good", good)
    bad_version = parse_release("bad", bad)
    if good_version == bad_version:
        raise ValueError(f"good and bad must be two releases, got {good} and {bad}")
    is_forward = good_version < bad_version
    first, last = (good, bad) if is_forward else (bad, good)
    is_live = mode() == "live"
    sweep = Sweep(overlays=overlays or {})
    published = study.bisect_machine or study.reference_machine
    machine = machine_shown(PREFIX + study.name, study.device, published)
    if not releases and (is_live or overlays):
        releases = available_releases(package, sweep.overlays)
    search = Bisection(
        package=package,
        study=study.name,
        case=case,
        backend=backend,
        good=first,
        bad=last,
        releases=(),
        machine=machine,
        rounds=rounds,
    )
    inside = releases_between(
        releases=releases or recorded_releases(search),
        first=first,
        last=last,
    )
    first = inside[0]
    last = inside[-1]
    question = replace(
        search,
        good=first if is_forward else last,
        bad=last if is_forward else first,
        releases=tuple(inside),
    )
    return _Search(question, study.device, sweep if is_live else None).run()


def _require_backend(
    study: Study,
    case: NamedCase,
    backend: str,
    package: str,
) -> None:
    """ValueError unless the backend is one of those whose releases are the package's; it lists
    those that the study has for the case."""
    names = list(BACKENDS)
    of_case: set[str] = set()
    for grid in study.grids:
        names += grid.backends
        if case in grid.cases:
            of_case.update(grid.backends)
    packages = {name: compared_package(name) for name in names}
    known = dict.fromkeys(filter(None, packages.values()))
    require_word("package", package, list(known))
    able = [name for name in packages if packages[name] == package]
    if backend not in able:
        fitting = [name for name in able if name in of_case]
        require_word(f"backend for {package}", backend, fitting or able)


@dataclass(frozen=True)
class _Search:
    """A bisection under way, from the rounds on record and, with a `sweep`, new ones."""

    question: Bisection
    device: str
    sweep: Sweep | None

    def run(self) -> Bisection:
        question = self.question
        steps: list[Step] = []

        def differs(release: str) -> bool:
            steps.append(self.step(release))
            return steps[-1].verdict.verdict == question.word

        reference = question.releases[0]
        last = question.releases[-1]
        if not differs(last):
            words = _words(steps[0].verdict)
            raise ValueError(
                f"release {last} must be {question.word} than {reference}, it is {words}"
            )
        changed = first_changed(question.releases, differs)
        return replace(question, steps=tuple(steps), changed=changed)

    def step(self, release: str) -> Step:
        """The verdict on a release: measured, or from the rounds on record."""
        question = self.question
        item = Item(question.backend, TIMER, question.case)
        both = (question.releases[0], release)
        comparison = Comparison(
            study=question.records_of,
            both=both,
            looks=question.looks,
            pairs={item: []},
        )
        if self.sweep:
            start = next_round(question.records_of, question.machine)

            def records() -> pd.DataFrame:
                # A release that failed in an earlier search is tried again.
                rows = question.records()
                is_ok = rows.status == "ok"
                return rows[is_ok | (rows["round"] >= start)]

            comparison.measure(
                self.sweep,
                records,
                device=self.device,
                command=question.command,
                number=start,
            )
        else:
            rows = question.records()
            comparison.take(rows[rows.status == "ok"])
        failure = comparison.failed.get(item)
        if failure:
            words = f"it was {failure.status}: {' '.join(failure.reason.split())}"
            raise RuntimeError(f"release {failure.release} must run, {words}")
        verdict = comparison.verdicts().get(item)
        if verdict is None or verdict.verdict == INCONCLUSIVE:
            raise self.undecided(release, verdict, len(comparison.pairs[item]))
        pairs = comparison.pairs[item]
        return Step(
            release=release,
            verdict=verdict,
            kernel_family=families_of(new for _, new in pairs),
            reference_family=families_of(base for base, _ in pairs),
        )

    def undecided(
        self,
        release: str,
        verdict: Ratio | None,
        count: int,
    ) -> Exception:
        """Why a release has no verdict after `count` good rounds."""
        question = self.question
        if verdict and verdict.rounds >= question.looks[-1]:
            words = _words(verdict)
            return NoVerdictError(f"release {release} must get a verdict, it stays {words}")
        judged = verdict.rounds if verdict else 0
        look = next(look for look in question.looks if look > judged)
        if self.sweep is None:
            return NotOnRecordError(
                f"release {release} must have {look} rounds against {question.releases[0]} on "
                f"record to be replayed, it has {count} in {question.records_of!r} on "
                f"{question.machine!r}"
            )
        return NoVerdictError(
            f"release {release} must have {look} rounds that are not throttled, "
            f"it has {count}, after {look + SPARE_ROUNDS} more"
        )


def first_changed(
    releases: Sequence[str],
    differs: Callable[[str], bool],
) -> str:
    """The first of `releases` that differs, by binary search.

    The first one must not differ and the last one must; one change lies between them.
    """
    low = 0
    high = len(releases) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if differs(releases[middle]):
            high = middle
        else:
            low = middle
    return releases[high]


def recorded_releases(search: Bisection) -> list[str]:
    """The releases that the newest search on record between both ends went through.

    Raises FileNotFoundError saying what is not on record.
    """
    ends = {Version(search.good), Version(search.bad)}
    seen: set[Version] = set()
    for command in reversed(search.records().command.tolist()):
        option = RELEASES.search(command)
        if option:
            listed = option[1].split(",")
        else:
            listed = []
        versions = set(map(Version, listed))
        if ends <= versions:
            return listed
        seen |= versions
    if not seen:
        raise NotOnRecordError(
            f"no bisection of {search.study} is on record of this case and {search.backend}; "
            "run this on a GPU"
        )
    missing = ", ".join(map(str, sorted(ends - seen))) or f"{search.good} to {search.bad}"
    have = ", ".join(map(str, sorted(seen)))
    raise NotOnRecordError(
        f"release {missing} must be on record to be replayed, in {search.records_of!r} on "
        f"{search.machine!r} are: {have}; on a GPU the same command searches"
    )


def _words(ratio: Ratio) -> str:
    return (
        f"{ratio.verdict} after {ratio.rounds} rounds: {ratio.ratio:.3f} of its time "
        f"({ratio.low:.3f} to {ratio.high:.3f}), margin {ratio.margin:.0%}"
    )
