"""One decode attention call over a paged cache, as a case. No torch here."""

from dataclasses import dataclass

import numpy as np

from ...core.spec import LENGTHS, AttnSpec, require_context, require_int, require_lengths
from ..cost import INT32_BYTES, CallCost, attention_cost
from ..form import NamedCase, later
from ..lengths import sample_seq_lens


@dataclass(frozen=True)
class DecodeCase(NamedCase):
    """The description of a seeded decode workload; `measure.build_workload` builds its tensors.

    `kv_len` is the tokens of the longest request; `lengths` is one of the distributions of
    `kinds.lengths`, or explicit: `33+1+60`. `context` is the width of the page table in tokens, as
    an engine is configured (0: as wide as the longest request).
    """

    spec: AttnSpec
    batch_size: int
    kv_len: int
    lengths: str = "fixed"
    seed: int = 0
    context: int = later(0)

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size)
        require_int("kv_len", self.kv_len)
        require_lengths("lengths", self.lengths, self.batch_size, self.kv_len, LENGTHS)
        require_context(self.context, self.kv_len)

    @property
    def cost(self) -> CallCost:
        """Bytes and useful FLOPs, of the tokens that a window leaves."""
        spec, seq_lens = self.spec, sample_seq_lens(self).astype(np.int64)
        hidden = np.maximum(seq_lens - spec.window, 0) if spec.window else 0 * seq_lens
        tokens = int((seq_lens - hidden).sum())
        pages = -(-seq_lens // spec.page_size) - hidden // spec.page_size
        return attention_cost(
            spec,
            held=int(seq_lens.sum()),
            read=tokens,
            queries=self.batch_size,
            pairs=tokens,
            index_bytes=INT32_BYTES * int(pages.sum()),
        )

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        s = self.spec
        tail = "" if self.lengths == "fixed" else f" {self.lengths}"
        layer = f"{s.heads} d{s.head_dim} {s.dtypes} page {s.page_size}"
        layer += f" window {s.window}" if s.window else ""
        tail += f" context {self.context}" if self.context else ""
        return f"{layer} batch {self.batch_size} kv_len {self.kv_len}{tail}"

    @property
    def key(self) -> str:
        """A name without spaces for command lines, `32/8,d128,p16,b16,k8192`; stable.

        Defaults are left out: no window (else `,w4096`), bfloat16, fixed lengths, seed 0.
        """
        s = self.spec
        key = f"{s.heads},d{s.head_dim},p{s.page_size},b{self.batch_size},k{self.kv_len}"
        key += f",w{s.window}" if s.window else ""
        key += f",{s.dtypes}" if s.dtypes != "bfloat16" else ""
        key += f",{self.lengths}" if self.lengths != "fixed" else ""
        key += f",seed{self.seed}" if self.seed else ""
        return key + (f",context{self.context}" if self.context else "")
