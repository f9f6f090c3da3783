"""The libraries whose choices can be explained, read from data/rules/*.yaml (see its README.md)."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from ..core.backends import limits
from ..core.releases import FLASHINFER as FLASHINFER_PACKAGE
from ..core.releases import read_releases
from ..core.spec import require_type
from ..core.yaml_file import Entry, Kind, read_yaml, require_fields, require_kind
from .facts import FLAGS, MODES, NUMBERS, Facts
from .models import DATA
from .rules import Reason, Reasons, Rule, conditions, facts_tested

RULES_FOLDER = DATA / "rules"
AUTO = "auto"
FLASHINFER = "flashinfer"
RESOLVES = "resolves"
MAIN = "main"
"""The release of a library without releases."""
REPLACES = "replaces"
PARTS = (RESOLVES, "limits", "problems", "pages", REPLACES)
"""Keys of a document that hold rows; those of `resolves` alone name no backend."""
VERBS = {RESOLVES: RESOLVES, REPLACES: "choose"}
"""Key of a document -> the key that names the backends of its rows; of others `cannot`."""
DOCUMENT_KEYS: dict[str, Kind] = {
    "library": str,
    "aliases": list,
    "package": str,
    "calls": dict,
    "backends": dict,
    "by_rule_only": str,
    "shared": object,
    "policies": dict,
    **dict.fromkeys(PARTS, list),
}
"""Keys of a document, and the type of each."""
CALLS_KEYS: dict[str, Kind] = {
    "backend": str,
    "why": str,
    "source": str,
    "policies": dict,
}
ALSO_CALLS: dict[str, Kind] = {
    "also": dict,
    "older": dict,
}
"""Keys of `calls` that may be left out."""
ROW_KEYS: dict[str, Kind] = {
    "when": str | list | dict,
    "choose": str | list,
    "cannot": str | list,
    "instead_of": str,
    "rest": str | list,
    "sets": dict,
    "why": str,
    "source": str,
    "rows": list,
}
"""Keys of a row, and the types of each."""
Written = Mapping[str, Any]
"""A document or a row as it is written."""
NO_ROW: Written = {}
Names = tuple[str, ...]
Rows = tuple[Rule, ...]


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
        """What is called where `installed`, if any, is in place of what is required."""
        if not installed:
            return self
        is_older = _release(installed) < _release(self.library)
        return replace(
            self,
            library=installed,
            why=f"installed; {self.why} is {self.library}",
            refused=self.older if is_older else "",
        )


def _plain(name: str) -> str:
    return name.lower().replace(" ", "-").replace("_", "-")


def _release(library: str) -> Version:
    """The release of `flashinfer==0.6.3`."""
    return Version(library.partition("==")[2])


@dataclass(eq=False)
class Library:
    """One library: `policies` maps a policy to its tables by mode, `backends` a mode to names.

    A policy is `auto`, the library's own rule, or an engine's rule of how it calls FlashInfer.
    `resolves` are rows of what the library settles first, `limits` of what a backend cannot run,
    `problems` of what the library takes all the same and cannot run.
    `replaces` are rows of what it takes in place of a choice, whatever led to it.
    `calls` maps a backend and release to what it calls in turn; `pages` are rows of the page sizes
    that a backend does not keep, and what it takes.
    """

    name: str
    aliases: Names = ()
    releases: Names = ()
    policies: dict[str, dict[str, Rows]] = field(default_factory=dict)
    backends: dict[str, Names] = field(default_factory=dict)
    by_rule_only: Names = ()
    resolves: Rows = ()
    limits: Rows = ()
    problems: Rows = ()
    calls: dict[tuple[str, str], Called] = field(default_factory=dict)
    pages: Rows = ()
    replaces: Rows = ()

    @cached_property
    def versions(self) -> list[Version]:
        """The releases, oldest first."""
        return sorted(map(Version, self.releases))

    @property
    def modes(self) -> Names:
        """The modes that the library's rules speak of."""
        return tuple(mode for mode in MODES if mode in self.policies[AUTO])

    def policies_for(self, mode: str) -> Names:
        """Every policy there is in a mode, backends asked for by name included."""
        named = []
        for name, tables in self.policies.items():
            if mode in tables:
                named.append(name)
        return (*named, *self.backends[mode])

    def policy_named(self, text: str, mode: str) -> str:
        """The policy of a mode that a text names: `CUDA cores` is cuda-cores, `fa2` FA2."""
        for name in self.policies_for(mode):
            if _plain(name) == _plain(text):
                return name
        return text

    def called(self, backend: str, release: Version | None) -> Called | None:
        """What a backend of a release calls in turn."""
        return self.calls.get((backend, str(release or MAIN)))

    def flashinfer_of(self, release: Version | None, beside: str) -> Version | None:
        """The FlashInfer that an engine finds: `beside`, if any, or what its release requires."""
        required = [
            called.library
            for (_, caller), called in self.calls.items()
            if caller == str(release or MAIN)
        ]
        found = [beside] if beside else required
        if found:
            return _release(found[0])
        return None

    def require_policy(
        self,
        policy: str,
        modes: Sequence[str],
        argument: str = "policy",
    ) -> None:
        """ValueError that names the known policies, unless one of the modes has this one."""
        known: dict[str, None] = {}  # in their order, each once
        for mode in modes:
            known |= dict.fromkeys(self.policies_for(mode))
        if policy in known:
            return
        others = [mode for mode in self.modes if policy in self.policies_for(mode)]
        hint = f"; mode {' or '.join(others)} has it" if others else ""
        if policy in self.by_rule_only:
            hint += "; only a rule takes it"
        where = f" in mode {modes[0]}" if len(modes) == 1 else ""
        raise ValueError(
            f"{argument} of {self.name}{where} must be one of {', '.join(known)}: "
            f"what others cannot run was not read, got {policy!r}{hint}"
        )

    @cache  # noqa: B019 - libraries are read once and live for good
    def tests(
        self,
        mode: str,
        policy: str,
        release: Version | None,
    ) -> frozenset[str]:
        """The facts that a row of the release tests on the way to a choice."""
        known = Facts(mode=mode)
        if release is not None:
            known["release"] = release
        tables = self.policies.get(policy, {})
        rows = _possible(tables.get(mode, ()), known)
        names = {policy}
        tested: set[str] = set()
        to_auto = [row for row in rows if row.then == (AUTO,)]
        if to_auto:
            auto = _possible(self.policies[AUTO][mode], known)
            # What every row on the way to `auto` sets, the call does not decide.
            settled = set(to_auto[0].sets)
            for row in to_auto:
                settled &= set(row.sets)
            tested = facts_tested(auto) - settled
            for row in auto:
                names.update(row.then)
        for row in rows:
            names.update(row.then)
        rows += _possible(self.resolves, known)
        for row in _possible(self.replaces, known):
            if row.instead_of in names:
                rows.append(row)
                names.update(row.then)
        for row in _possible(self.limits + self.problems, known):
            if names.intersection(row.then):
                rows.append(row)
        if self.name == FLASHINFER and names.intersection(limits.TABLE):
            tested |= limits.tested(mode)
        return frozenset(tested | facts_tested(rows))

    def limits_of(self, backend: str, facts: Facts) -> Reasons:
        """Every row that keeps `backend` from running the call."""
        found = []
        if self.name == FLASHINFER:
            for limit in limits.limits_of(backend, facts):
                source = f"FlashInfer {limit.source}"
                found.append(Reason("limit", backend, limit.why, source))
        for row in holding(self.limits, backend, facts):
            found.append(Reason("limit", backend, row.why, row.source))
        return tuple(found)


