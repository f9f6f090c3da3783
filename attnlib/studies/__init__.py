"""The studies: what was measured, on which machine. `attnlib measure NAME` repeats one.

Of a retired study only the records are left.

A study is a file: its question, grids and published machine, and the tables and figures made of its
records. Studies that share more than that, as a case of their own, are a folder, whose `__all__`
names what it has. `STUDIES` lists all by name, and each is an attribute here; all are imported on
first use, so that a worker imports only the folder of its case.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any

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
    """What stands here or in a folder's `__all__` -> its module."""
    found = {}
    for each in pkgutil.iter_modules(__path__, f"{__name__}."):
        short = each.name.removeprefix(f"{__name__}.")
        if not each.ispkg:
            found[short] = each.name
            continue
        for name in importlib.import_module(each.name).__all__:
            found[name] = f"{each.name}.{name}"
    return found


class _Studies(dict[str, "Study"]):
    """Studies by name; KeyError lists the names there are."""

    def __missing__(self, name: str) -> Study:
        raise KeyError(f"a study must be one of {', '.join(self)}, got {name!r}")


@cache
def _studies() -> dict[str, Study]:
    others = sorted(_modules().keys() - {*FIRST})
    found = _Studies()
    for name in (*FIRST, *others):
        module = importlib.import_module(_modules()[name])
        if hasattr(module, "STUDY"):
            found[name] = module.STUDY
    return found
