"""The forward passes of a server's trace: where each begins and ends, and what it is.

| the trace has | a step is |
|---|---|
| marks of steps | what was launched under one mark of SGLang or vLLM |
| attention in CUDA graphs | one replay of a graph that holds attention |
| neither | attention calls up to a copy between host and GPU, which fewer than half follow |

Work between two steps is attributed to the later one (sampling, metadata). A step lasts from the
end of the work before it to the end of its own: it is busy, idle before its first attention kernel,
or idle later. The step's kind is taken from its mark. In a trace without marks, attention in a CUDA
graph is of decode or verification, because engines run prefill eagerly; otherwise the kernel
decides. Where other steps are marked, a step without a mark is unknown.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from typing import Any

from .marks import NO_MARK, Mark, read_mark
from .spans import BY_START, NO_CALL, Gap, Span, busy_us, find_gaps
from .trace_file import Spans, Trace

UNKNOWN = "unknown"
EITHER = "decode or verify"
"""Without a mark one query per request and a few cannot be distinguished."""
HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
MARK = "mark"
GRAPH = "graph"
EAGER = "eager"
Places = list[int]
"""Numbers of spans of a trace's work."""
Key = tuple[str, int]
"""What the work of a step shares, and its number: mark, launch of the graph, or copies so far."""


@dataclass(frozen=True)
class Step:
    """One forward pass. Times are microseconds."""

    kind: str
    batch_size: int
    """0 where no mark has it."""
    ahead: Spans
    """What ran since the step before and before its first attention kernel."""
    body: Spans
    """Its work from the first attention kernel on."""
    attention: Spans
    """Those of `body` that are attention."""
    waits: Spans
    """The host's, from the launch of the first of `ahead` to that of the attention."""
    marked: Spans
    """Those of `ahead` that were launched under the step's mark."""
    begin_us: float = 0.0
    """The end of the work before it."""
    begins: bool = False
    """Whether the trace begins with it: it may lack a part of `ahead`, and pays one-time costs."""
    at_end: bool = False
    """Whether it is the first or last of the trace, and may be cut."""
    mark: Mark = NO_MARK
    """What its mark says."""
    layer: Mapping[str, Any] = field(default_factory=dict)
    """What a caller tells of its attention: `heads`, `head_dim`, `kv_len` and others."""

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
        before_us = self.work[0].start_us - self.begin_us
        return before_us + sum(gap.length_us for gap in gaps)

    @cached_property
    def gaps(self) -> list[Gap]:
        """The times in which the GPU runs nothing, that before its first work too."""
        first = self.work[0]
        before = Gap(
            start_us=self.begin_us,
            length_us=first.start_us - self.begin_us,
            after="",
            before=first.name,
            call=NO_CALL,
        )
        return [before, *find_gaps(self.work)]

    @property
    def mean_kv_len(self) -> float:
        """KV tokens of a request, by its mark: the mean; 0 where that has none."""
        return self.mark.kv_tokens / max(1, self.mark.requests)

    @property
    def in_graph(self) -> bool:
        """Whether its attention was replayed from a CUDA graph."""
        return self.attention[0].in_graph


def find_steps(
    trace: Trace,
    kind_of: Callable[[Span], str],
) -> list[Step]:
    """The steps of a trace by the rules above, in order; none if no kernel is attention.

    `kind_of` gives the kind of step that an attention kernel belongs to, and is empty for others.
    """
    work = trace.work
    kinds = [kind_of(span) for span in work]
    places = [at for at, kind in enumerate(kinds) if kind]
    keys = _keys(trace, places)
    has_marks = any(what == MARK for what, _ in keys)
    ends_us = [span.end_us for span in work]
    latest_us = list(accumulate(ends_us, max))
    steps = []
    runs = _runs(keys, places)
    for run, own, marked in _cut(keys, runs):
        first = run[0]
        is_first = own[0] == 0
        is_last = own[-1] == len(work) - 1
        ahead = [work[at] for at in own if at < first]
        what, number = keys[first]
        mark = NO_MARK
        if what == MARK:
            mark = read_mark(trace.marks[number].name)
        if mark.kind:
            kind = mark.kind
        elif has_marks and what != MARK:
            kind = UNKNOWN
        elif work[first].in_graph:
            kind = EITHER
        else:
            kind = kinds[first]
        if is_first:
            before_us = math.inf
        else:
            before_us = latest_us[own[0] - 1]
        begin_us = min(work[own[0]].start_us, before_us)
        step = Step(
            kind=kind,
            batch_size=mark.requests,
            ahead=ahead,
            body=[work[at] for at in own if at >= first],
            attention=[work[at] for at in run],
            waits=_waits(trace, [*ahead, work[first]]),
            marked=[work[at] for at in marked],
            begin_us=begin_us,
            begins=is_first,
            at_end=is_first or is_last,
            mark=mark,
        )
        steps.append(step)
    return steps


