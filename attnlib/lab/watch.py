"""Which releases of other packages changed what our rules, hooks and models say of them.

`data/watch.yaml` has what is cited of each package, `data/releases.json` which releases were read.
A later release whose cited definitions are all those of the one before it is covered.
"""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from fnmatch import filter as matching
from fnmatch import fnmatchcase as fits
from functools import cache
from importlib.util import resolve_name
from itertools import chain
from typing import Any, NamedTuple

from ..core import releases as coverage
from ..core.releases import FLASHINFER
from ..core.spec import require_word
from ..core.yaml_file import Entry, read_yaml, require_fields
from ..run.releases import Version, index_releases
from ..select.models import DATA
from .citing import Row, rows_of
from .definitions import NOTHING, Definition
from .wheels import Wheel, fetched

CITED = DATA / "watch.yaml"
IMPORT = re.compile(r"^from ([\w.]+) import (\w+)", re.MULTILINE)
MOST_LINES = 24
"""Lines of one difference that the page shows."""
HookPoints = Mapping[str, Iterable[Any]]
"""A package -> the `engines.points.Point`s of its plugin."""
NO_POINTS: HookPoints = {}


class Cited(NamedTuple):
    """Definitions of a file that were read, and `by` whom: a file of ours, or a hook.

    `path` and `names` may be patterns; without `names` everything in the file is cited.
    """

    path: str
    names: tuple[str, ...]
    by: str


