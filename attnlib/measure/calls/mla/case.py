"""One call of multi-head latent attention, dense or over chosen tokens, as a case. No torch."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ....core.call_text import CallText, Lens, words_of_layer
from ....core.spec import (
    ELEMENT_BYTES,
    LATENT_DIM,
    LENGTHS,
    MLA_HEAD_DIM,
    MlaSpec,
    require_context,
    require_int,
    require_lengths,
    require_one_query,
)
from ..cost import INT32_BYTES, CallCost
from ..form import NamedCase, later
from ..lengths import sample_seq_lens

DENSE = "mla"
SPARSE = "sparse_mla"
"""Modes: over all tokens, over `top_k` chosen ones."""


@dataclass(frozen=True)
class MlaCase(NamedCase):
    """A seeded MLA call: requests of up to `kv_len` tokens, `lengths` and `context` as in
    `DecodeCase`.

    The queries of a request are its last `q_len` tokens: 1 in decode, more where drafts are
    verified, under a causal mask. ValueError for chosen tokens with more than one.
    """

    kind: ClassVar = "mla"
    words: ClassVar = (
        "mode",
        "q_len",
        "heads",
        "page",
        "top_k",
        "kv_format",
        "lens",
        "seed",
        "context",
    )
    spec: MlaSpec
    batch_size: int
    kv_len: int
    lengths: str = "fixed"
    seed: int = 0
    q_len: int = later(1)
    context: int = later(0)

    def __post_init__(self) -> None:
        if not isinstance(self.spec, MlaSpec):
            raise ValueError(f"spec must be an MlaSpec, got {self.spec!r}")
        require_int("batch_size", self.batch_size)
        require_int("kv_len", self.kv_len)
        require_int("q_len", self.q_len, most=self.kv_len)
        require_lengths(
            "lengths",
            self.lengths,
            self.batch_size,
            self.kv_len,
            LENGTHS,
        )
        require_context(self.context, self.kv_len)
        require_one_query(self.spec, self.q_len)

    @property
    def cost(self) -> CallCost:
        """Bytes and useful FLOPs: each attended token once, for all heads together.

        A dense call reads its page-table entries, a sparse one `top_k` indices per request.
        """
        spec = self.spec
        seq_lens = sample_mla_lens(self).astype(np.int64)
        of_request = -(-seq_lens // spec.page_size)
        pages = int(of_request.sum())
        tokens = int(seq_lens.sum())
        indices = pages
        if spec.top_k:
            tokens = int(np.minimum(seq_lens, spec.top_k).sum())
            indices = self.batch_size * spec.top_k
        rows = self.batch_size * self.q_len
        hidden = rows * (self.q_len - 1) // 2  # by the causal mask
        pairs = self.q_len * tokens - hidden
        width = spec.num_qo_heads * (MLA_HEAD_DIM + LATENT_DIM)
        kv_bytes = spec.token_bytes * tokens
        qo_bytes = ELEMENT_BYTES["bfloat16"] * rows * width
        return CallCost(
            kv_bytes=kv_bytes,
            io_bytes=kv_bytes + qo_bytes + INT32_BYTES * indices,
            flops=2 * width * pairs,
            cache_bytes=spec.token_bytes * pages * spec.page_size,
        )

    @property
    def said(self) -> CallText:
        """What its text says."""
        return CallText(
            mode=SPARSE if self.spec.top_k else DENSE,
            q_len=self.q_len if self.q_len > 1 else None,
            **words_of_layer(self.spec),
            lens=Lens(self.batch_size, self.kv_len, self.lengths),
            seed=self.seed or None,
            context=self.context or None,
        )

    @classmethod
    def from_said(cls, said: CallText) -> Self:
        """Inverse of `said`."""
        if (said.mode == SPARSE) != bool(said.top_k):
            words = f"top_k must be given with mode={SPARSE}, and only then"
            raise ValueError(f"{words}, got {said.top_k} with {said.mode}")
        return cls(
            said.latent_layer(),
            **said.required("lens").fields,
            seed=said.seed or 0,
            q_len=1 if said.q_len is None else said.q_len,
            context=said.context or 0,
        )


def sample_mla_lens(case: MlaCase) -> np.ndarray:
    """Tokens of each request [bs] int32, at least as many as it has queries."""
    return np.maximum(sample_seq_lens(case), case.q_len)
