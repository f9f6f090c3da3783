"""The libraries whose choices can be explained, read from data/rules/*.yaml (see its README.md)."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from ..core.backends import limits
from .facts import FLAGS, MODES, NUMBERS, Facts
from .models import DATA, yaml_loader
from .rules import Reason, Rule, conditions

FOLDER = DATA / "rules"
AUTO = "auto"
FLASHINFER = "flashinfer"
RESOLVES = "resolves"
MAIN = "main"
"""The release of a library without releases."""
KEYS = "library aliases releases calls backends by_rule_only pages shared resolves".split()
KEYS += ["policies", "limits", "problems", "slower"]
ROW = "when choose cannot rest sets why source rows".split()


@dataclass(frozen=True)
class Called:
    """The release of another library that a backend calls, by which policy, and why that release.

    `older` says why an older one is refused, where it is, `refused` that this one is.
    """

    library: str
    policy: str
    why: str
    source: str
    older: str
    refused: str = ""

    def beside(self, installed: str) -> "Called":
        """What is called where `installed` is in place of what is required."""
        have, required = (Version(name.partition("==")[2]) for name in (installed, self.library))
        why = f"installed; {self.why} is {self.library}"
        refused = self.older if have < required else ""
        return replace(self, library=installed, why=why, refused=refused)


@dataclass(eq=False)
class Library:
    """One library: `policies` maps a policy to its tables by mode, `backends` a mode to names.

    A policy is `auto`, the library's own rule, or an engine's rule of how it calls FlashInfer.
    `resolves` are rows of what the library settles first, `limits` of what a backend cannot run,
    `problems` of what the library takes all the same and cannot run.
    `calls` maps a backend and release to what it calls in turn; `pages` are rows of the page sizes
    that a backend does not keep, and what it takes; `slower` a release to what it made slower.
    """

    name: str
    aliases: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    policies: dict[str, dict[str, tuple[Rule, ...]]] = field(default_factory=dict)
    backends: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by_rule_only: tuple[str, ...] = ()
    resolves: tuple[Rule, ...] = ()
    limits: tuple[Rule, ...] = ()
    problems: tuple[Rule, ...] = ()
    calls: dict[tuple[str, str], Called] = field(default_factory=dict)
    pages: tuple[Rule, ...] = ()
    slower: dict[str, str] = field(default_factory=dict)

    @cached_property
    def versions(self) -> list[Version]:
        """The releases, oldest first."""
        return sorted(map(Version, self.releases))

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the library's rules speak of."""
        return tuple(mode for mode in MODES if mode in self.policies[AUTO])

    def policies_for(self, mode: str) -> tuple[str, ...]:
        """Every policy there is in a mode, backends asked for by name included."""
        named = tuple(name for name, tables in self.policies.items() if mode in tables)
        return (*named, *self.backends[mode])

    def require_policy(self, policy: str, modes: Sequence[str], argument: str = "policy") -> None:
        """ValueError that names the known policies, unless one of the modes has this one."""
        known = dict.fromkeys(name for mode in modes for name in self.policies_for(mode))
        if policy in known:
            return
        others = [mode for mode in self.modes if policy in self.policies_for(mode)]
        hint = f"; mode {' or '.join(others)} has it" if others else ""
        hint += "; only a rule takes it" if policy in self.by_rule_only else ""
        where = f" in mode {modes[0]}" if len(modes) == 1 else ""
        raise ValueError(
            f"{argument} of {self.name}{where} must be one of {', '.join(known)}: "
            f"what others cannot run was not read, got {policy!r}{hint}"
        )

    @cache  # noqa: B019 - libraries are read once and live for good
    def tests(self, mode: str, policy: str, release: Version | None) -> frozenset[str]:
        """The facts that a row of the release tests on the way to a choice."""
        known = Facts(mode=mode) if release is None else Facts(mode=mode, release=release)
        of_policy = self.policies.get(policy, {}).get(mode, ())
        rows = [row for row in of_policy if row.speaks_of(known)]
        to_auto = [row for row in rows if row.then == (AUTO,)]
        auto = [row for row in self.policies[AUTO][mode] if to_auto and row.speaks_of(known)]
        names = {policy}.union(*(row.then for row in (*rows, *auto)))
        kept = [row for row in (*self.limits, *self.problems) if names & {*row.then}]
        rows += [row for row in (*self.resolves, *kept) if row.speaks_of(known)]
        shared = limits.tested(mode) if self.name == FLASHINFER else set()
        settled = set.intersection(*({*row.sets} for row in to_auto)) if to_auto else set()
        of_auto = set[str]().union(*(row.tests for row in auto)) - settled
        return frozenset(shared.union(of_auto, *(row.tests for row in rows)))

    def limits_of(self, backend: str, facts: Facts) -> tuple[Reason, ...]:
        """Every row that keeps `backend` from running the call."""
        shared = limits.limits_of(backend, facts) if self.name == FLASHINFER else ()
        reasons = [(limit.why, f"FlashInfer {limit.source}") for limit in shared]
        reasons += [(row.why, row.source) for row in self.holding(self.limits, backend, facts)]
        return tuple(Reason("limit", backend, True, why, source) for why, source in reasons)

    def holding(self, rows: Sequence[Rule], backend: str, facts: Facts) -> list[Rule]:
        """Those of `pages`, `problems` or `limits` that speak of the backend and hold."""
        return [row for row in rows if backend in row.then and row.failing(facts) is None]


