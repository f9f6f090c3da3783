"""FlashAttention-3's schedules of a step: one for each kind of layer, all in one buffer.

A model has layers of several kinds: full attention and windows, or MLA. Each kind's calls have
facts of their own, so each has its own words. One launch writes them all:
`metadata.schedules.build_step_schedules`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import ceil_div, require_type
from .facts import SchedulerFacts
from .flash_attn3 import SchedulerMetadata, unwritten
from .guard import remember
from .splits import BATCHES_PER_CTA, blocks_in_l2, num_words, scheduled_heads

SHARED = ("batch_size", "max_seqlen_q", "max_seqlen_k", "page_size", "num_sms", "build")
"""Facts that all calls of a step share: its lengths, its page table's width, its GPU."""
ALIGNED_WORDS = 32
"""Words of a kind begin at a multiple of 128 bytes."""


class KernelFacts(NamedTuple):
    """What the kernels read of one kind of layer.

    `split_cap` is the most splits of a request. A request has `query_tokens` tokens, unless its own
    are given, of `token_rows` rows in tiles of `block_m` rows; its KV lies in blocks of `block_n`
    tokens. Tiles are of `heads` heads and run on `sms` multiprocessors. `l2_blocks` blocks of a
    head fit the L2 cache, for `unpacked` query heads each.
    """

    split_cap: int
    query_tokens: int
    token_rows: int
    block_m: int
    block_n: int
    heads: int
    sms: int
    l2_blocks: int
    unpacked: int

    @classmethod
    def of(cls, facts: SchedulerFacts) -> "KernelFacts":
        """Those of a call."""
        block_m, block_n = facts.tile
        is_split = facts.batch_size <= BATCHES_PER_CTA
        return cls(
            split_cap=facts.split_cap if is_split else 1,
            query_tokens=facts.max_seqlen_q,
            token_rows=facts.group_size if facts.packs else 1,
            block_m=block_m,
            block_n=block_n,
            heads=scheduled_heads(facts),
            sms=facts.usable_sms,
            l2_blocks=blocks_in_l2(facts),
            unpacked=1 if facts.packs else facts.group_size,
        )


COLUMNS = len(KernelFacts._fields) + 3
"""Of the kernel's table: a kind's facts, whether it has an order and heads in L2, its first word.
"""


@dataclass(frozen=True, eq=False)
class StepSchedules:
    """The schedules of a step: one for each kind of its layers.

    Attributes
    ----------
    kinds : dict of str to SchedulerMetadata
        Name of a kind -> its schedule, which the attention calls of its layers take.
    words : Tensor
        [n] int32, where the words of all kinds lie.
    table : Tensor
        [kinds, 12] int32 on the same device, what the kernel reads of each kind, before the
        previous kernel has ended: none may write it.

    Examples
    --------
    gpt-oss-120b has full attention and windows of 128 tokens by turns. Both kinds of a decode step
    of 4 requests, in a context of 8,192 tokens, by SGLang's build:

    >>> from dataclasses import replace
    >>> import torch
    >>> from attnlib.core import SchedulerFacts
    >>> full = SchedulerFacts(4, 64, 8, 64, 1, 8192, 132, page_size=1, causal=True, build="sglang")
    >>> window = replace(full, window=(127, 0))
    >>> facts = {"full": full, "window": window}
    >>> schedules = StepSchedules.reserve(facts, torch.device("cpu"))
    >>> {name: len(kind.words) for name, kind in schedules.kinds.items()}
    {'full': 13, 'window': 13}
    >>> schedules["window"].facts.is_local
    True
    """

    kinds: dict[str, SchedulerMetadata]
    words: Tensor
    table: Tensor

    def __getitem__(self, kind: str) -> SchedulerMetadata:
        return self.kinds[kind]

    @property
    def facts(self) -> tuple[SchedulerFacts, ...]:
        """Of each kind, settled."""
        return tuple(kind.facts for kind in self.kinds.values())

    @classmethod
    def reserve(
        cls,
        facts: Mapping[str, SchedulerFacts],
        device: torch.device,
    ) -> "StepSchedules":
        """Memory for the schedules of a step, once; no attention call takes them before a launch.

        A guarded engine's attention calls are held to `facts` from now on (`attnlib.guard`).

        Parameters
        ----------
        facts : Mapping of str to SchedulerFacts
            Name of a kind of layer -> the facts of its attention calls. Their `num_splits` is what
            those calls pass: `caps.num_splits` has it for a cap by name.
        device : torch.device
            Where the words are.

        Returns
        -------
        StepSchedules
            Zeros.

        Raises
        ------
        ValueError, TypeError
            Naming the kind: as `precompute`, for vLLM's build, or for kinds of different steps.
        """
        _require_one_step(facts)
        *first_words, size = layout(facts.values())
        words = torch.zeros(size, dtype=torch.int32, device=device)
        kinds = {}
        rows = []
        for (name, each), first in zip(facts.items(), first_words, strict=True):
            # `.data` counts its writes alone: each kind must see those of its own words.
            part = words[first : first + num_words(each)].data
            kinds[name] = _reserve_kind(name, each, part)
            has_order = not each.is_local
            has_heads = each.is_causal or each.is_local
            rows.append([*KernelFacts.of(each), has_order, has_heads, first])
        table = torch.tensor(rows, dtype=torch.int32, device=words.device)
        for kind in kinds.values():
            remember(kind.words, kind.facts)
        return cls(kinds, words, table)


def layout(facts: Iterable[SchedulerFacts]) -> list[int]:
    """Where the words of each kind begin in the buffer of all, and last the words of all."""
    begins = [0]
    for each in facts:
        room = ceil_div(num_words(each), ALIGNED_WORDS) * ALIGNED_WORDS
        begins.append(begins[-1] + room)
    return begins


def _reserve_kind(name: str, facts: SchedulerFacts, words: Tensor) -> SchedulerMetadata:
    """`unwritten` in `words`, whose error names the kind."""
    try:
        return unwritten(facts, words)
    except ValueError as error:
        raise ValueError(f"facts of {name!r}: {error}") from None


def _require_one_step(facts: Mapping[str, SchedulerFacts]) -> None:
    """Raise unless there are facts, all of one step."""
    require_type("facts", facts, Mapping, such_as='{"full": SchedulerFacts(...)}')
    if not facts:
        raise ValueError("facts must name at least one kind of layer, got none")
    for name, each in facts.items():
        if not isinstance(each, SchedulerFacts):
            raise TypeError(f"facts of {name!r} must be SchedulerFacts, got {type(each).__name__}")
    first, *others = facts
    for name in others:
        for field in SHARED:
            value = getattr(facts[first], field)
            other = getattr(facts[name], field)
            if value != other:
                raise ValueError(
                    f"{field} must be the same for all kinds of layers of a step, got {value} of "
                    f"{first!r} and {other} of {name!r}"
                )
