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

from ...core.spec import LENGTHS, AttnSpec, require_lengths, require_word
from ..decode.case import DecodeCase
from ..form import NamedCase, later

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
    inner: ClassVar = ("cached", DecodeCase)
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
            known = ", ".join(masks)
            raise ValueError(f"mask must be one of {known} for {self.mode}, got {self.mask!r}")
        longest, q_len, page_size = self.cached.kv_len, self.q_len, self.spec.page_size
        if type(q_len) is not int or not 1 <= q_len <= longest:
            raise ValueError(f"q_len must be an integer in 1..{longest} (kv_len), got {q_len!r}")
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
                "q_lengths must be empty unless mode is prefill_paged and the lengths are said, "
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
