"""The studies: what was measured, on which machine. `attnlib measure NAME` repeats one.

A study is a folder: `study.py` holds its question, grids and published machine (no torch, no
pandas), `tables.py`, `figures.py` and `checks.py` what is made of its records.
`from attnlib.studies import NAME` gives all of it as one name; `STUDIES` lists the studies.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..run.study import Study

FIRST = ("fa3_decode_regression", "auto_resolution", "measurement_trust")
"""Listed before the others: the regression that all began with is what a view shows first."""


def discover() -> dict[str, Study]:
    """The `STUDY` of every folder here, by name; ValueError for a folder that has none."""
    folders = {found.name for found in pkgutil.iter_modules(__path__) if found.ispkg}
    return {name: _study_of(name) for name in (*FIRST, *sorted(folders - {*FIRST}))}


def _study_of(name: str) -> Study:
    study = getattr(importlib.import_module(f"{__name__}.{name}.study"), "STUDY", None)
    if not isinstance(study, Study) or study.name != name:
        raise ValueError(f"attnlib/studies/{name}/study.py must hold STUDY, a Study named {name!r}")
    return study


STUDIES = discover()
