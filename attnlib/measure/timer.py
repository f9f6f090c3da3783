"""Timers. Each is a name that goes into the record; there is no fallback to another one.

| timer | measures | a sample is |
|---|---|---|
| `graph` | GPU time of a call in a CUDA graph, L2 warm | events around a replay of K calls, / K |
| `graph-cold` | the same, L2 cold | K calls that rotate over copies of their inputs, / K |
| `graph-behind` | what a call adds to another kernel | K of both less K of the other, / K |
| `eager` | GPU-side time of calls launched one by one from Python | events around K calls, / K |
| `profiler` | the kernels themselves, L2 warm | kernel durations of one call (CUPTI), added up |
| `host` | launch latency: until a call returns to Python | perf_counter around one call |

K is chosen so that a sample lasts about `SAMPLE_US`: two events alone read several microseconds,
which one short kernel between them would carry. Before samples that events time, the GPU does the
same work until its clocks and its power have settled (`settle`). A replay begins once the host has
queued all of it (`_queue_us`). Warm timers repeat a call over the same inputs; the cold one is
given calls over as many copies as `cold_copies` says.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from .machine import load_reader
from .trace import Work, kernel_times, repeat

SAMPLE_US = 2000.0
MAX_CALLS_PER_SAMPLE = 512
BUDGET_US = 200_000.0
MIN_SAMPLES = 7
MAX_SAMPLES = 30
CALIBRATIONS = 3
MOST_HICCUPS = 3
"""Samples taken again in which a kernel lasts longer alone than with a call behind it."""
CYCLES_PER_US = 2000
"""No GPU here has a higher clock: a spin takes at least the time that was given."""
MIN_QUEUE_US = 50.0
WARM_UP_CALLS = 3
PLAN_SAMPLES = 10
NEIGHBOUR_WORDS = 2**18
PROFILED_CALLS = 20
COLD_L2_MULTIPLE = 2
SETTLED = 0.01
"""Two windows in a row whose medians differ by less."""
LIGHT_US = 30.0
"""Calls above this are measured in windows of `WINDOW_US`."""
WINDOW_US = 100_000.0
"""Under load a GPU lowers its clock in steps, 25 to 90 ms after the start; two shorter windows
agree before the first of them."""
HEAVY_US = 1000.0
"""Calls above this draw so much power that clocks follow it for about a second."""
HEAVY_SETTLE_US = 1_000_000.0
"""The least time in which such calls settle."""
MOST_SETTLE_US = 5_000_000.0


@dataclass(frozen=True)
class Timing:
    """Samples in microseconds per call, and K.

    `settle_us` of the same work ran before; power (W) and SM clock (MHz) were read while each
    sample ran. A timer that does not settle leaves these three empty.
    """

    calls_per_sample: int
    samples_us: tuple[float, ...]
    settle_us: float = 0.0
    power_w: tuple[int, ...] = ()
    sm_clock_mhz: tuple[int, ...] = ()


def time_graph(call: Work) -> Timing:
    """Time `call` (capturable, no host synchronisation) inside a CUDA graph, L2 warm."""
    return _time_replay([call])


def time_graph_cold(rotation: Sequence[Work]) -> Timing:
    """Time calls that differ only in which copy of the inputs they read, L2 cold.

    Every copy is used equally often in a replay; ValueError if one replay cannot hold them all.
    """
    most = MAX_CALLS_PER_SAMPLE
    count = len(rotation)
    if not 1 < count <= most:
        raise ValueError(f"rotation must hold 2..{most} calls for a cold L2, got {count}")
    return _time_replay(rotation)


def time_graph_behind(call: Work) -> Timing:
    """Time `call` behind an elementwise kernel, as in a step, and not behind a copy of itself.

    In each sample a graph of that kernel alone follows; RuntimeError if it often takes as long.
    """
    words = torch.zeros(NEIGHBOUR_WORDS, device="cuda")
    neighbour = partial(words.add_, 1.0)
    for work in (call, neighbour):
        warm_up(work)
    calls = _calls_per_sample(_eager_us(call, 1))
    both = capture([neighbour, call], calls).replay
    alone = capture([neighbour], calls).replay
    for replay in (both, alone):
        warm_up(replay)
    return _settled_samples(
        replay=both,
        calls=calls,
        queue_us=_queue_us(both),
        less=alone,
    )


def cold_copies(bytes_read: int, l2_bytes: int) -> int:
    """Copies of inputs so that, between two uses of one, twice the L2 has been read: at least 2."""
    return max(2, -(-COLD_L2_MULTIPLE * l2_bytes // bytes_read) + 1)


def time_eager(call: Work) -> Timing:
    """Time `call` launched from Python, events around K calls in a row, L2 warm.

    The first of the K finds an idle GPU.
    """
    warm_up(call)
    calls = _calls_per_sample(_eager_us(call, 4) / 4)
    return _settled_samples(partial(repeat, call, calls), calls)


def time_profiler(call: Work) -> Timing:
    """GPU time of the kernels of `call`, from CUPTI's own clocks: no launch gaps, no events."""
    return Timing(1, tuple(kernel_times(call, PROFILED_CALLS)))


def time_host(call: Work) -> Timing:
    """Host time of `call` until it returns; GPU work pending before it is waited for first."""
    call()
    samples = [_host_us(call) for _ in range(PLAN_SAMPLES)]
    return Timing(1, tuple(samples))


