"""Overrides: a backend that the user pins by environment variable, for prefill or for decode.

`ATTNLIB_PREFILL_BACKEND` acts in the prefill modes (paged, ragged, verify and the extends, as
SGLang's prefill_backend does), `ATTNLIB_DECODE_BACKEND` in decode and MLA. The name is a backend of
the library whose choice is explained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .situation import DECODE_MODES

PREFILL_VARIABLE, DECODE_VARIABLE = "ATTNLIB_PREFILL_BACKEND", "ATTNLIB_DECODE_BACKEND"


@dataclass(frozen=True)
class Override:
    """A backend asked for by the environment variable `variable`."""

    variable: str
    backend: str


def override_for(mode: str, env: Mapping[str, str] | None = None) -> Override | None:
    """The override that acts in `mode`; `env` defaults to the process's environment."""
    variable = DECODE_VARIABLE if mode in DECODE_MODES else PREFILL_VARIABLE
    backend = (os.environ if env is None else env).get(variable, "").strip()
    return Override(variable, backend) if backend else None
