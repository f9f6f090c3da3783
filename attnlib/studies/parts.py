"""A study's folder as one name: what its modules define, imported when it is first asked for.

`from attnlib.studies import engine_modes` costs nothing, `engine_modes.summary(frame)` works.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def parts(package: str, *modules: str) -> Callable[[str], Any]:
    """A `__getattr__` for `package`: the first of its `modules` that has the name gives it."""

    def find(name: str) -> Any:
        if not name.startswith("_"):
            for module in modules:
                found = importlib.import_module(f"{package}.{module}")
                if hasattr(found, name):
                    return getattr(found, name)
        raise AttributeError(f"{package} has no {name!r}; it has the names of {', '.join(modules)}")

    return find
