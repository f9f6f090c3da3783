"""YAML files of the data folder: read so that whoever edits one is told file, line and field."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

import yaml

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's C safe loader, which is ten times as fast, or the Python one if it is missing."""
MAPPING = "tag:yaml.org,2002:map"
WORDS: dict[type, str] = {
    str: "text",
    list: "a list",
    dict: "a mapping",
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    type(None): "null",
}
Kind = type | UnionType
"""The type of a field, or several."""


class Entry(dict[str, Any]):
    """A mapping of a file; `place` is the file's name and the line where it begins."""

    place = ""


class _Loader(LOADER):
    """Makes an `Entry` of every mapping; its keys are texts, each once."""


def _entry(loader: Any, node: Any) -> Iterator[Entry]:
    entry = Entry()
    entry.place = f"{loader.name}:{node.start_mark.line + 1}"
    yield entry  # before it is filled, since an alias may stand within what it names
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        where = f"{loader.name}:{key_node.start_mark.line + 1}"
        if not isinstance(key, str):
            raise ValueError(f"{where}: a key must be text, got {key!r}")
        if key in entry:
            raise ValueError(f"{where}: a key must stand once, {key!r} stands twice")
        entry[key] = None
    entry |= loader.construct_mapping(node, deep=True)


_Loader.add_constructor(MAPPING, _entry)


def read_yaml(path: Path) -> list[Entry]:
    """The documents of a file, mappings all; ValueError in one line with its name and the line."""
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        loader.name = path.name
        documents = []
        while loader.check_data():
            documents.append(loader.get_data())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path.name}:{mark.line + 1}" if mark else path.name
        problem = getattr(error, "problem", None) or str(error)
        words = " ".join(problem.split())
        raise ValueError(f"{place}: must be YAML: {words}") from error
    for document in documents:
        if not isinstance(document, Entry):
            raise ValueError(f"{path.name}: must hold mappings, got {document!r:.60}")
    return documents


def require_fields(
    entry: Any,
    where: str,
    required: Mapping[str, Kind],
    optional: Mapping[str, Kind] = {},
) -> None:
    """ValueError, which begins with `where`, unless `entry` has the fields and each its type."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be a mapping, got {entry!r:.60}")
    known = {**required, **optional}
    unknown = ", ".join(name for name in entry if name not in known)
    if unknown:
        raise ValueError(f"{where}: keys must be {', '.join(known)}, got {unknown}")
    for name in required:
        if name not in entry:
            raise ValueError(f"{where}: {name} must be given")
    for name, value in entry.items():
        require_kind(value, f"{where}: {name}", known[name])


def require_kind(value: Any, name: str, kind: Kind) -> None:
    """ValueError, which begins with `name`, unless a value is of a type, or of one of several."""
    if isinstance(value, kind):
        return
    if isinstance(kind, UnionType):
        kinds = kind.__args__
    else:
        kinds = (kind,)
    words = [WORDS.get(each, each.__name__) for each in kinds]
    raise ValueError(f"{name} must be {' or '.join(words)}, got {value!r:.60}")
