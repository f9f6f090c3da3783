"""FlashAttention-3 schedules once per step or per layer: the names of its parts (`..parts`)."""

from __future__ import annotations

from ..parts import parts

__getattr__ = parts(__name__, "study", "tables", "figures", "tiles", "vectors", "words")
