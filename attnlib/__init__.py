"""attnlib: reproduce, explain and prove fixes of attention-backend regressions.

The names below are the public surface of a notebook; each is imported on first use, so that
``import attnlib`` costs nothing and needs neither torch nor matplotlib.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "AttnSpec": "attnlib.core.spec",
    "DecodeBatch": "attnlib.core.batch",
    "DecodeCase": "attnlib.kinds.decode.case",
    "PagedKV": "attnlib.core.batch",
    "available": "attnlib.core.backends",
    "create": "attnlib.core.backends",
    "Study": "attnlib.run.study",
    "load_or_measure": "attnlib.run.study",
    "mode": "attnlib.run.study",
    "compare": "attnlib.lab.compare",
    "profile": "attnlib.lab.profile",
    "explore": "attnlib.lab.widgets",
    "view": "attnlib.lab.view",
    "STUDIES": "attnlib.studies",
    "load": "attnlib.run.store",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name from its home module when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"attnlib has no {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext attnlib`: the cell magic `%%attn_profile` (`magic`)."""
    from .lab.magic import register

    register(shell)
