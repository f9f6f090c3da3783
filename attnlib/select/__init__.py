"""Which backend a library picks for an attention call, and why, rule by rule.

`explain` walks the tables of a library's release: `flashinfer` (its `auto`, and how engines call
it), `sglang` (with mini-sglang), `vllm`. Rules are data, each row with its source: `rules` says
what a row is, `situation` what a row may ask, `libraries` which tables there are, `overrides` how
the user pins a backend. `measured` asks a GPU's records instead. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

from .choice import Choice, explain
from .libraries import LIBRARIES
from .rules import Reason, UnknownFactError
from .situation import GPUS, MODES, Call

__all__ = [
    "GPUS",
    "LIBRARIES",
    "MODES",
    "Call",
    "Choice",
    "Reason",
    "UnknownFactError",
    "explain",
    "measured",
]


def __getattr__(name: str) -> Any:
    """`measured`, only when it is asked for: it needs pandas, the rules need nothing."""
    if name != "measured":
        raise AttributeError(f"attnlib.select has no {name!r}; it has {', '.join(__all__)}")
    from ..studies.backend_policy.learn import measured

    return measured
