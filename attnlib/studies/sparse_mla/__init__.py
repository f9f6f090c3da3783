"""FlashInfer against FlashMLA, with FP8 and 16-bit caches: the names of its parts (`..parts`)."""

from __future__ import annotations

from ..parts import parts

__getattr__ = parts(__name__, "study", "tables", "figures", "checks", "model")