def holding(rows: Rows, backend: str, facts: Facts) -> list[Rule]:
    """The rows that name the backend and hold."""
    return [row for row in rows if backend in row.then and not row.failing(facts)]


def _possible(rows: Iterable[Rule], known: Facts) -> list[Rule]:
    """The rows that may match where these facts alone are known."""
    return [row for row in rows if row.may_match(known)]


def load_libraries(folder: Path = RULES_FOLDER) -> dict[str, Library]:
    """Every library by name, from all files of a folder; ValueError names an invalid row."""
    libraries: dict[str, Library] = {}
    documents = []
    for path in sorted(folder.glob("*.yaml")):
        for document in read_yaml(path):
            require_fields(
                entry=document,
                where=document.place,
                required={"library": str},
                optional=DOCUMENT_KEYS,
            )
            name = document["library"]
            library = libraries.setdefault(name, Library(name))
            _describe(library, document)
            documents.append((library, document))
    # Names of all files are known before a row is read: rows may use them.
    for library, document in documents:
        _fill(library, document)
    for library in libraries.values():
        if AUTO not in library.policies:
            raise ValueError(f"{library.name} must have a policy {AUTO} in {folder.name}")
    return libraries


def _describe(library: Library, document: Entry) -> None:
    """Add the names and releases of a document."""
    place = document.place
    for name, text in document.get("backends", {}).items():
        require_kind(text, f"{place}: backends, {name}", str)
    for alias in document.get("aliases", ()):
        require_kind(alias, f"{place}: a name of aliases", str)
    library.aliases += tuple(document.get("aliases", ()))
    if "package" in document:
        library.releases += tuple(_read_of(document))
    library.by_rule_only += _names(document, "by_rule_only")
    backends = document.get("backends", {})
    for modes in backends:
        library.backends |= dict.fromkeys(modes.split(), _names(backends, modes))
    if "calls" in document:
        _describe_calls(
            library=library,
            written=document["calls"],
            releases=_read_of(document),
        )


