"""What a trace holds: spans of work, and the gaps between them. Needs no torch.

A trace is the dict of a Chrome trace file, as torch.profiler (Kineto) exports it. Of its events

| category | becomes |
|---|---|
| `kernel`, `gpu_memcpy`, `gpu_memset` | GPU work |
| `cpu_op` | an operator; never a kernel |
| `cuda_runtime`, `cuda_driver` | the launch that GPU work carries the correlation id of |
| `user_annotation` named `CALL` | one call of the profiled function, on the host |

Times are microseconds from the start of the first call.
"""

import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

CALL = "attnlib call"
GPU_WORK = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
LAUNCHES = ("cuda_runtime", "cuda_driver")
NO_CALL = -1
"""The call of a gap between two calls, and of what the trace holds from outside of them all."""
TICK_US = 0.0005
"""Half a nanosecond: what the rounding of a trace's times may make of nothing."""

SIZE = r"(\d{1,9})(?!\d)"  # a number of ten digits or more is no size
WORD = re.compile(rf"[NKL]*(?:S[\dA-Z]*_|St)?{SIZE}")
"""Of a mangled name: how long the next word is, behind marks of nesting and of repetition."""
MOST_NAME = 4096
"""Characters of a name that are read: the longest of a real kernel has about 1,400."""
BRACKET = re.compile(r"[<>]")
CUTLASS_KERNEL = re.compile(r"\bdevice_kernel<(?:[\w:]*\benable_\w+<)?(?:\w+::)*(\w+)")

Event = Mapping[str, Any]
"""Of a Chrome trace."""
BY_START = attrgetter("start_us")
"""Sorts spans."""


class Kernel(NamedTuple):
    """One kernel of a call, by its trace: launches per call, GPU microseconds per call."""

    name: str
    launches: float
    gpu_us: float


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that ran: a kernel, memcpy, memset or operator (`kind`), or a wait or mark.

    `call` is the profiled call that launched it, and `self_us` its time less that of the operators
    it called. `launch` is the correlation id that all work of one launch shares: several kernels
    where the launch was of a CUDA graph. GPU work has the kernel's whole `symbol`, `grid` and
    `block`, and what a copy moved.
    """

    kind: str
    name: str
    start_us: float
    length_us: float
    self_us: float
    call: int = NO_CALL
    launch: int = -1
    in_graph: bool = False
    symbol: str = ""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    copied_bytes: int = 0

    @property
    def end_us(self) -> float:
        """When it ended, microseconds."""
        return self.start_us + self.length_us


Spans = Iterable[Span]


@dataclass(frozen=True)
class Gap:
    """Time in which nothing ran, between the spans `after` and `before`, microseconds.

    `call` is that of both, or `NO_CALL` between two calls.
    """

    start_us: float
    length_us: float
    after: str
    before: str
    call: int


def read_spans(trace: Mapping[str, Any]) -> tuple[Span, ...]:
    """The spans of a Chrome trace, in order of their start; ValueError if it marks no call."""
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            events.append(event)
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    marks = [event for event in annotations if event.get("name") == CALL]
    marks.sort(key=_start)
    if not marks:
        raise ValueError(f"trace must mark each call as {CALL!r}, it marks none")
    origin = marks[0]["ts"]
    starts = []
    ends = []
    for mark in marks:
        start = mark["ts"] - origin
        starts.append(start)
        ends.append(start + mark["dur"])
    calls = _Calls(origin, starts, ends)
    spans = _gpu_work(events, calls) + _operators(events, calls)
    return tuple(sorted(spans, key=BY_START))


def _start(event: Event) -> float:
    return event["ts"]


def work_span(event: Event, start_us: float) -> Span:
    """The span of an event of GPU work, of no call yet."""
    cut = event["name"][:MOST_NAME]
    text = cut.encode(errors="replace").decode()
    name = sys.intern(text)
    category = event["cat"]
    args = event.get("args") or {}
    length_us = float(event["dur"])
    copied = args.get("bytes") if category == "gpu_memcpy" else 0
    launch = args.get("correlation")
    return Span(
        kind=GPU_WORK[category],
        name=short_name(name),
        start_us=start_us,
        length_us=length_us,
        self_us=length_us,
        launch=-1 if launch is None else launch,
        # Graphs of different captures have different ids, work outside of any has 0 or none.
        in_graph=bool(args.get("graph id")),
        symbol=name,
        grid=tuple(args.get("grid") or ()),
        block=tuple(args.get("block") or ()),
        copied_bytes=copied or 0,
    )


@lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """A kernel's function name without return type, namespace, template and call arguments.

    CUTLASS launches its kernels as `device_kernel<Kernel>`; the name is then the kernel's. Names
    too long for the profiler to read stay mangled in a trace, and are read here.
    """
    if name.startswith(("Memcpy", "Memset")):
        return name.partition(" (")[0]
    if name.startswith("_Z"):
        return _unmangled(name)
    name = name.rpartition(">::type ")[2]  # What enable_if gives is the type, not the function.
    inner = CUTLASS_KERNEL.search(name)
    if inner:
        return inner[1]
    bare = _without_templates(name.replace("(anonymous namespace)", "anonymous"))
    words = bare.partition("(")[0].split()
    if not words:
        return name
    return words[-1].split("::")[-1]


def _without_templates(name: str) -> str:
    """A name without template arguments; of one that was cut within them, what precedes them.

    It takes time in proportion to the name's length, however deep the arguments are nested.
    """
    kept = []
    depth = 0
    end = 0
    for bracket in BRACKET.finditer(name):
        if bracket[0] == "<":
            if depth == 0:
                kept.append(name[end : bracket.start()])
            depth += 1
        elif depth:  # else the `>` of an arrow or of a comparison
            depth -= 1
            end = bracket.end()
    if depth == 0:
        kept.append(name[end:])
    return "".join(kept)


def _unmangled(name: str) -> str:
    """The function of an Itanium-mangled name: its last word before arguments of any kind."""
    before, wrapped, inside = name.partition("13device_kernelI")
    rest = inside if wrapped else before[2:]
    last = name
    word = WORD.match(rest)
    while word:
        start = word.end()
        end = start + int(word[1])
        last = rest[start:end]
        rest = rest[end:]
        if last.startswith("enable_"):
            rest = rest.removeprefix("I")
        word = WORD.match(rest)
    return last


def saw_cuda(trace: Mapping[str, Any]) -> bool:
    """Whether a trace holds any call of the CUDA API; without, no kernel in it proves nothing."""
    return any(event.get("cat") in LAUNCHES for event in trace["traceEvents"])


def gpu_work(spans: Spans) -> tuple[Span, ...]:
    """Kernels and the copies and fills that the GPU did, by start."""
    return tuple(span for span in spans if span.kind in GPU_WORK.values())


def operators(spans: Spans) -> tuple[Span, ...]:
    """Operators that ran on the host, by start, the calling before the called."""
    return tuple(span for span in spans if span.kind == "operator")


def busy_us(spans: Spans) -> float:
    """Microseconds in which at least one of `spans` ran."""
    busy = 0.0
    until = float("-inf")
    for span in sorted(spans, key=BY_START):
        begin = max(span.start_us, until)
        busy += max(0.0, span.end_us - begin)
        until = max(until, span.end_us)
    return busy


def find_gaps(spans: Spans) -> tuple[Gap, ...]:
    """Every time in which none of `spans` ran, between the first and the last of them."""
    gaps = []
    last: Span | None = None
    for span in sorted(spans, key=BY_START):
        if last and span.start_us > last.end_us + TICK_US:
            gap = Gap(
                start_us=last.end_us,
                length_us=span.start_us - last.end_us,
                after=last.name,
                before=span.name,
                call=span.call if span.call == last.call else NO_CALL,
            )
            gaps.append(gap)
        if last is None or span.end_us > last.end_us:
            last = span
    return tuple(gaps)


def per_call(
    spans: Spans,
    calls: int,
) -> dict[str, list[float]]:
    """For each name its own time in each of `calls` calls, microseconds."""
    times: dict[str, list[float]] = {}
    for span in spans:
        of_name = times.setdefault(span.name, [0.0] * calls)
        of_name[span.call] += span.self_us
    return times


class _Calls(NamedTuple):
    """The calls that a trace marks; `origin` is the start of the first on the trace's clock."""

    origin: float
    starts: list[float]
    ends: list[float]

    def at(self, us: float) -> int:
        """Number of the call that the host was in at that time."""
        number = self.before(us)
        if number >= 0 and us <= self.ends[number]:
            return number
        return NO_CALL

    def before(self, us: float) -> int:
        """Number of the last call that had started by then."""
        return bisect_right(self.starts, us) - 1


