"""The forward passes of a server's trace: where each begins and ends, and what it is.

| the trace has | a step is |
|---|---|
| marks of steps | what was launched under one mark of SGLang or vLLM |
| attention in CUDA graphs | one replay of a graph that holds attention |
| neither | attention calls up to a copy between host and GPU, which fewer than half follow |

What ran since the step before belongs to the step that follows: sampling and metadata stand there.
A mark tells decode from prefill. Without one, attention in a CUDA graph is decode, because engines
capture it and run prefill eagerly, and `guess` is asked for the others.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .spans import Span, busy_us
from .trace_file import Trace

DECODE, VERIFY, PREFILL, MIXED, UNKNOWN = "decode", "verify", "prefill", "mixed", "unknown"
SGLANG = re.compile(r"step\[\s*(\w+).*?bs=(\d+)")
VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)\(.*?\)_generation_(\d+)")
SGLANG_KINDS = {"DECODE": DECODE, "TARGET_VERIFY": VERIFY, "EXTEND": PREFILL, "MIXED": MIXED}
HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")


@dataclass(frozen=True)
class Step:
    """One forward pass: `ahead` ran since the step before and before its first attention kernel.

    `body` begins with that kernel; `attention` are those of `body` that are attention. `waits` are
    the host's from the launch of the first of `ahead` to that of the attention. `batch_size` is 0
    where no mark tells it; `marked` are those of `ahead` that were launched under the step's mark.
    """

    kind: str
    batch_size: int
    ahead: tuple[Span, ...]
    body: tuple[Span, ...]
    attention: tuple[Span, ...]
    waits: tuple[Span, ...]
    marked: tuple[Span, ...] = ()

    @property
    def work(self) -> tuple[Span, ...]:
        """All that the GPU ran."""
        return self.ahead + self.body

    @property
    def in_graph(self) -> bool:
        """Whether its attention was replayed from a CUDA graph."""
        return self.attention[0].in_graph

    @property
    def busy_us(self) -> float:
        """Time in which the GPU ran anything."""
        return busy_us(self.work)

    @property
    def idle_ahead_us(self) -> float:
        """Time before the first attention kernel in which the GPU ran nothing."""
        start = min((span.start_us for span in self.ahead), default=self.body[0].start_us)
        return max(0.0, self.body[0].start_us - start - busy_us(self.ahead))


def find_steps(
    trace: Trace, is_attention: Callable[[Span], bool], guess: Callable[[Sequence[Span]], str]
) -> tuple[Step, ...]:
    """The steps of a trace by the rules above, in order; none if no kernel is attention."""
    work = trace.work
    marks = [_mark(trace, span) for span in work]
    places = [place for place, span in enumerate(work) if is_attention(span)]
    between = list(zip(places, places[1:], strict=False))
    copied = [_copies(work[a:b]) for a, b in between]
    usual = 2 * sum(map(bool, copied)) >= len(copied)

    def parted(a: int, b: int, copies: list[int]) -> bool:
        if marks[a] >= 0 or marks[b] >= 0:
            return marks[a] != marks[b]
        if work[a].in_graph or work[b].in_graph:
            return work[a].launch != work[b].launch
        return bool(copies) and not usual

    steps, first, begin = [], 0, 0
    ends = [
        at for at, (pair, c) in enumerate(zip(between, copied, strict=True)) if parted(*pair, c)
    ]
    for last in (*ends, len(places) - 1) if places else ():
        a, b = places[first], places[last]
        after = places[last + 1] if last + 1 < len(places) else len(work)
        end = _end(work, marks, b, after)
        kind, batch = _kind(trace.marks[marks[a]].name if marks[a] >= 0 else "")
        attention = tuple(work[place] for place in places[first : last + 1])
        kind = kind or (DECODE if work[a].in_graph else guess(attention))
        ahead, body = work[begin:a], work[a:end]
        own = tuple(s for s, m in zip(ahead, marks[begin:a], strict=True) if 0 <= m == marks[a])
        waits = _waits(trace, ahead, body[0])
        steps.append(Step(kind, batch, ahead, body, attention, waits, own))
        first, begin = last + 1, end
    return tuple(steps)


def _mark(trace: Trace, span: Span) -> int:
    """Number of the mark that a span was launched under, or -1."""
    if not trace.marks:
        return -1
    on_gpu = trace.marks[0].kind == "gpu mark"
    at = span.start_us if on_gpu else trace.launched_us.get(span.launch, float("-inf"))
    place = bisect_right(trace.marks, at, key=lambda mark: mark.start_us) - 1
    return place if place >= 0 and at <= trace.marks[place].end_us else -1


def _copies(between: Sequence[Span]) -> list[int]:
    return [place for place, span in enumerate(between) if span.name in HOST_COPIES]


def _end(work: Sequence[Span], marks: Sequence[int], last: int, after: int) -> int:
    """Where the step whose last attention kernel is `last` ends, before the next one's."""
    rest = range(last + 1, after)
    if marks[last] >= 0:
        own = [place for place in rest if marks[place] == marks[last]]
    elif work[last].in_graph:
        own = [place for place in rest if work[place].launch == work[last].launch]
    else:
        copies = _copies(work[last:after])
        return last + copies[0] if copies else after
    return own[-1] + 1 if own else last + 1


def _kind(mark: str) -> tuple[str, int]:
    """Kind and batch size that a mark tells; nothing and 0 if it tells none."""
    if found := SGLANG.match(mark):
        return SGLANG_KINDS.get(found[1], UNKNOWN), int(found[2])
    if found := VLLM.match(mark):
        context, generation = int(found[1]), int(found[2])
        kind = MIXED if context and generation else PREFILL if context else DECODE
        return kind, context + generation
    return "", 0


def _waits(trace: Trace, ahead: Sequence[Span], first: Span) -> tuple[Span, ...]:
    """What the host waited for between launching the first of `ahead` and the attention."""
    known = [trace.launched_us[s.launch] for s in (*ahead, first) if s.launch in trace.launched_us]
    if not known:
        return ()
    low = bisect_right(trace.waits, min(known), key=lambda wait: wait.start_us)
    high = bisect_right(trace.waits, max(known), key=lambda wait: wait.start_us)
    return trace.waits[low:high]