def _read_of(document: Entry) -> dict[str, str | None]:
    """The releases of a document's package, and the FlashInfer of each; without one, `MAIN` with
    the newest FlashInfer."""
    if "package" not in document:
        return {MAIN: [*read_releases(FLASHINFER_PACKAGE)][-1]}
    try:
        return read_releases(document["package"])
    except ValueError as error:
        raise ValueError(f"{document.place}: {error}") from None


def _names(document: Written, key: str) -> Names:
    """The names of a text, parted by blanks."""
    return tuple(document.get(key, "").split())


def _describe_calls(library: Library, written: Entry, releases: Mapping[str, str | None]) -> None:
    """Add what the backends of a library call, for each of its releases."""
    place = written.place
    require_fields(written, place, CALLS_KEYS, ALSO_CALLS)
    older = written.get("older", {})
    for part in ("policies", *ALSO_CALLS):
        for name, text in written.get(part, {}).items():
            require_kind(text, f"{place}: {part}, {name}", str)
    since = written["policies"]
    if next(iter(releases)) not in since or not set(since) <= set(releases):
        known = ", ".join(releases)
        got = ", ".join(since)
        raise ValueError(f"{place}: policies must begin with the first of {known}, got {got}")
    usual = ""
    for release, flashinfer in releases.items():
        usual = since.get(release, usual)
        policies = {written["backend"]: usual} | written.get("also", {})
        for backend, policy in policies.items():
            library.calls[backend, release] = Called(
                library=f"{FLASHINFER}=={flashinfer}",
                policy=policy,
                why=written["why"],
                source=written["source"],
                older=older.get(backend, ""),
            )


def _fill(library: Library, document: Entry) -> None:
    """Add the rows of a document."""
    place = document.place
    known = {AUTO, *library.by_rule_only}.union(*library.backends.values())
    for policy, tables in document.get("policies", {}).items():
        require_kind(tables, f"{place}: {policy}", dict)
        for words, rows in tables.items():
            where = f"{policy}, {words}"
            require_kind(rows, f"{place}: {where}", list)
            table = tuple(_rows(rows, "choose", known, where, place=place))
            modes = words.split()
            if not set(modes) <= set(MODES):
                raise ValueError(f"{place}, {where}: modes must be of {', '.join(MODES)}")
            if not table or table[-1].when:
                raise ValueError(f"{place}, {where}: the last row must have no condition")
            by_mode = library.policies.setdefault(policy, {})
            by_mode |= dict.fromkeys(modes, table)
    for part in PARTS:
        verb = VERBS.get(part, "cannot")
        rows = document.get(part, [])
        added = tuple(_rows(rows, verb, known, part, place=place))
        setattr(library, part, getattr(library, part) + added)


