"""What a step's metadata costs, design by design: the names of its parts (`..parts`)."""

from __future__ import annotations

from ..parts import parts

__getattr__ = parts(__name__, "study", "tables", "figures", "checks")
