"""One call of multi-head latent attention, dense or over chosen tokens, as a case. No torch."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.spec import (
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


@dataclass(frozen=True)
class MlaCase(NamedCase):
    """A seeded MLA call: requests of up to `kv_len` tokens, `lengths` and `context` as in
    `DecodeCase`.

    The queries of a request are its last `q_len` tokens: 1 in decode, more where drafts are
    verified, under a causal mask. ValueError for chosen tokens with more than one.
    """

    kind: ClassVar = "mla"
    spec: MlaSpec
    batch_size: int
    kv_len: int
    lengths: str = "fixed"
    seed: int = 0
    q_len: int = later(1)
    context: int = later(0)

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size)
        require_int("kv_len", self.kv_len)
        require_int("q_len", self.q_len, most=self.kv_len)
        require_lengths("lengths", self.lengths, self.batch_size, self.kv_len, LENGTHS)
        require_context(self.context, self.kv_len)
        require_one_query(self.spec, self.q_len)

    @property
    def cost(self) -> CallCost:
        """Bytes and useful FLOPs: each attended token once, for all heads together.

        A dense call reads its page-table entries, a sparse one `top_k` indices per request.
        """
        spec, seq_lens = self.spec, sample_mla_lens(self).astype(np.int64)
        pages = int((-(-seq_lens // spec.page_size)).sum())
        tokens, indices = int(seq_lens.sum()), pages
        if spec.top_k:
            tokens = int(np.minimum(seq_lens, spec.top_k).sum())
            indices = self.batch_size * spec.top_k
        width = MLA_HEAD_DIM + LATENT_DIM
        rows = self.batch_size * self.q_len
        hidden = self.batch_size * self.q_len * (self.q_len - 1) // 2  # by the causal mask
        qo_bytes = ELEMENT_BYTES["bfloat16"] * rows * spec.num_qo_heads * width
        return CallCost(
            kv_bytes=spec.token_bytes * tokens,
            io_bytes=spec.token_bytes * tokens + qo_bytes + INT32_BYTES * indices,
            flops=2 * spec.num_qo_heads * width * (self.q_len * tokens - hidden),
            cache_bytes=spec.token_bytes * pages * spec.page_size,
        )

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        s = self.spec
        chosen = f"top {s.top_k}" if s.top_k else "dense"
        tail = "" if self.lengths == "fixed" else f" {self.lengths}"
        tail += f" seed {self.seed}" if self.seed else ""
        tail += f" q_len {self.q_len}" if self.q_len > 1 else ""
        tail += f" context {self.context}" if self.context else ""
        layer = f"mla {s.num_qo_heads} heads {chosen} {s.kv_format} page {s.page_size}"
        return f"{layer} batch {self.batch_size} kv_len {self.kv_len}{tail}"


def sample_mla_lens(case: MlaCase) -> np.ndarray:
    """Tokens of each request [bs] int32, at least as many as it has queries."""
    return np.maximum(sample_seq_lens(case), case.q_len)