def _gpu_work(events: list[Event], calls: _Calls) -> list[Span]:
    """GPU work that the calls launched.

    Work without a known launch is counted for the last call that had started.
    """
    launches: dict[int, Event] = {}
    api_calls = [event for event in events if event.get("cat") in LAUNCHES]
    # Of nested API calls with one correlation id the first, the outer one, is the launch.
    for event in sorted(api_calls, key=_start):
        args = event.get("args", {})
        correlation = args.get("correlation", -1)
        launches.setdefault(correlation, event)
    spans = []
    for event in events:
        if event.get("cat") not in GPU_WORK:
            continue
        span = work_span(event, event["ts"] - calls.origin)
        launch = launches.get(span.launch)
        if launch is None:
            number = calls.before(span.start_us)
            in_graph = span.in_graph
        else:
            number = calls.at(launch["ts"] - calls.origin)
            in_graph = span.in_graph or "GraphLaunch" in launch["name"]
        if number != NO_CALL:
            spans.append(replace(span, call=number, in_graph=in_graph))
    return spans


def _operators(events: list[Event], calls: _Calls) -> list[Span]:
    threads: dict[int, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("cat") != "cpu_op":
            continue
        start = event["ts"] - calls.origin
        length = event.get("dur", 0.0)
        number = calls.at(start)
        if number != NO_CALL:
            span = Span(
                kind="operator",
                name=event["name"],
                start_us=start,
                length_us=length,
                self_us=length,
                call=number,
            )
            threads[event["tid"]].append(span)
    of_all_threads = []
    for spans in threads.values():
        of_all_threads += _nested(spans)
    return of_all_threads


def _nested(spans: list[Span]) -> list[Span]:
    """The spans of one thread with their own time, less their children's; callers come first."""
    ordered = sorted(
        spans,
        key=lambda span: (span.start_us, -span.length_us),
    )
    self_us = [span.length_us for span in ordered]
    callers: list[int] = []
    for place, span in enumerate(ordered):
        while callers and ordered[callers[-1]].end_us <= span.start_us + TICK_US:
            callers.pop()
        if callers:
            self_us[callers[-1]] -= span.length_us
        callers.append(place)
    nested = []
    for span, own_us in zip(ordered, self_us, strict=True):
        nested.append(replace(span, self_us=max(0.0, own_us)))
    return nested
