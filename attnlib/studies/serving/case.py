"""A load on a server, as a case. No torch here.

| field | means |
|---|---|
| `batch_size` | clients, each of which sends a request as soon as its last one has ended |
| `lengths` | tokens of the prompt of each client |
| `output_len`, `turns` | tokens that a request makes, and requests of a client |
| `prompts` | `cached`: in the server's prefix cache before the load begins; `new`: never seen |
| `load` | 0: the clients wait for their answers (closed loop); 60: requests arrive at random at |
| | 60 % of the rate that the base's closed loop has served, whoever is still waiting |
| `late_s` | seconds after which the first client begins: it has the longest prompt |

With several `turns` of cached prompts the tokens of a request are drawn within a quarter of
`output_len`, so that requests do not all end together. Else a request makes exactly `output_len`:
several turns of new prompts are one batch after the other, as a benchmark of batches sends them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from ...core.call_text import CallText, Lens
from ...core.spec import require_int, require_word
from ...measure.calls.form import NamedCase
from ...measure.calls.lengths import sample_seq_lens

CACHED = "cached"
NEW = "new"
WORDS = 30_000
"""Tokens are drawn below this; every model of an engine knows as many."""
FIRST_WORD = 100
"""Smaller tokens may be special ones."""


class Request(NamedTuple):
    """A request of a client: its tokens, and how many it is to make."""

    client: int
    turn: int
    prompt: int
    output: int


@dataclass(frozen=True)
class ServingCase(NamedCase):
    """What a server is asked for; the module's table has the fields."""

    kind: ClassVar = "serving"
    words: ClassVar = (
        "mode",
        "model",
        "tp",
        "lens",
        "seed",
        "context",
    )
    own_words: ClassVar = (
        "output_len",
        "turns",
        "prompts",
        "load",
        "late_s",
    )
    keeps_samples: ClassVar = True
    model: str
    batch_size: int
    kv_len: int
    lengths: str
    output_len: int
    turns: int = 3
    prompts: str = CACHED
    load: int = 0
    late_s: int = 0
    tp: int = 1
    seed: int = 0
    context: int = 0

    def __post_init__(self) -> None:
        require_int("output_len", self.output_len)
        require_int("turns", self.turns)
        require_int("load", self.load, least=0, most=1000)
        require_int("late_s", self.late_s, least=0)
        require_word("prompts", self.prompts, (CACHED, NEW))

    @property
    def said(self) -> CallText:
        """What its text says."""
        own: list[tuple[str, int | str]] = [
            ("output_len", self.output_len),
            ("turns", self.turns),
        ]
        if self.prompts != CACHED:
            own.append(("prompts", self.prompts))
        if self.load:
            own.append(("load", self.load))
        if self.late_s:
            own.append(("late_s", self.late_s))
        return CallText(
            mode=self.kind,
            own=tuple(own),
            model=self.model,
            tp=self.tp if self.tp > 1 else None,
            lens=Lens(self.batch_size, self.kv_len, self.lengths),
            seed=self.seed or None,
            context=self.context or None,
        )

    @classmethod
    def from_said(cls, said: CallText) -> Self:
        """Inverse of `said`."""
        given = said.given
        return cls(
            model=said.required("model"),
            **said.required("lens").fields,
            output_len=said.required("output_len"),
            turns=said.required("turns"),
            prompts=given.get("prompts", CACHED),
            load=given.get("load", 0),
            late_s=given.get("late_s", 0),
            tp=said.tp or 1,
            seed=said.seed or 0,
            context=said.context or 0,
        )

    @property
    def is_open(self) -> bool:
        """Whether requests arrive whoever is still waiting."""
        return self.load > 0

    def requests(self) -> Iterator[Request]:
        """Every request, client by client in each turn; the same on every machine."""
        prompts = sample_seq_lens(self).tolist()
        rng = np.random.default_rng(self.seed)
        is_drawn = self.turns > 1 and self.prompts == CACHED
        quarter = self.output_len // 4 if is_drawn else 0
        for turn in range(self.turns):
            outputs = rng.integers(
                low=self.output_len - quarter,
                high=self.output_len + quarter,
                size=self.batch_size,
                endpoint=True,
            )
            for client, prompt in enumerate(prompts):
                yield Request(client, turn, prompt, int(outputs[client]))

    def tokens_of(self, request: Request) -> list[int]:
        """The prompt of a request: a client's own, or one for each turn where prompts are new."""
        turn = request.turn if self.prompts == NEW else 0
        seeds = (self.seed, request.client, turn, request.prompt)
        rng = np.random.default_rng(seeds)
        words = rng.integers(FIRST_WORD, WORDS, request.prompt)
        return words.tolist()

    def arrivals_s(self, rate: float) -> list[float]:
        """Seconds until each request arrives, at `rate` requests a second (Poisson)."""
        rng = np.random.default_rng((self.seed, 1))
        gaps = rng.exponential(1 / rate, self.batch_size * self.turns)
        return np.cumsum(gaps).tolist()