def _rows(
    written: Iterable[Written],
    verb: str,
    known: set[str],
    table: str,
    *,
    place: str,
    given: Written = NO_ROW,
) -> Iterator[Rule]:
    """The rows of a table, which stands at `place`.

    Nested `rows` inherit the keys of the row that holds them.
    """
    for number, row in enumerate(written, 1):
        within = f"{table}, row {number}"
        where = f"{getattr(row, 'place', place)}, {within}"
        require_fields(row, where, {}, ROW_KEYS)
        whole = {**given, **row}
        if "when" in given:  # and the row's own
            whole["when"] = [given["when"], row.get("when", [])]
        inner = whole.pop("rows", None)
        if inner is None:
            yield _rule(whole, verb, known, where)
        else:
            yield from _rows(
                inner,
                verb,
                known,
                within,
                place=place,
                given=whole,
            )


def _rule(
    row: Written,
    verb: str,
    known: set[str],
    where: str,
) -> Rule:
    named = [row.get(verb, []), row.get("rest", [])]
    try:
        names = tuple(dict.fromkeys(_flat(named)))  # each once
        when = conditions(row.get("when", []))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    instead_of = row.get("instead_of", "")
    sets = row.get("sets", {})
    if not names and verb != RESOLVES:
        raise ValueError(f"{where}: {verb} must name a backend")
    unknown = ", ".join({*names, instead_of} - {*known, ""})
    if unknown:
        raise ValueError(f"{where}: no such backend: {unknown}")
    for key in ("why", "source"):
        if not row.get(key):
            raise ValueError(f"{where}: {key} must be given")
    if not set(sets) <= {*FLAGS, *NUMBERS}:
        raise ValueError(f"{where}: no such fact: {', '.join(sets)}")
    for fact, value in sets.items():
        require_kind(
            value=value,
            name=f"{where}: {fact} of sets",
            kind=bool if fact in FLAGS else int,
        )
    return Rule(
        when=when,
        then=names,
        why=row["why"],
        source=row["source"],
        sets=sets,
        instead_of=instead_of,
    )


def _flat(names: Any) -> list[str]:
    """The names of a text, or of lists in lists."""
    if isinstance(names, str):
        return [names]
    if not isinstance(names, list):
        raise ValueError(f"names of backends must be text or lists, got {names!r:.60}")
    found = []
    for part in names:
        found += _flat(part)
    return found


LIBRARIES = load_libraries()


def library_or_engine(library: str, engine: str) -> str:
    """The one of both names of an argument that is given; ValueError for two."""
    for name, value in {"library": library, "engine": engine}.items():
        require_type(name, value, str, such_as="sglang==0.5.23")
    if library and engine:
        words = f"got {library!r} and {engine!r}"
        raise ValueError(f"library and engine are one argument, give one of them, {words}")
    return library or engine


def find(text: str) -> tuple[Library, Version | None]:
    """The library and release of `flashinfer==0.6.3`, `mini-sglang` and the like.

    What stands after a comma is not read. Raises ValueError naming the libraries, or the releases,
    that there are.
    """
    name, _, release = text.partition(",")[0].partition("==")
    library = _library_named(name)
    if library is None:
        words = f"library must be such as {FLASHINFER}==0.6.3, one of {', '.join(LIBRARIES)}"
        raise ValueError(f"{words}, got {text!r}")
    if not library.releases and release:
        raise ValueError(f"{name} has no releases: give library={name!r}, got {text!r}")
    if not library.releases:
        return library, None
    nearest = _nearest(library.versions, release)
    if nearest and nearest[0] == Version(release):
        return library, nearest[0]
    first, *_, last = library.releases
    if not release:
        newest = f"{name}=={last}, the newest known"
        raise ValueError(f"release of {name} must be given, such as {newest}, got {text!r}")
    near = " and ".join(map(str, nearest)) or last
    raise ValueError(
        f"release of {name} must be a known one, {first} to {last}, got {release!r}; "
        f"nearest to it: {near}"
    )


def _library_named(name: str) -> Library | None:
    for library in LIBRARIES.values():
        if name.lower() in (library.name, *library.aliases):
            return library
    return None


def _nearest(versions: Sequence[Version], release: str) -> Sequence[Version]:
    """The last version that is not newer than a release, and the next; none for another text."""
    try:
        place = bisect_right(versions, Version(release))
    except InvalidVersion:
        return []
    return versions[max(0, place - 1) : place + 1]
