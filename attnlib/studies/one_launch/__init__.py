"""Page table and FlashAttention-3's schedule in one launch: the names of its parts (`..parts`)."""

from __future__ import annotations

from ..parts import parts

__getattr__ = parts(__name__, "study")
