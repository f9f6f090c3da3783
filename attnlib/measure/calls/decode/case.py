"""One decode attention call over a paged cache, as a case. No torch here."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ....core.call_text import CallText, Lens, words_of_layer
from ....core.spec import (
    LENGTHS,
    AttnSpec,
    require_context,
    require_int,
    require_lengths,
)
from ..cost import INT32_BYTES, CallCost, attention_cost
from ..form import NamedCase, later
from ..lengths import sample_seq_lens

LAYER_WORDS = (
    "mode",
    "model",
    "tp",
    "dp",
    "heads",
    "head_dim",
    "page",
    "dtype",
    "kv_dtype",
    "window",
)


@dataclass(frozen=True)
class DecodeCase(NamedCase):
    """The description of a seeded decode workload; `measure.build_workload` builds its tensors.

    Parameters
    ----------
    spec : AttnSpec
        The layer.
    batch_size : int
        Requests.
    kv_len : int
        Tokens of the longest request.
    lengths : str
        One of the distributions of `measure.calls.lengths` (`fixed`, `ragged`, `one_long`, ...), or
        explicit tokens: `33+1+60`.
    seed : int
        Of inputs and drawn lengths.
    context : int
        Tokens of the page table's width, as an engine is configured; 0: those of the longest
        request.

    Raises
    ------
    ValueError
        Naming the argument, what it must be and what it was.

    Examples
    --------
    >>> import attnlib
    >>> case = attnlib.DecodeCase(attnlib.AttnSpec(32, 8, 128, 16), 16, 8192)
    >>> case.label
    'heads=32/8 head_dim=128 page=16 lens=8192x16'
    """

    words: ClassVar = (*LAYER_WORDS, "lens", "seed", "context")
    spec: AttnSpec
    batch_size: int
    kv_len: int
    lengths: str = "fixed"
    seed: int = 0
    context: int = later(0)

    def __post_init__(self) -> None:
        if not isinstance(self.spec, AttnSpec):
            raise ValueError(f"spec must be an AttnSpec, got {self.spec!r}")
        require_int("batch_size", self.batch_size)
        require_int("kv_len", self.kv_len)
        require_lengths(
            "lengths",
            self.lengths,
            self.batch_size,
            self.kv_len,
            LENGTHS,
        )
        require_context(self.context, self.kv_len)

    @property
    def cost(self) -> CallCost:
        """Bytes and useful FLOPs, of the tokens that a window leaves."""
        spec = self.spec
        seq_lens = sample_seq_lens(self).astype(np.int64)
        hidden = np.zeros_like(seq_lens)
        if spec.window:
            hidden = np.maximum(seq_lens - spec.window, 0)
        tokens = int((seq_lens - hidden).sum())
        pages = -(-seq_lens // spec.page_size)
        pages -= hidden // spec.page_size
        return attention_cost(
            spec,
            held=int(seq_lens.sum()),
            read=tokens,
            queries=self.batch_size,
            pairs=tokens,
            index_bytes=INT32_BYTES * int(pages.sum()),
        )

    @property
    def said(self) -> CallText:
        """What its text says."""
        return CallText(
            **words_of_layer(self.spec),
            lens=Lens(self.batch_size, self.kv_len, self.lengths),
            seed=self.seed or None,
            context=self.context or None,
        )

    @classmethod
    def from_said(cls, said: CallText) -> Self:
        """Inverse of `said`."""
        return cls(
            said.layer(),
            **said.required("lens").fields,
            seed=said.seed or 0,
            context=said.context or 0,
        )
