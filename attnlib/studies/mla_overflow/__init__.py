"""At which token FlashInfer 0.6.4 MLA reads others: the names of its parts (`..parts`)."""

from __future__ import annotations

from ..parts import parts

__getattr__ = parts(__name__, "study")
