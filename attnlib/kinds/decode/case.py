"""One decode attention call over a paged cache, as a case. No torch here."""

from dataclasses import dataclass
from typing import ClassVar

from ...core.spec import LENGTHS, AttnSpec, require_int, require_lengths
from ..form import NamedCase


@dataclass(frozen=True)
class DecodeCase(NamedCase):
    """The description of a seeded decode workload; `measure.build_workload` builds its tensors.

    `kv_len` is the most tokens that a request has; `lengths` is one of the distributions of
    `kinds.lengths`, or says them all: `33+1+60`.
    """

    inner: ClassVar = ("spec", AttnSpec)
    spec: AttnSpec
    batch_size: int
    kv_len: int
    lengths: str = "fixed"
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size)
        require_int("kv_len", self.kv_len)
        require_lengths("lengths", self.lengths, self.batch_size, self.kv_len, LENGTHS)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        s = self.spec
        tail = "" if self.lengths == "fixed" else f" {self.lengths}"
        layer = f"{s.heads} d{s.head_dim} {s.dtypes} page {s.page_size}"
        layer += f" window {s.window}" if s.window else ""
        layer += " sinks" if s.sinks else ""
        return f"{layer} batch {self.batch_size} kv_len {self.kv_len}{tail}"

    @property
    def key(self) -> str:
        """A name without spaces for command lines, `32/8,d128,p16,b16,k8192`; stable.

        What is usual goes unsaid: no window (else `,w4096`), no sinks, dtype bfloat16, lengths
        fixed, seed 0.
        """
        s = self.spec
        key = f"{s.heads},d{s.head_dim},p{s.page_size},b{self.batch_size},k{self.kv_len}"
        key += f",w{s.window}" if s.window else ""
        key += ",sinks" if s.sinks else ""
        key += f",{s.dtypes}" if s.dtypes != "bfloat16" else ""
        key += f",{self.lengths}" if self.lengths != "fixed" else ""
        return key + (f",seed{self.seed}" if self.seed else "")
