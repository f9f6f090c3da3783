"""Timers. Each is a name that goes into the record; none stands in for another.

| timer | measures | a sample is |
|---|---|---|
| `graph` | GPU time of a call in a CUDA graph | events around a replay of K captured calls, / K |
| `eager` | GPU-side time of calls launched one by one from Python | events around K calls, / K |
| `host` | time until a call returns to Python | perf_counter around one call |

K is chosen so that a sample lasts about `SAMPLE_US`: two events alone read several microseconds,
which one short kernel between them would carry. All of these repeat a call over the same inputs,
so the L2 cache is warm: what fits in it (60 MB on an H200) is read from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

SAMPLE_US = 2000.0
MAX_CALLS_PER_SAMPLE = 64
BUDGET_US = 200_000.0
MIN_SAMPLES, MAX_SAMPLES = 7, 30
WARM_UP_CALLS = 3
PLAN_SAMPLES = 10


@dataclass(frozen=True)
class Timing:
    """Samples in microseconds a call, with the timer that took them and K."""

    timer: str
    calls_per_sample: int
    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median sample, microseconds a call."""
        return median(self.samples_us)


def time_graph(call: Callable[[], object]) -> Timing:
    """Time `call` (capturable, no host synchronisation) inside a CUDA graph, L2 warm."""
    _warm_up(call)
    calls = _calls_per_sample(_eager_us(call, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    _warm_up(graph.replay)
    samples = _sample(graph.replay, calls)
    return Timing("graph", calls, samples)


def time_eager(call: Callable[[], object]) -> Timing:
    """Time `call` launched from Python, events around K calls in a row, L2 warm."""
    _warm_up(call)
    calls = _calls_per_sample(_eager_us(call, 4) / 4)

    def burst() -> None:
        for _ in range(calls):
            call()

    return Timing("eager", calls, _sample(burst, calls))


def time_host(call: Callable[[], object], *, samples: int = PLAN_SAMPLES) -> Timing:
    """Host time of `call` until it returns; GPU work pending before it is waited for first."""
    call()
    return Timing("host", 1, tuple(_host_us(call) for _ in range(samples)))


def require_cuda(timer: str) -> None:
    """Raise RuntimeError unless a CUDA GPU is there to be timed."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"timer {timer!r} needs a CUDA GPU, torch.cuda.is_available() is False")


RUN_TIMERS = {"graph": time_graph, "eager": time_eager, "host": time_host}


def run_timer(name: str) -> Callable[[Callable[[], object]], Timing]:
    """The timer called `name`; ValueError lists the valid names, RuntimeError if it needs a GPU."""
    if name not in RUN_TIMERS:
        raise ValueError(f"timer must be one of {', '.join(RUN_TIMERS)}, got {name!r}")
    if name != "host":
        require_cuda(name)
    return RUN_TIMERS[name]


def _warm_up(call: Callable[[], object]) -> None:
    # Capture needs prior work on a side stream; so do lazily loaded modules.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _calls_per_sample(call_us: float) -> int:
    return max(1, min(MAX_CALLS_PER_SAMPLE, round(SAMPLE_US / max(call_us, 1.0))))


def _eager_us(call: Callable[[], object], calls: int) -> float:
    def burst() -> None:
        for _ in range(calls):
            call()

    burst()
    return _event_us(burst)


def _sample(replay: Callable[[], object], calls: int) -> tuple[float, ...]:
    first = _event_us(replay)
    count = max(MIN_SAMPLES, min(MAX_SAMPLES, int(BUDGET_US / max(first, 1.0))))
    return tuple(round(_event_us(replay) / calls, 3) for _ in range(count))


def _event_us(replay: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _host_us(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    call()
    return round((time.perf_counter_ns() - start) / 1e3, 3)
