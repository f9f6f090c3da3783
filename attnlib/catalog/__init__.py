"""Studies that have a module of their own: `python -m attnlib new-study NAME` starts one here.

A module holds one `STUDY`; `studies.STUDIES` lists it after its own.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..study import Study


def discover() -> list[Study]:
    """The `STUDY` of every module here, by module name; ValueError for one that has none."""
    return [_study_of(module.name) for module in pkgutil.iter_modules(__path__)]


def _study_of(module: str) -> Study:
    study = getattr(importlib.import_module(f"{__name__}.{module}"), "STUDY", None)
    if not isinstance(study, Study) or study.name != module:
        raise ValueError(f"attnlib/catalog/{module}.py must hold STUDY, a Study named {module!r}")
    return study