def load(folder: Path = FOLDER) -> dict[str, Library]:
    """Every library by name, from all files of a folder; ValueError names an invalid row."""
    documents = [
        (path.name, document)
        for path in sorted(folder.glob("*.yaml"))
        for document in yaml.load_all(path.read_text(), Loader=yaml_loader())
    ]
    libraries: dict[str, Library] = {}
    for place, document in documents:
        unknown = ", ".join(set(document) - set(KEYS))
        if unknown or "library" not in document:
            got = unknown or "no library"
            raise ValueError(f"{place}: keys must be {', '.join(KEYS)}, got {got}")
        library = libraries.setdefault(document["library"], Library(document["library"]))
        _describe(library, document)
    for place, document in documents:
        _fill(libraries[document["library"]], document, place)
    return libraries


def _describe(library: Library, document: Mapping[str, Any]) -> None:
    """Read names and releases first: rows of any file may use them."""
    library.aliases += tuple(document.get("aliases", ()))
    library.releases += tuple(document.get("releases", "").split())
    library.by_rule_only += tuple(document.get("by_rule_only", "").split())
    library.slower |= document.get("slower", {})
    for modes, names in document.get("backends", {}).items():
        library.backends |= dict.fromkeys(modes.split(), tuple(names.split()))
    called = document.get("calls", {"releases": {}})
    library.releases += tuple(r for r in called["releases"] if r != MAIN)
    for release, (target, usual) in called["releases"].items():
        for backend, policy in {called["backend"]: usual, **called.get("also", {})}.items():
            older = called.get("older", {}).get(backend, "")
            about = (called["why"], called["source"], older)
            library.calls[backend, release] = Called(target, policy, *about)


def _fill(library: Library, document: Mapping[str, Any], place: str) -> None:
    known = {AUTO, *library.by_rule_only, *(n for ns in library.backends.values() for n in ns)}
    for policy, tables in document.get("policies", {}).items():
        for modes, rows in tables.items():
            where = f"{place}, {policy}, {modes}"
            table = tuple(_rows(rows, "choose", known, where))
            if set(modes.split()) - set(MODES):
                raise ValueError(f"{where}: modes must be of {', '.join(MODES)}")
            if table[-1].when:
                raise ValueError(f"{where}: the last row must have no condition")
            library.policies.setdefault(policy, {}).update(dict.fromkeys(modes.split(), table))
    for part in (RESOLVES, "limits", "problems", "pages"):
        verb = RESOLVES if part == RESOLVES else "cannot"
        rows = tuple(_rows(document.get(part, []), verb, known, f"{place}, {part}"))
        setattr(library, part, getattr(library, part) + rows)


def _rows(
    written: list[dict[str, Any]],
    verb: str,
    known: set[str],
    place: str,
    given: Mapping[str, Any] = {},  # noqa: B006 - never changed
) -> Iterator[Rule]:
    """The rows of a table. Nested `rows` inherit the keys of the row that holds them."""
    for number, row in enumerate(written, 1):
        where = f"{place}, row {number}"
        if unknown := set(row) - set(ROW):
            raise ValueError(f"{where}: keys must be {', '.join(ROW)}, got {', '.join(unknown)}")
        whole = {**given, **row, "when": [given.get("when", []), row.get("when", [])]}
        inner = whole.pop("rows", None)
        if inner is None:
            yield _rule(whole, verb, known, where)
        else:
            yield from _rows(inner, verb, known, where, whole)


def _rule(row: Mapping[str, Any], verb: str, known: set[str], where: str) -> Rule:
    names = _flat(row.get(verb, []))
    names += [name for name in _flat(row.get("rest", [])) if name not in names]
    sets = row.get("sets", {})
    if not names and verb != RESOLVES:
        raise ValueError(f"{where}: {verb} must name a backend")
    if unknown := set(names) - known:
        raise ValueError(f"{where}: no such backend: {', '.join(unknown)}")
    for key in ("why", "source"):
        if not row.get(key):
            raise ValueError(f"{where}: {key} must be given")
    if set(sets) - {*FLAGS, *NUMBERS}:
        raise ValueError(f"{where}: no such fact: {', '.join(sets)}")
    try:
        when = conditions(row["when"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Rule(when, tuple(names), row["why"], row["source"], sets)


def _flat(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else [n for part in names for n in _flat(part)]


LIBRARIES = load()


def find(text: str) -> tuple[Library, Version | None]:
    """The library and release of `flashinfer==0.6.3`, `mini-sglang` and the like.

    What stands after a comma is not read. Raises ValueError naming the libraries, or the releases,
    that there are.
    """
    name, _, release = text.partition(",")[0].partition("==")
    library = next(
        (lib for lib in LIBRARIES.values() if name.lower() in (lib.name, *lib.aliases)), None
    )
    if library is None:
        names = ", ".join(LIBRARIES)
        words = f"library must be such as {FLASHINFER}==0.6.3, one of {names}"
        raise ValueError(f"{words}, got {text!r}")
    if not library.releases and release:
        raise ValueError(f"{name} has no releases: give library={name!r}, got {text!r}")
    if not library.releases:
        return library, None
    near = []
    with suppress(InvalidVersion):
        place = bisect_right(library.versions, Version(release))
        near = library.versions[max(0, place - 1) : place + 1]
        if near[0] == Version(release):
            return library, near[0]
    first, *_, last = library.releases
    nearest = " and ".join(map(str, near)) or last
    words = f"release of {name} must be one of {first} to {last} that was read"
    raise ValueError(f"{words}, got {release!r}; nearest to it: {nearest}")
