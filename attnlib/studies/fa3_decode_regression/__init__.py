"""How much slower fa3 decodes than fa2, and since when: the names of its parts (`..parts`)."""

from __future__ import annotations

from ..parts import parts

__getattr__ = parts(__name__, "study", "tables", "figures", "checks")
