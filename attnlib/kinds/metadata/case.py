"""The metadata of one step, before its first layer, as a case. No torch here."""

from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

from ...core.spec import LENGTHS, require_int, require_lengths, require_page_size, require_word
from ..form import NamedCase

BUILDERS = ("decode", "kv_indices")


@dataclass(frozen=True)
class MetadataCase(NamedCase):
    """The metadata of one step: which arrays (`builder`), for how many requests, how long.

    Requests have `lengths` as in `DecodeCase`, up to `max_ctx` tokens. Their pool of request rows
    has `pool_size` rows, or as many as there are requests if that is more; `max_pages` is the
    table's whole width, as under CUDA graphs. `swa` adds the sliding window's table. `topk` and
    `draft_tokens` are in the records' form, and no builder of today reads them.
    """

    kind: ClassVar = "metadata"
    builder: str
    batch_size: int
    page_size: int
    max_ctx: int
    lengths: str = "ragged"
    seq_len_delta: int = 0
    swa: bool = False
    pool_size: int = 1024
    topk: int = 1
    draft_tokens: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        require_word("builder", self.builder, BUILDERS)
        require_lengths("lengths", self.lengths, self.batch_size, self.max_ctx, LENGTHS)
        for name in ("batch_size", "max_ctx", "pool_size", "topk", "draft_tokens"):
            require_int(name, getattr(self, name))
        require_page_size(self.page_size)

    @property
    def max_pages(self) -> int:
        """Columns of the page table."""
        return -(-self.max_ctx // self.page_size)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        values = [(f, getattr(self, f.name)) for f in fields(self)]
        odd = [f" {f.name} {value}" for f, value in values if f.default not in (MISSING, value)]
        head = f"{self.builder} batch {self.batch_size} page {self.page_size} ctx {self.max_ctx}"
        return head + "".join(odd)