def time_loop(
    call: Work,
    calls: int,
    *,
    gpu: bool,
) -> tuple[tuple[float, ...], float]:
    """Run `calls` calls in a row: host time of each until it returns, and wall time per call.

    Microseconds. Nothing waits between the calls; with `gpu` the wall time ends when the GPU has
    ended the last one.
    """
    _wait(gpu)
    marks = [time.perf_counter_ns()]
    for _ in range(calls):
        call()
        marks.append(time.perf_counter_ns())
    _wait(gpu)
    wall_us = (time.perf_counter_ns() - marks[0]) / 1e3 / calls
    host_us = []
    for before, after in pairwise(marks):
        host_us.append((after - before) / 1e3)
    rounded = tuple(round(us, 3) for us in host_us)
    return rounded, round(wall_us, 3)


def warm_up(call: Work) -> None:
    """Call it `WARM_UP_CALLS` times on a side stream and wait for the GPU."""
    # Capture needs prior work on a side stream; so do lazily loaded modules.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        repeat(call, WARM_UP_CALLS)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def capture(
    rotation: Sequence[Work],
    turns: int = 1,
) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `turns` times the calls of `rotation`, in order, each warmed up before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in rotation:
                call()
    return graph


RUN_TIMERS: dict[str, Callable[..., Timing]] = {
    "graph": time_graph,
    "graph-cold": time_graph_cold,
    "graph-behind": time_graph_behind,
    "eager": time_eager,
    "profiler": time_profiler,
    "host": time_host,
}
ROTATING = ("graph-cold",)
"""Timers that take a rotation of calls, not one."""


def run_timer(name: str) -> Callable[..., Timing]:
    """The timer called `name`; ValueError lists the valid names, RuntimeError if it needs a GPU."""
    if name not in RUN_TIMERS:
        raise ValueError(f"timer must be one of {', '.join(RUN_TIMERS)}, got {name!r}")
    if name != "host" and not torch.cuda.is_available():
        raise RuntimeError(f"timer {name!r} needs a CUDA GPU, torch.cuda.is_available() is False")
    return RUN_TIMERS[name]


def _time_replay(rotation: Sequence[Work]) -> Timing:
    for call in rotation:
        warm_up(call)
    calls = _calls_per_sample(_eager_us(rotation[0], 1))
    turns = max(1, calls // len(rotation))
    replay = capture(rotation, turns).replay
    warm_up(replay)
    return _settled_samples(
        replay=replay,
        calls=turns * len(rotation),
        queue_us=_queue_us(replay),
    )


def _calls_per_sample(call_us: float) -> int:
    calls = round(SAMPLE_US / max(call_us, 1.0))
    return max(1, min(MAX_CALLS_PER_SAMPLE, calls))


def _eager_us(call: Work, calls: int) -> float:
    """The quickest of some bursts: after one hiccup of the host a sample would be one call long."""
    burst = partial(repeat, call, calls)
    burst()
    return min(_event_us(burst) for _ in range(CALIBRATIONS))


def settle(sample: Callable[[], float], calls: int) -> float:
    """Take samples of `calls` calls until they last as long as before; microseconds spent.

    Two windows of `MIN_SAMPLES` in a row must agree (`SETTLED`), `WINDOW_US` long unless a call is
    light; heavy calls run `HEAVY_SETTLE_US` at least. After `MOST_SETTLE_US` it ends all the same,
    and a drift shows in the samples.
    """
    spent = 0.0
    before = float("inf")
    while spent < MOST_SETTLE_US:
        window = [sample() for _ in range(MIN_SAMPLES)]
        while window[0] / calls > LIGHT_US and sum(window) < WINDOW_US:
            window.append(sample())
        spent += sum(window)
        now = median(window)
        least = HEAVY_SETTLE_US if now / calls > HEAVY_US else 0.0
        if spent >= least and abs(now / before - 1) < SETTLED:
            break
        before = now
    return round(spent)


def _queue_us(replay: Work) -> float:
    """Twice what the host takes to queue `replay`: so long the GPU spins before a sample.

    Of a replay that the GPU begins while it is being queued, short kernels come in rounds up to 1.3
    times apart; behind a spin within 1.01.
    """
    queued = [_host_us(replay) for _ in range(CALIBRATIONS)]
    return max(MIN_QUEUE_US, 2 * median(queued))


def _settled_samples(
    replay: Work,
    calls: int,
    queue_us: float = 0.0,
    less: Work | None = None,
) -> Timing:
    event_us = partial(_event_us, queue_us=queue_us)
    spent = settle(partial(event_us, replay), calls)
    affordable = int(BUDGET_US / max(event_us(replay), 1.0))
    count = max(MIN_SAMPLES, min(MAX_SAMPLES, affordable))
    states: list[tuple[int, int]] = []
    times: list[float] = []
    hiccups = 0
    with load_reader() as read:
        while len(times) < count:
            us = event_us(replay, lambda: states.append(read()))
            if less:
                us -= event_us(less)
            if us > 0:
                times.append(us)
                continue
            states.pop()
            hiccups += 1
            if hiccups > MOST_HICCUPS:
                raise RuntimeError(f"a call must add time to the kernel before it, got {us:.1f} us")
    return Timing(
        calls_per_sample=calls,
        samples_us=tuple(round(us / calls, 3) for us in times),
        settle_us=spent,
        power_w=tuple(power for power, _ in states),
        sm_clock_mhz=tuple(clock for _, clock in states),
    )


def _event_us(
    replay: Work,
    meanwhile: Work | None = None,
    queue_us: float = 0.0,
) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    if queue_us:
        torch.cuda._sleep(round(queue_us * CYCLES_PER_US))
    start.record()
    replay()
    end.record()
    if meanwhile:
        meanwhile()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _wait(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()


def _host_us(call: Work) -> float:
    _wait(torch.cuda.is_available())
    start = time.perf_counter_ns()
    call()
    spent_ns = time.perf_counter_ns() - start
    return round(spent_ns / 1e3, 3)
