"""Attention calls with several query tokens per request: named, seeded cases, mode by mode.

| mode | queries of a request | mask, the usual one first |
|---|---|---|
| `prefill_paged` | its last `q_len` tokens | causal |
| `target_verify` | its last `q_len`, drafts | tree, chain, causal |
| `draft_extend` | its last 1..`q_len`, ragged: what was accepted | causal |
| `dllm_extend` | its last `q_len`, a block | full |
| `prefill_ragged` | all its tokens; K and V are those of the call, contiguous | causal |

Masks align the last query with the last token. A tree shows a draft the tokens before the drafts,
itself and its ancestors. `tree` and `chain` go to the library as a custom mask, bit by bit; a
chain's bits are those of the causal mask. The modes are those of SGLang's FlashInfer backend (pull
request 18364), which passes a custom mask wherever it verifies drafts. No torch here.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from ....core.call_text import CallText, Lens
from ....core.spec import (
    CUSTOM_MASKS,
    EXTEND_MODES,
    LENGTHS,
    AttnSpec,
    require_int,
    require_lengths,
    require_word,
)
from ..cost import INT32_BYTES, CallCost, attention_cost
from ..decode.case import DecodeCase
from ..form import NamedCase, later
from ..lengths import explicit_lengths, sample_seq_lens


@dataclass(frozen=True)
class ExtendCase(NamedCase):
    """A seeded call of `mode` with up to `q_len` query tokens per request.

    A `prefill_paged` may say them all, `q_lengths="30+8"`, where `cached` says its lengths.

    `cached` says the rest as of a decode step: spec, batch, and the tokens a request has after the
    call, at least as many as it has queries. An empty `mask` becomes the mode's usual one.
    """

    kind: ClassVar = "extend"
    words: ClassVar = (*DecodeCase.words, "q_len", "q_lens", "mask")
    cached: DecodeCase
    mode: str
    q_len: int
    mask: str = ""
    q_lengths: str = later("")

    def __post_init__(self) -> None:
        self.spec.require_no_window("several queries per request")
        require_word("mode", self.mode, EXTEND_MODES)
        masks = EXTEND_MODES[self.mode]
        object.__setattr__(self, "mask", self.mask or masks[0])
        if self.mask not in masks:
            allowed = ", ".join(masks)
            raise ValueError(f"mask must be one of {allowed} for {self.mode}, got {self.mask!r}")
        q_len = self.q_len
        longest = self.cached.kv_len
        page_size = self.spec.page_size
        require_int("q_len", q_len, most=longest)
        is_whole = q_len == longest and page_size == 1
        if self.ragged and not is_whole:
            raise ValueError(
                f"q_len must be kv_len ({longest}) and page_size 1 for {self.mode}, "
                f"got {q_len} and {page_size}"
            )
        if self.q_lengths:
            self._require_queries()

    def _require_queries(self) -> None:
        if self.mode != "prefill_paged" or self.cached.lengths in LENGTHS:
            raise ValueError(
                "q_lengths must be empty unless mode is prefill_paged and lengths are explicit, "
                f"got {self.q_lengths!r} for {self.mode} and {self.cached.lengths}"
            )
        require_lengths(
            "q_lengths",
            self.q_lengths,
            self.cached.batch_size,
            self.q_len,
        )
        queries = explicit_lengths(self.q_lengths)
        tokens = explicit_lengths(self.cached.lengths)
        if (queries > tokens).any():
            raise ValueError(
                f"q_lengths must be at most the lengths {self.cached.lengths}, "
                f"got {self.q_lengths!r}"
            )

    @property
    def spec(self) -> AttnSpec:
        """The attention layer."""
        return self.cached.spec

    @property
    def ragged(self) -> bool:
        """Whether K and V are those of the call, contiguous, not a paged cache."""
        return self.mode == "prefill_ragged"

    @property
    def cost(self) -> CallCost:
        """Bytes and useful FLOPs: those of the (query, token) pairs that the mask lets through.

        A custom mask is read once, a bit a pair. A ragged call reads no page table.
        """
        lens = sample_extend_lens(self)
        q_lens = lens[0].astype(np.int64)
        kv_lens = lens[1].astype(np.int64)
        of_request = q_lens * kv_lens
        pairs = int(of_request.sum())
        custom_bytes = 0
        if self.mask in CUSTOM_MASKS:
            packed = -(-of_request // 8)
            custom_bytes = int(packed.sum())
            hidden = ~sample_drafts(self)
            pairs -= int(hidden.sum())
        elif self.mask == "causal":
            hidden = q_lens * (q_lens - 1) // 2
            pairs -= int(hidden.sum())
        pages = 0
        if not self.ragged:
            of_request = -(-kv_lens // self.spec.page_size)
            pages = int(of_request.sum())
        tokens = int(kv_lens.sum())
        return attention_cost(
            self.spec,
            held=tokens,
            read=tokens,
            queries=int(q_lens.sum()),
            pairs=pairs,
            index_bytes=INT32_BYTES * pages + custom_bytes,
        )

    @property
    def said(self) -> CallText:
        """What its text says: `q_lens` in place of `q_len` where it says all of them."""
        is_usual = self.mask == EXTEND_MODES[self.mode][0]
        said = replace(
            self.cached.said,
            mode=self.mode,
            mask=None if is_usual else self.mask,
        )
        if not self.q_lengths:
            return replace(said, q_len=self.q_len)
        return replace(
            said,
            q_lens=_lens_of(self.q_lengths),
            lens=_lens_of(self.cached.lengths),
        )

    @classmethod
    def from_said(cls, said: CallText) -> Self:
        """Inverse of `said`; with `q_lens` the record lists the tokens one by one too."""
        mask = said.mask or ""
        mode = said.required("mode")
        if not said.q_lens:
            return cls(DecodeCase.from_said(said), mode, said.required("q_len"), mask)
        if said.q_len is not None:
            raise ValueError(f"q_len must be left out with q_lens, got {said.q_len}")
        lens = Lens.listed(said.required("lens").tokens)
        q_lens = Lens.listed(said.q_lens.tokens)
        cached = DecodeCase.from_said(replace(said, lens=lens))
        return cls(cached, mode, q_lens.kv_len, mask, q_lens.lengths)


def _lens_of(lengths: str) -> Lens:
    return Lens.of(explicit_lengths(lengths).tolist())


def sample_extend_lens(case: ExtendCase) -> tuple[np.ndarray, np.ndarray]:
    """Queries and tokens of each request, both [bs] int32, tokens at least as many as queries.

    The first request has `q_len` queries, unless `q_lengths` says them all.
    """
    kv_lens = sample_seq_lens(case.cached)
    if case.ragged:
        return kv_lens, kv_lens
    if case.q_lengths:
        return explicit_lengths(case.q_lengths), kv_lens
    q_lens = np.full(
        len(kv_lens),
        case.q_len,
        dtype=np.int32,
    )
    if case.mode == "draft_extend":
        rng = np.random.default_rng(case.cached.seed + 2)
        others = len(kv_lens) - 1
        q_lens[1:] = rng.integers(
            1,
            case.q_len,
            size=others,
            endpoint=True,
        )
    return q_lens, np.maximum(kv_lens, q_lens)


def sample_drafts(case: ExtendCase) -> np.ndarray:
    """Which drafts each draft sees [bs, q_len, q_len] bool: itself and its ancestors.

    In a chain a draft's parent is the one before it, in a tree any one before it.
    """
    rng = np.random.default_rng(case.cached.seed + 3)
    batch = case.cached.batch_size
    requests = np.arange(batch)
    sees = np.zeros(
        (batch, case.q_len, case.q_len),
        dtype=bool,
    )
    for draft in range(case.q_len):
        if draft:
            first = draft - 1 if case.mask == "chain" else 0
            parents = rng.integers(first, draft, size=batch)
            sees[:, draft] = sees[requests, parents]
        sees[:, draft, draft] = True
    return sees
