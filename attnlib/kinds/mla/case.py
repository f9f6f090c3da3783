"""One call of multi-head latent attention, dense or over chosen tokens, as a case. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from ...core.spec import LENGTHS, MlaSpec, require_int, require_word
from ..form import NamedCase


@dataclass(frozen=True)
class MlaCase(NamedCase):
    """A seeded MLA decode step: requests of up to `kv_len` tokens, `lengths` as in `DecodeCase`."""

    kind: ClassVar = "mla"
    inner: ClassVar = ("spec", MlaSpec)
    spec: MlaSpec
    batch_size: int
    kv_len: int
    lengths: str = "fixed"
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size)
        require_int("kv_len", self.kv_len)
        require_word("lengths", self.lengths, LENGTHS)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        s = self.spec
        chosen = f"top {s.top_k}" if s.top_k else "dense"
        tail = "" if self.lengths == "fixed" else f" {self.lengths}"
        tail += f" seed {self.seed}" if self.seed else ""
        layer = f"mla {s.num_qo_heads} heads {chosen} {s.kv_format} page {s.page_size}"
        return f"{layer} batch {self.batch_size} kv_len {self.kv_len}{tail}"
