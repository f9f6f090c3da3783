"""A plan for FlashInfer's fa2, of a chunk of one's own or of the planner's, as a case. No torch."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.spec import AttnSpec, require_int
from ..decode.case import DecodeCase
from ..extend.case import ExtendCase
from ..form import NamedCase
from ..lengths import sample_seq_lens


@dataclass(frozen=True)
class PlanCase(NamedCase):
    """A plan for `q_len` queries of each request of `decode`, causal.

    KV chunks have `chunk` tokens; 0 leaves the choice to the planner.
    """

    kind: ClassVar = "plan"
    decode: DecodeCase
    q_len: int = 1
    chunk: int = 0

    def __post_init__(self) -> None:
        require_int("q_len", self.q_len)
        require_int("chunk", self.chunk, least=0)

    @property
    def spec(self) -> AttnSpec:
        """The attention layer."""
        return self.decode.spec

    @property
    def call(self) -> DecodeCase | ExtendCase:
        """The attention call that is planned."""
        if self.q_len == 1:
            return self.decode
        return ExtendCase(self.decode, "target_verify", self.q_len, mask="causal")

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        return f"chunk {self.chunk or 'chosen'} q_len {self.q_len} {self.decode.label}"


def sample_plan_lens(case: PlanCase) -> np.ndarray:
    """Tokens of each request [bs] int64, at least as many as queries."""
    return np.maximum(sample_seq_lens(case.decode).astype(np.int64), case.q_len)
