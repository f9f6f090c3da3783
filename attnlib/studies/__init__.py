"""The studies: what was measured, on which machine. `attnlib measure NAME` repeats one.

Of a retired study only the records are left.

A study is a file: its question, grids and published machine, and the tables and figures made of its
records. Studies that share more than that, as a case of their own, are a folder, whose `__all__`
names what it has. `STUDIES` lists all by name, and each is an attribute here; all are imported on
first use, so that a worker imports only the folder of its case. A file that cannot be imported is
left out of `STUDIES`, which says so once on stderr; to ask for its study is a ValueError.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import install_advice

if TYPE_CHECKING:
    from ..run.study import Study

FIRST = ("fa3_decode_regression", "auto_resolution", "measurement_trust")
"""Listed before the others: a view shows the regression first."""

STUDIES: dict[str, Study]
"""Every study here, by name."""
PACE: Study
"""Its published records say how long a sweep takes."""


def __dir__() -> list[str]:
    return ["STUDIES", *_modules()]


def __getattr__(name: str) -> Any:
    if name == "STUDIES":
        return _studies()
    if name == "PACE":
        return _studies()["fa3_decode_regression"]
    if name.startswith("_") or name not in _modules():
        raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(sorted(_modules()))}")
    return importlib.import_module(_modules()[name])


@cache
def _modules() -> dict[str, str]:
    """What stands here or in a folder's `__all__` -> its module; of a folder that cannot be
    imported, the folder."""
    found = {}
    for each in pkgutil.iter_modules(__path__, f"{__name__}."):
        short = each.name.removeprefix(f"{__name__}.")
        if not each.ispkg:
            found[short] = each.name
            continue
        try:
            folder = importlib.import_module(each.name)
        except Exception:  # whatever a person's file raises: it is asked again, and told, by name
            found[short] = each.name
            continue
        for name in folder.__all__:
            found[name] = f"{each.name}.{name}"
    return found


class _Studies(dict[str, "Study"]):
    """Studies by name; KeyError lists the names there are.

    `mistakes` are those of files that are left out: name -> one sentence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mistakes: dict[str, str] = {}

    def __missing__(self, name: str) -> Study:
        require_sound(name)
        raise KeyError(f"a study must be one of {', '.join(self)}, got {name!r}")


def require_sound(name: str) -> None:
    """ValueError that says file, line and mistake if the file of that name cannot be imported."""
    mistakes = _studies().mistakes
    if name in mistakes:
        raise ValueError(mistakes[name])


@cache
def _studies() -> _Studies:
    others = sorted(_modules().keys() - {*FIRST})
    found = _Studies()
    for name in (*FIRST, *others):
        try:
            study = _study_of(name)
        except Exception as error:  # whatever a person's file raises
            if isinstance(error, ModuleNotFoundError) and install_advice(error):
                raise
            found.mistakes[name] = _mistake(name, error)
            continue
        if study is not None:
            found[name] = study
    for mistake in found.mistakes.values():
        sys.stderr.write(f"left out: {mistake}\n")
    return found


def _study_of(name: str) -> Study | None:
    """The `STUDY` of a file; ValueError if it is none, or has another name than its file."""
    from ..run.study import Study

    module = importlib.import_module(_modules()[name])
    study = getattr(module, "STUDY", None)
    if study is None:
        return None
    if not isinstance(study, Study):
        raise ValueError(f"STUDY must be a Study, got {study!r}")
    if study.name != name:
        raise ValueError(f"name must be {name!r}, as the file's, got {study.name!r}")
    return study


def _mistake(name: str, error: Exception) -> str:
    """File, line and what is wrong there, in one sentence."""
    root = Path(__path__[0]).parents[1]
    file = root.joinpath(*_modules()[name].split("."))
    path = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    place = path.relative_to(root).as_posix()
    line = getattr(error, "lineno", None)  # of a SyntaxError
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            line = frame.lineno
    if line:
        place = f"{place}:{line}"
    what = traceback.format_exception_only(error)[-1].strip()
    return f"study {name!r} must be importable, {place}: {what}"
