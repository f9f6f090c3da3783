"""The studies: what was measured, on which machine. `attnlib measure NAME` repeats one.

A study is a folder: `study.py` holds its question, grids and published machine (no torch, no
pandas), `tables.py`, `figures.py` and `checks.py` what is made of its records.
`from attnlib.studies import NAME` gives all of it as one name, each module imported when a name of
it is first asked for; `STUDIES` lists the studies.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from ..run.study import Study

FIRST = ("fa3_decode_regression", "auto_resolution", "measurement_trust")
"""Listed before the others: a view shows the regression first."""

NOT_STUDIES = {"captured", "claims", "gains", "roofline", "upgrade"}


def discover() -> dict[str, Study]:
    """The `STUDY` of every module and folder here that has one, by name."""
    names = sorted({module.name for module in pkgutil.iter_modules(__path__)} - NOT_STUDIES)
    found = {name: _study_of(name) for name in (*FIRST, *(n for n in names if n not in FIRST))}
    return found


def _study_of(name: str) -> Study:
    module = importlib.import_module(f"{__name__}.{name}")
    if hasattr(module, "__path__"):
        study = importlib.import_module(f"{module.__name__}.study").STUDY
        module.__getattr__ = lambda asked: _part(module, asked)  # type: ignore[method-assign]
        return study
    return module.STUDY


def _part(folder: ModuleType, asked: str) -> Any:
    # What readers ask for comes before what judges claims.
    found = pkgutil.iter_modules(folder.__path__)
    modules = sorted((m.name for m in found), key=lambda name: (name == "checks", name))
    for name in () if asked.startswith("_") else modules:
        module = importlib.import_module(f"{folder.__name__}.{name}")
        if hasattr(module, asked):
            return getattr(module, asked)
    raise AttributeError(f"{folder.__name__} has no {asked!r} in {', '.join(modules)}")


STUDIES = discover()
