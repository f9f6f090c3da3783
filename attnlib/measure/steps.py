"""The forward passes of a server's trace: where each begins and ends, and what it is.

| the trace has | a step is |
|---|---|
| marks of steps | what was launched under one mark of SGLang or vLLM |
| attention in CUDA graphs | one replay of a graph that holds attention |
| neither | attention calls up to a copy between host and GPU, which fewer than half follow |

What ran since the step before belongs to the step that follows: sampling and metadata stand there.
A step lasts from the end of the work before it to the end of its own: it is busy, idle before its
first attention kernel, or idle later. A mark tells its kind. In a trace without marks, attention in
a CUDA graph is of decode or verification, because engines run prefill eagerly, and the kernel is
asked otherwise; where other steps are marked, a step under no mark is unknown.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

from .spans import SIZE, Span, busy_us, find_gaps
from .trace_file import Trace

DECODE = "decode"
VERIFY = "verify"
PREFILL = "prefill"
MIXED = "mixed"
UNKNOWN = "unknown"
EITHER = "decode or verify"
"""What no mark tells apart: a query per request, or a few."""
SGLANG = re.compile(rf"step\[\s*(\w+)(?:.*?bs={SIZE})?")
VLLM = re.compile(rf"execute_(?:\d+_)?context_{SIZE}\(.*?\)_generation_{SIZE}(?:\((?:sq)?{SIZE})?")
SGLANG_KINDS = {
    "DECODE": DECODE,
    "DRAFT": DECODE,
    "DRAFT_LOOP": DECODE,
    "TARGET_VERIFY": VERIFY,
    "VERIFY": VERIFY,
    "EXTEND": PREFILL,
    "SPLIT_PREFILL": PREFILL,
    "MIXED": MIXED,
}
"""VERIFY and DRAFT are its words from 0.5.20 on, DRAFT of prompts too, whose tokens are then told;
any other word of a mark is its own kind."""
HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")


@dataclass(frozen=True)
class Step:
    """One forward pass: `ahead` ran since the step before and before its first attention kernel.

    `body` begins with that kernel; `attention` are those of `body` that are attention. `waits` are
    the host's from the launch of the first of `ahead` to that of the attention. `batch_size` is 0
    where no mark tells it; `marked` are those of `ahead` that were launched under the step's mark.
    `begin_us` is the end of the work before it. The step that a trace `begins` with may lack a part
    of `ahead`, and pays what is done once; one that is `at_end`, the first or last, may be cut.
    """

    kind: str
    batch_size: int
    ahead: Sequence[Span]
    body: Sequence[Span]
    attention: Sequence[Span]
    waits: Sequence[Span]
    marked: Sequence[Span]
    begin_us: float = 0.0
    begins: bool = False
    at_end: bool = False

    @cached_property
    def work(self) -> list[Span]:
        """All that the GPU ran."""
        return [*self.ahead, *self.body]

    @cached_property
    def length_us(self) -> float:
        """From the end of the work before it to the end of its own: its busy and idle times."""
        return max(span.end_us for span in self.work) - self.begin_us

    @cached_property
    def busy_us(self) -> float:
        """How long the GPU runs its work."""
        return busy_us(self.work)

    @cached_property
    def idle_ahead_us(self) -> float:
        """How long the GPU does not, before the first attention kernel."""
        gaps = find_gaps([*self.ahead, self.body[0]])
        return self.work[0].start_us - self.begin_us + sum(gap.length_us for gap in gaps)

    @property
    def in_graph(self) -> bool:
        """Whether its attention was replayed from a CUDA graph."""
        return self.attention[0].in_graph


def find_steps(trace: Trace, kind_of: Callable[[Span], str]) -> list[Step]:
    """The steps of a trace by the rules above, in order; none if no kernel is attention.

    `kind_of` tells of an attention kernel what step it speaks for, and is empty for others.
    """
    work = trace.work
    places = [place for place, span in enumerate(work) if kind_of(span)]
    copies = list(accumulate(span.name in HOST_COPIES for span in work))
    usual = 2 * sum(copies[a] != copies[b] for a, b in pairwise(places)) >= len(places) - 1
    keys = [
        _key(trace, span, 0 if usual else copied) for span, copied in zip(work, copies, strict=True)
    ]
    marked = any(key[0] == "mark" for key in keys)
    runs = dict[Any, list[int]]()
    for number, (key, several) in enumerate(groupby(places, keys.__getitem__)):
        # Steps on two streams overlap; without mark and graph a step ends where another begins.
        runs.setdefault((*key, number) if key[0] == "eager" else key, []).extend(several)
    steps = []
    begin = 0
    attended = {*places}
    ends = [*accumulate((span.end_us for span in work), max)]
    nexts = [*(run[0] for run in runs.values()), len(work)][1:]
    for run, after in zip(runs.values(), nexts, strict=True):
        key = keys[run[0]]
        first = run[0]
        end = 1 + max(at for at in range(run[-1], max(after, run[-1] + 1)) if keys[at] == key)
        kind = UNKNOWN if marked else ""
        batch = 0
        if key[0] == "mark":
            kind, batch = _kind_and_size(trace.marks[key[1]].name)
        kind = kind or (EITHER if work[first].in_graph else kind_of(work[first]))
        # What ran under another mark belongs to no other step, whether its attention is known; nor
        # does another step's attention, nor what the step before has.
        near = (at for at in range(min(begin, first), end) if keys[at] != key)
        others = {at for at in near if keys[at][0] == "mark" or at in attended or at < begin}
        mine = [at for at in range(begin, first) if keys[at] == key and key[0] == "mark"]
        begin = min([*mine, 1 + max((at for at in others if at < first), default=begin - 1)])
        own = [at for at in range(min(begin, first), end) if at not in others]
        ahead = [work[at] for at in own if at < first]
        body = [work[at] for at in own if at >= first]
        since = min(work[own[0]].start_us, ends[own[0] - 1] if own[0] else math.inf)
        waits = _waits(trace, [*ahead, work[first]])
        attention, under = ([work[at] for at in places] for places in (run, mine))
        parts = ahead, body, attention, waits, under
        at_end = own[0] == 0 or own[-1] == len(work) - 1
        steps.append(Step(kind, batch, *parts, since, own[0] == 0, at_end))
        begin = max(begin, end)
    return steps


def _key(trace: Trace, span: Span, copied: int) -> tuple[str, int]:
    """What the work of one step shares: its mark, its graph launch, or the copies before it."""
    at = trace.launched_us.get(span.launch, -math.inf)
    mark = bisect_right(trace.marks, at, key=lambda mark: mark.start_us) - 1
    if mark >= 0 and at <= trace.marks[mark].end_us:
        return "mark", mark
    return ("graph", span.launch) if span.in_graph and span.launch >= 0 else ("eager", copied)


def _kind_and_size(mark: str) -> tuple[str, int]:
    """Kind and batch size that a mark tells; nothing and 0 if it tells none."""
    if match := SGLANG.match(mark):
        word = "EXTEND" if match[1] == "DRAFT" and " toks=" in mark else match[1]
        return SGLANG_KINDS.get(word, word.lower()), int(match[2] or 0)
    if match := VLLM.match(mark):
        context = int(match[1])
        generation = int(match[2])
        several = int(match[3] or 0) > generation
        one_kind = PREFILL if context else VERIFY if several else DECODE
        kind = MIXED if context and generation else one_kind
        return kind, context + generation
    return "", 0


def _waits(trace: Trace, work: Sequence[Span]) -> Sequence[Span]:
    """What the host waited for between launching the first and the last of these."""
    known = [trace.launched_us[span.launch] for span in work if span.launch in trace.launched_us]
    ends = (min(known), max(known)) if known else (0.0, 0.0)
    low, high = (bisect_right(trace.waits, at, key=lambda wait: wait.start_us) for at in ends)
    return trace.waits[low:high]
