"""The rows of the rules that cite a definition of another package, by their `source`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..core.yaml_file import Entry, read_yaml
from ..run.releases import Version
from ..select.libraries import RULES_FOLDER
from .definitions import NOTHING, Definitions

CITATION = re.compile(r"([\w/.]+\.\w+)(?::(\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)(?![\d.]))?([^;]*)")
"""A file, its lines, and what follows, the release."""
WORD = re.compile(r"\b[A-Za-z_]\w+\b(?!\.\w)")


@dataclass(frozen=True)
class Row:
    """A row: its file, where it stands there, and its source."""

    file: str
    place: str
    source: str

    def __str__(self) -> str:
        return f"{self.place}: {self.source}"

    def cites(self, path: str, name: str, known: Definitions, release: str) -> bool:
        """Whether the source names a definition or, if it names none of the file, the file.

        `known` are the file's definitions in `release`; lines cited of that release must be in it.
        """
        words = set(WORD.findall(self.source))
        if words.intersection(name.split(".")):
            return True
        if any(words.intersection(other.split(".")) for other in known):
            return False
        definition = known.get(name, NOTHING)
        for file, lines, rest in CITATION.findall(self.source):
            if not f"/{path}".endswith(f"/{file}"):
                continue
            has_lines = lines and definition.last and release in rest.split(", ")
            if not has_lines or definition.has_one_of(lines):
                return True
        return False


def rows_of(title: str, package: str, release: str) -> list[Row]:
    """The rows whose source is in a package, but those that ended with `release` or before."""
    found: dict[str, Row] = {}
    for path in sorted(RULES_FOLDER.glob("*.yaml")):
        for document in read_yaml(path):
            is_own = document.get("package") == package
            for entry in _with_source(document):
                has_ended = is_own and _has_ended(entry.get("when"), Version(release))
                if title in entry["source"] and not has_ended:
                    place = f"data/rules/{entry.place}"
                    found[place] = Row(
                        file=f"data/rules/{path.name}",
                        place=place,
                        source=entry["source"],
                    )
    return list(found.values())


def _with_source(part: Any) -> Iterator[Entry]:
    """The mappings, at any depth, that have a source."""
    if isinstance(part, list):
        for each in part:
            yield from _with_source(each)
    elif isinstance(part, Entry):
        if isinstance(part.get("source"), str):
            yield part
        yield from _with_source([*part.values()])


def _has_ended(when: Any, release: Version) -> bool:
    """Whether conditions that must all hold exclude the releases after `release`."""
    if isinstance(when, list):
        return any(_has_ended(part, release) for part in when)
    if isinstance(when, str) and when.startswith("before "):
        return Version(when.removeprefix("before ")) <= release
    return False