def _keys(trace: Trace, places: Places) -> list[Key]:
    """The key of each span of work; `places` are those of attention."""
    is_copy = [int(span.name in HOST_COPIES) for span in trace.work]
    copied = list(accumulate(is_copy))
    followed = 0
    for at, following in pairwise(places):
        followed += copied[at] != copied[following]
    if 2 * followed >= len(places) - 1:  # copies between the layers of a step, not between steps
        copied = [0] * len(copied)
    keys = []
    for span, copies in zip(trace.work, copied, strict=True):
        keys.append(_key(trace, span, copies))
    return keys


def _runs(keys: list[Key], places: Places) -> list[Places]:
    """The attention calls of each step, by the first of them."""
    runs: dict[tuple[Key, int], Places] = defaultdict(list)
    grouped = groupby(places, keys.__getitem__)
    for number, (key, several) in enumerate(grouped):
        # Steps on two streams overlap; without mark and graph a step ends where another begins.
        part = number if key[0] == EAGER else 0
        runs[key, part].extend(several)
    return list(runs.values())


def _cut(
    keys: list[Key],
    runs: list[Places],
) -> Iterator[tuple[Places, ...]]:
    """For each step: its attention, all of its work, and what ran ahead under its mark."""
    attended = set(chain.from_iterable(runs))
    begin = 0
    for run, following in pairwise([*runs, [len(keys)]]):
        first = run[0]
        key = keys[first]
        end = max(following[0], run[-1] + 1)
        while keys[end - 1] != key:  # its last work before the next step's attention
            end -= 1
        # Work of other steps: under another mark, attention, or already in the step before.
        others = set()
        for at in range(min(begin, first), end):
            if keys[at] == key:
                continue
            what, _ = keys[at]
            if what == MARK or at in attended or at < begin:
                others.add(at)
        marked = []
        if key[0] == MARK:
            marked = [at for at in range(begin, first) if keys[at] == key]
        behind = [at + 1 for at in others if at < first]
        begin = max(behind, default=begin)
        begin = min([begin, *marked])
        whole = range(min(begin, first), end)
        in_step = [at for at in whole if at not in others]
        yield run, in_step, marked
        begin = max(begin, end)


def _key(
    trace: Trace,
    span: Span,
    copied: int,
) -> Key:
    """What the work of one step shares: its mark, its graph launch, or the copies before it."""
    at = trace.launched_us.get(span.launch, -math.inf)
    number = bisect_right(trace.marks, at, key=BY_START) - 1
    if number >= 0 and at <= trace.marks[number].end_us:
        return MARK, number
    if span.in_graph and span.launch >= 0:
        return GRAPH, span.launch
    return EAGER, copied


def _waits(trace: Trace, work: Spans) -> Spans:
    """What the host waited for between launching the first and the last of these."""
    launched = [trace.launched_us.get(span.launch) for span in work]
    known = [at for at in launched if at is not None]
    if not known:
        return trace.waits[:0]
    low = bisect_left(trace.waits, min(known), key=BY_START)
    high = bisect_right(trace.waits, max(known), key=BY_START)
    return trace.waits[low:high]


def idle_under(trace: Trace, step: Step) -> dict[str, float]:
    """Call of the CUDA API -> how long the GPU ran nothing while the host was in it, us."""
    idle_us: dict[str, float] = defaultdict(float)
    for gap in step.gaps:
        end_us = gap.start_us + gap.length_us
        low = bisect_right(trace.calls_until_us, gap.start_us)
        high = bisect_right(trace.calls, end_us, key=BY_START)
        for call in trace.calls[low:high]:
            until_us = min(call.end_us, end_us)
            since_us = max(call.start_us, gap.start_us)
            shared_us = until_us - since_us
            if shared_us > 0:
                idle_us[call.name] += shared_us
    return idle_us
