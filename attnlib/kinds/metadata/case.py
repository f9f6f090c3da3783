"""The metadata of one step, before its first layer, as a case. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ...core.spec import LENGTHS
from ..form import _from_fields

BUILDERS = ("decode", "kv_indices", "draft", "verify")


@dataclass(frozen=True)
class MetadataCase:
    """The metadata of one step: which arrays (`builder`), for how many requests, how long.

    Requests have `lengths` as in `DecodeCase`, up to `max_ctx` tokens. Their pool of request rows
    has `pool_size` rows, or as many as there are requests if that is more; `max_pages` is the
    table's whole width, as under CUDA graphs. `swa` adds the sliding window's table. For drafts,
    `topk` branches of `draft_tokens` each.
    """

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
        for name, valid in (("builder", BUILDERS), ("lengths", LENGTHS)):
            if getattr(self, name) not in valid:
                raise ValueError(
                    f"{name} must be one of {', '.join(valid)}, got {getattr(self, name)!r}"
                )
        for name in ("batch_size", "page_size", "max_ctx", "pool_size", "topk", "draft_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {getattr(self, name)!r}")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")

    @property
    def max_pages(self) -> int:
        """Columns of the page table."""
        return -(-self.max_ctx // self.page_size)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        usual = MetadataCase(self.builder, self.batch_size, self.page_size, self.max_ctx)
        said = ("builder", "batch_size", "page_size", "max_ctx")
        rest = [
            f" {f.name} {getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in said and getattr(self, f.name) != getattr(usual, f.name)
        ]
        head = f"{self.builder} batch {self.batch_size} page {self.page_size} ctx {self.max_ctx}"
        return head + "".join(rest)

    @property
    def key(self) -> str:
        """`label` without spaces, for command lines."""
        return self.label.replace(" ", ",")

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case with its kind."""
        return {"kind": "metadata", **asdict(self)}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> MetadataCase:
        """Inverse of `to_dict`, less the kind."""
        return _from_fields(cls, form)
