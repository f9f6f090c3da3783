"""fa2, fa3 and `auto` in every mode of an engine: the names of its parts (`..parts`)."""

from __future__ import annotations

from ..parts import parts

__getattr__ = parts(__name__, "study", "tables", "figures", "checks")
