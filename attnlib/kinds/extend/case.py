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

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.spec import CUSTOM_MASKS, LENGTHS, AttnSpec, require_int, require_lengths, require_word
from ..cost import INT32_BYTES, CallCost, attention_cost
from ..decode.case import DecodeCase
from ..form import NamedCase, later
from ..lengths import explicit_lengths, sample_seq_lens

MODES = {
    "prefill_paged": ("causal",),
    "target_verify": ("tree", "chain", "causal"),
    "draft_extend": ("causal",),
    "dllm_extend": ("full",),
    "prefill_ragged": ("causal",),
}
"""Mode -> its masks, the usual one first."""


@dataclass(frozen=True)
class ExtendCase(NamedCase):
    """A seeded call of `mode` with up to `q_len` query tokens per request.

    A `prefill_paged` may say them all, `q_lengths="30+8"`, where `cached` says its lengths.

    `cached` says the rest as of a decode step: spec, batch, and the tokens a request has after the
    call, at least as many as it has queries. An empty `mask` becomes the mode's usual one.
    """

    kind: ClassVar = "extend"
    cached: DecodeCase
    mode: str
    q_len: int
    mask: str = ""
    q_lengths: str = later("")

    def __post_init__(self) -> None:
        self.spec.require_no_window("several queries per request")
        require_word("mode", self.mode, MODES)
        masks = MODES[self.mode]
        object.__setattr__(self, "mask", self.mask or masks[0])
        if self.mask not in masks:
            allowed = ", ".join(masks)
            raise ValueError(f"mask must be one of {allowed} for {self.mode}, got {self.mask!r}")
        longest, q_len, page_size = self.cached.kv_len, self.q_len, self.spec.page_size
        require_int("q_len", q_len, most=longest)
        if self.ragged and (q_len, page_size) != (longest, 1):
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
        require_lengths("q_lengths", self.q_lengths, self.cached.batch_size, self.q_len)
        pairs = zip(self.q_lengths.split("+"), self.cached.lengths.split("+"), strict=True)
        if any(int(queries) > int(tokens) for queries, tokens in pairs):
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
        spec, custom_bytes = self.spec, 0
        q_lens, kv_lens = (lens.astype(np.int64) for lens in sample_extend_lens(self))
        pairs = int((q_lens * kv_lens).sum())
        if self.mask in CUSTOM_MASKS:
            custom_bytes = int((-(-q_lens * kv_lens // 8)).sum())
            pairs -= int((~sample_drafts(self)).sum())
        elif self.mask == "causal":
            pairs -= int((q_lens * (q_lens - 1) // 2).sum())
        pages = 0 if self.ragged else int((-(-kv_lens // spec.page_size)).sum())
        tokens = int(kv_lens.sum())
        return attention_cost(
            spec,
            held=tokens,
            read=tokens,
            queries=int(q_lens.sum()),
            pairs=pairs,
            index_bytes=INT32_BYTES * pages + custom_bytes,
        )

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        return f"{self.mode} q_len {self.q_len}{self._unusual(' ')} {self.cached.label}"

    @property
    def key(self) -> str:
        """A name without spaces for command lines."""
        return f"{self.mode},q{self.q_len}{self._unusual(',')},{self.cached.key}"

    def _unusual(self, before: str) -> str:
        mask = "" if self.mask == MODES[self.mode][0] else before + self.mask
        return mask + (before + self.q_lengths if self.q_lengths else "")


def sample_extend_lens(case: ExtendCase) -> tuple[np.ndarray, np.ndarray]:
    """Queries and tokens of each request, both [bs] int32, tokens at least as many as queries.

    The first request has `q_len` queries, unless `q_lengths` says them all.
    """
    kv_lens = sample_seq_lens(case.cached)
    if case.ragged:
        return kv_lens, kv_lens
    if case.q_lengths:
        return explicit_lengths(case.q_lengths), kv_lens
    q_lens = np.full(len(kv_lens), case.q_len, dtype=np.int32)
    if case.mode == "draft_extend":
        rng = np.random.default_rng(case.cached.seed + 2)
        q_lens[1:] = rng.integers(1, case.q_len + 1, len(kv_lens) - 1)
    return q_lens, np.maximum(kv_lens, q_lens)


def sample_drafts(case: ExtendCase) -> np.ndarray:
    """Which drafts each draft sees [bs, q_len, q_len] bool: itself and its ancestors.

    In a chain a draft's parent is the one before it, in a tree any one before it.
    """
    rng = np.random.default_rng(case.cached.seed + 3)
    batch, q_len = case.cached.batch_size, case.q_len
    sees = np.zeros((batch, q_len, q_len), dtype=bool)
    for draft in range(q_len):
        if draft:
            parents = rng.integers(draft - 1 if case.mask == "chain" else 0, draft, batch)
            sees[:, draft] = sees[np.arange(batch), parents]
        sees[:, draft, draft] = True
    return sees