@dataclass(frozen=True)
class Change:
    """A cited definition that a release has otherwise: `how`, and what to read `again`."""

    path: str
    name: str
    how: str
    again: tuple[str, ...]
    difference: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"### `{self.path}`: {self.name} {self.how}"]
        left_out = len(self.difference) - MOST_LINES
        if self.difference:
            lines += ["", "````diff", *self.difference[:MOST_LINES], "````"]
        if left_out > 0:
            lines += ["", f"{left_out} more lines"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Verdict:
    """What a release changed of `compared` definitions of `base`; the FlashInfer it requires.

    `built` is the day of the wheel of `base`, if it has one.
    """

    package: str
    base: str
    release: str
    flashinfer: str | None
    compared: int
    changes: tuple[Change, ...]
    built: date | None = None

    def age(self, today: date) -> str:
        """The package, the release that was read, and how old that one is, if it is known."""
        name = f"{self.package} {self.base}"
        if self.built is None:
            return name
        days = (today - self.built).days
        return f"{name}, {days} days old"

    def __str__(self) -> str:
        title = f"## {self.package} {self.base} to {self.release}"
        if not self.changes:
            words = f"Nothing changed: all {self.compared} cited definitions are the same."
            return f"{title}\n\n{words}"
        entry = f'"{self.release}": {json.dumps(self.flashinfer)}'
        words = (
            f"{len(self.changes)} of {self.compared} cited definitions changed. Read again what "
            f"cites them; when it is right, add `{entry}` to {self.package} of data/releases.json."
        )
        again = "\n".join(self._again())
        return "\n\n".join([title, words, again, *map(str, self.changes)])

    def _again(self) -> list[str]:
        """A line for each place to read again, with the definitions that changed."""
        names: dict[str, list[str]] = {}
        for change in self.changes:
            for place in change.again:
                changed = names.setdefault(place, [])
                changed.append(f"`{change.name}`")
        lines = []
        for place, changed in names.items():
            listed = ", ".join(changed)
            lines.append(f"- {place}: {listed}")
        return lines


@dataclass
class Watch:
    """The verdicts, and for each package the releases that were not compared."""

    verdicts: list[Verdict] = field(default_factory=list)
    later: dict[str, list[str]] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether there is something to read again."""
        return any(verdict.changes for verdict in self.verdicts)

    def badge(self, today: date) -> dict[str, Any]:
        """A badge as shields.io reads it from a file: `newest`, or how old the newest read release
        is of each package that has a later one to read."""
        old = [verdict.age(today) for verdict in self.verdicts if verdict.changes]
        return {
            "schemaVersion": 1,
            "label": "newest releases read",
            "message": "; ".join(old) or "newest",
            "color": "orange" if old else "green",
        }

    def __str__(self) -> str:
        parts = ["# Releases after the last one that was read", *map(str, self.verdicts)]
        for package, releases in self.later.items():
            listed = ", ".join(releases)
            parts.append(f"Not compared yet: {package} {listed}.")
        if not self.verdicts:
            parts.append("There are none.")
        return "\n\n".join(parts)


def watch(packages: Collection[str] = (), points: HookPoints = NO_POINTS) -> Watch:
    """Compare the releases that the index has after the last read one; cover those without change.

    Each is compared with the one before it, up to the first that changes something. Covered ones
    are written to `data/releases.json` after all packages are done.

    Parameters
    ----------
    packages : collection of str, optional
        Names on the index; by default all of `data/watch.yaml`.
    points : dict, optional
        A package -> the hook points of its plugin.

    Returns
    -------
    Watch
        The verdicts; printed, a page in Markdown.

    Raises
    ------
    ValueError
        For an unknown package, and for a citation that no release has.
    RuntimeError
        Where pip finds no release or no wheel, or a wheel is broken. Nothing is written then.

    Examples
    --------
    >>> watch(["sglang"])  # doctest: +SKIP
    """
    known = _packages()
    for package in packages:
        require_word("package", package, tuple(known))
    read = json.loads(coverage.PATH.read_text())
    found = Watch()
    for package in known:
        if not packages or package in packages:
            _watch_package(package, read, points, found)
    if any(not verdict.changes for verdict in found.verdicts):
        unfinished = coverage.PATH.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(read, indent=1) + "\n")
        unfinished.replace(coverage.PATH)
    return found


def _watch_package(
    package: str,
    read: coverage.Releases,
    points: HookPoints,
    found: Watch,
) -> None:
    """Add the verdicts of a package to `found`, and its covered releases to `read`."""
    *_, base = read[package]
    last_read = Version(base)
    newer = []
    for name in index_releases(package):
        if Version(name) > last_read:
            newer.append(name)
    for number, release in enumerate(newer, start=1):
        verdict = compare(
            package,
            base,
            release,
            points,
            read_flashinfer=read[FLASHINFER],
        )
        found.verdicts.append(verdict)
        if verdict.changes:
            later = newer[number:]
            if later:
                found.later[package] = later
            return
        read[package][release] = verdict.flashinfer
        base = release


def compare(
    package: str,
    base: str,
    release: str,
    points: HookPoints = NO_POINTS,
    read_flashinfer: Collection[str] | None = None,
) -> Verdict:
    """What a release changed of the cited definitions of `base`; raises as `watch`, writes nothing.

    With `read_flashinfer` a required FlashInfer that is none of these is a change, too.
    """
    known = _packages()
    require_word("package", package, tuple(known))
    rows = rows_of(known[package]["title"], package, base)
    wanted: dict[tuple[str, str], list[str]] = {}
    changes = []
    with fetched(package, base) as old, fetched(package, release) as new:
        cited = _cited(known[package])
        hooked = _hooked(points.get(package, ()), base, old)
        for each in chain(cited, hooked):
            for definition in _definitions(each, old, new):
                cited_by = wanted.setdefault(definition, [])
                cited_by.append(each.by)
        for (path, name), cited_by in wanted.items():
            before = old.definitions(path).get(name, NOTHING)
            after = new.definitions(path).get(name, NOTHING)
            if before.text != after.text:
                change = Change(
                    path=path,
                    name=name,
                    how=_how(path, name, before, after, new),
                    again=_again(rows, path, name, old, cited_by),
                    difference=_difference(before, after),
                )
                changes.append(change)
        flashinfer = new.flashinfer
        built = old.built
    is_unread = read_flashinfer is not None and flashinfer not in read_flashinfer
    if flashinfer and is_unread:
        change = Change(
            path="METADATA",
            name="Requires-Dist",
            how=f"is FlashInfer {flashinfer}, which was not read",
            again=("data/releases.json",),
        )
        changes.append(change)
    return Verdict(
        package=package,
        base=base,
        release=release,
        flashinfer=flashinfer,
        compared=len(wanted),
        changes=tuple(changes),
        built=built,
    )


@cache
def _packages() -> Entry:
    """What is cited of each package."""
    (document,) = read_yaml(CITED)
    for name, entry in document.items():
        place = f"{CITED.name}: {name}"
        require_fields(entry, place, {"title": str, "read": list})
        for part in entry["read"]:
            require_fields(part, place, {"by": str, "files": dict})
            files = part["files"]
            are_texts = dict.fromkeys(files, str)
            require_fields(files, part.place, are_texts)
    return document


def _cited(entry: Entry) -> Iterator[Cited]:
    """What `data/watch.yaml` cites of a package."""
    for part in entry["read"]:
        for path, names in part["files"].items():
            yield Cited(
                path=path,
                names=tuple(names.split()),
                by=part["by"],
            )


def _hooked(points: Iterable[Any], base: str, old: Wheel) -> Iterator[Cited]:
    """What the hook points of a release cite; of an imported function its module, too."""
    release = Version(base)
    for point in points:
        is_known = not point.since or Version(point.since) <= release
        is_gone = point.before and Version(point.before) <= release
        if is_known and not is_gone:
            module, _, name = point.path.partition(":")
            hook = point.hook
            by = f"hook {hook.__name__} of {hook.__module__}"
            path = _path_of(module)
            yield Cited(path, (name,), by)
            definition = old.definitions(path).get(name, NOTHING)
            imported = IMPORT.search(definition.text)
            if imported:
                source, source_name = imported.groups()
                package, _, _ = module.rpartition(".")
                source_path = _path_of(resolve_name(source, package))
                yield Cited(source_path, (source_name,), by)


def _path_of(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _definitions(each: Cited, old: Wheel, new: Wheel) -> list[tuple[str, str]]:
    """Path and name of each definition that is cited and that one of two releases has.

    An import is cited only where it is named.
    """
    found = []
    missing = set(each.names)
    all_paths = [*old.paths, *new.paths]
    paths = dict.fromkeys(matching(all_paths, each.path))
    for path in paths:
        either = new.definitions(path) | old.definitions(path)
        for name, definition in either.items():
            is_cited = not each.names and not definition.is_import
            for cited in each.names:
                if _picks(cited, name, definition):
                    missing.discard(cited)
                    is_cited = True
            if is_cited:
                found.append((path, name))
    if missing or not paths:
        words = ", ".join(sorted(missing)) or "the file"
        raise ValueError(
            f"{each.path}, cited by {each.by}, must have {words} in {old.label} or {new.label}, "
            "got none: correct data/watch.yaml or the hook point"
        )
    return found


def _picks(cited: str, name: str, definition: Definition) -> bool:
    """Whether a name or pattern means a definition, or the class that it is in."""
    if definition.is_import:
        return name == cited
    return fits(name, cited) or fits(name, f"{cited}.*")


def _how(path: str, name: str, before: Definition, after: Definition, new: Wheel) -> str:
    """In words, how a definition changed; where it may have gone."""
    if not before.text:
        return "is new"
    if after.text:
        return "changed"
    if not path.endswith(".py"):
        return "is gone"
    owner, _, _ = name.partition(".")
    defines = re.compile(
        rf"^\s*(?:async def|def|class|struct) {re.escape(owner)}\b",
        re.MULTILINE,
    )
    places = []
    for other in new.paths:
        is_other = other != path and other.endswith(".py")
        if is_other and defines.search(new.text(other)):
            places.append(other)
    if not places:
        return "is gone"
    first = ", ".join(places[:3])
    return f"is gone; {owner} is in {first}"


def _difference(before: Definition, after: Definition) -> tuple[str, ...]:
    """The lines of a diff of two definitions, formatted alike."""
    lines = difflib.unified_diff(
        before.text.split("\n"),
        after.text.split("\n"),
        lineterm="",
        n=2,
    )
    return tuple(lines)[2:]


def _again(
    rows: Iterable[Row],
    path: str,
    name: str,
    old: Wheel,
    cited_by: Iterable[str],
) -> tuple[str, ...]:
    """The rows that cite a definition, and who else does."""
    defined = old.definitions(path)
    files = set()
    again = []
    for row in rows:
        if row.cites(path, name, defined, old.release):
            files.add(row.file)
            again.append(str(row))
    for by in cited_by:
        if by not in files:
            again.append(by)
    return tuple(dict.fromkeys(again))
