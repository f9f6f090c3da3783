"""The metadata of one step, before its first layer, as a case. No torch here."""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ...core.call_text import CallText, Lens
from ...core.gpu import FETCH_BYTES
from ...core.spec import LENGTHS, require_int, require_lengths, require_page_size, require_word
from ...measure.calls.cost import INT32_BYTES, INT64_BYTES
from ...measure.calls.form import NamedCase, later
from ...measure.calls.lengths import sample_seq_lens
from . import builders

POOL_SIZE = 1024
YES = "yes"
ONCE = "once"
EACH = "each"
DECODE_MODELS = ("gpt-oss-120b", "deepseek-v3")
VERIFY_MODELS = ("llama-3.1-8b-verify",)
"""Models whose schedules are built, `once` a step or in `each` layer (`schedules`)."""


def ways(models: tuple[str, ...]) -> tuple[str, ...]:
    """Backends that build the schedules of these models."""
    return tuple(f"{way}-{model}" for model in models for way in (ONCE, EACH))


@dataclass(frozen=True)
class MetadataCase(NamedCase):
    """The metadata of one step: which arrays (`builder`), for how many requests, how long.

    Requests have `lengths` as in `DecodeCase`, up to `max_ctx` tokens. Their pool of request rows
    has `pool_size` rows, or as many as there are requests if that is more. `context` is the longest
    request that the engine was started for: rows and page table are as wide; 0: as `max_ctx`. `swa`
    adds the sliding window's table.
    """

    kind: ClassVar = "metadata"
    words: ClassVar = (
        "mode",
        "page",
        "lens",
        "seed",
        "context",
    )
    own_words: ClassVar = ("builder", "seq_len_delta", "swa", "pool_size")
    builder: str
    batch_size: int
    page_size: int
    max_ctx: int
    lengths: str = "ragged"
    seq_len_delta: int = 0
    swa: bool = False
    pool_size: int = POOL_SIZE
    seed: int = 0
    context: int = later(0)

    def __post_init__(self) -> None:
        require_word("builder", self.builder, builders.NAMES)
        require_lengths(
            "lengths",
            self.lengths,
            self.batch_size,
            self.max_ctx,
            LENGTHS,
        )
        for name in ("batch_size", "max_ctx", "pool_size"):
            require_int(name, getattr(self, name))
        require_int("context", self.width, least=self.max_ctx)
        require_page_size(self.page_size)

    @property
    def kv_len(self) -> int:
        """Tokens of the longest request."""
        return self.max_ctx

    @property
    def fetched_bytes(self) -> int:
        """The least bytes that memory moves: words fetched and stored, lengths read and written.

        A page's word lies page_size words after its neighbour's, so from 16 on each costs a memory
        fetch. A window's table counts as stored; the map of its slots, as it is read, does not.
        """
        seq_lens = sample_seq_lens(self).astype(np.int64)
        pages = -(-seq_lens // self.page_size)
        span = (pages - 1) * self.page_size * INT32_BYTES + INT32_BYTES
        of_span = -(-span // FETCH_BYTES)
        fetches = int(np.minimum(of_span, pages).sum())
        tables = 2 if self.swa else 1
        stored = INT32_BYTES * int(pages.sum()) * tables
        read = 2 * INT64_BYTES  # length and row
        written = 2 * INT32_BYTES  # length and sum
        lengths = self.batch_size * (read + written)
        return fetches * FETCH_BYTES + stored + lengths

    @property
    def width(self) -> int:
        """Tokens of a row of the request pool."""
        return self.context or self.max_ctx

    @property
    def max_pages(self) -> int:
        """Columns of the page table."""
        return -(-self.width // self.page_size)

    @property
    def said(self) -> CallText:
        """What its text says."""
        own: list[tuple[str, int | str]] = [("builder", self.builder)]
        if self.seq_len_delta:
            own.append(("seq_len_delta", self.seq_len_delta))
        if self.swa:
            own.append(("swa", YES))
        if self.pool_size != POOL_SIZE:
            own.append(("pool_size", self.pool_size))
        return CallText(
            mode=self.kind,
            own=tuple(own),
            page=self.page_size,
            lens=Lens(self.batch_size, self.max_ctx, self.lengths),
            seed=self.seed or None,
            context=self.context or None,
        )

    @classmethod
    def from_said(cls, said: CallText) -> Self:
        """Inverse of `said`."""
        lens = said.required("lens")
        swa = said.given.get("swa")
        if swa not in (None, YES):
            raise ValueError(f"swa must be {YES} or left out, got {swa!r}")
        return cls(
            builder=said.required("builder"),
            batch_size=lens.batch_size,
            page_size=said.required("page"),
            max_ctx=lens.kv_len,
            lengths=lens.lengths,
            seq_len_delta=said.given.get("seq_len_delta", 0),
            swa=swa == YES,
            pool_size=said.given.get("pool_size", POOL_SIZE),
            seed=said.seed or 0,
            context=said.context or 0,
        )
