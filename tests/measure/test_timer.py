"""Timers: each by its own name, none stands in for another, all in microseconds."""

from contextlib import nullcontext
from functools import partial
from statistics import median

import pytest
import torch

from attnlib.measure import timer
from attnlib.measure.timer import run_timer


def test_the_host_timer_calls_once_a_sample_and_once_before_in_microseconds(
    without_gpu, monkeypatch
):
    clock_ns = iter([0, 1_500_000, 2_000_000, 2_000_250, 5_000_000, 5_007_000])
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(timer.time, "perf_counter_ns", lambda: next(clock_ns))
        patch.setattr(timer, "PLAN_SAMPLES", 3)
        timing = run_timer("host")(lambda: calls.append(0))
    assert len(calls) == 4
    assert timing.calls_per_sample == 1
    assert timing.samples_us == (1500.0, 0.25, 7.0)


def test_a_cold_l2_takes_copies_worth_twice_the_l2_and_never_fewer_than_two():
    mib = 2**20
    assert timer.cold_copies(10 * mib, 60 * mib) == 13
    assert timer.cold_copies(1000 * mib, 60 * mib) == 2
    for size in (1, 7, 59, 60, 61, 119):
        assert (timer.cold_copies(size * mib, 60 * mib) - 1) * size >= 120


@pytest.mark.parametrize("count", [1, timer.MAX_CALLS_PER_SAMPLE + 1])
def test_a_rotation_that_cannot_be_cold_is_refused(count):
    with pytest.raises(ValueError, match=r"rotation must hold 2..512 calls for a cold L2, got"):
        timer.time_graph_cold([lambda: None] * count)


@pytest.mark.parametrize(
    "call_us, samples, count",
    [
        (10.0, [100.0] * 99, 14),
        (
            10.0,
            [
                *[130.0] * 7,
                *[110.0] * 7,
                *[100.0] * 99,
            ],
            28,
        ),
        (
            459.0,
            [*[1836.0] * 50, *[1940.0] * 999],
            55 + 52 + 52,
        ),
        (2000.0, [20_000.0] * 999, 56),
        (2000.0, [20_000.0 * 1.02 ** (n // 7) for n in range(999)], 196),
    ],
    ids=["steady at once", "slow first", "steps later", "heavy for a second", "never, and it ends"],
)
def test_work_runs_until_two_windows_agree_and_heavy_work_for_a_second(call_us, samples, count):
    lengths = iter(samples)
    calls = round(samples[0] / call_us)
    spent = timer.settle(lambda: next(lengths), calls)
    assert spent == pytest.approx(sum(samples[:count]), abs=1)


@pytest.mark.parametrize("hiccups", range(timer.MOST_HICCUPS + 2))
def test_what_a_call_adds_is_each_samples_own_difference_and_never_nothing(monkeypatch, hiccups):
    def event_us(replay, meanwhile=lambda: None, queue_us=0.0):
        meanwhile()
        return next(replay)

    monkeypatch.setattr(timer, "_event_us", event_us)
    reads = iter((number, 1900) for number in range(99))
    monkeypatch.setattr(timer, "load_reader", lambda: nullcontext(lambda: next(reads)))
    monkeypatch.setattr(timer, "settle", lambda sample, calls: 0.0)
    for name in ("MIN_SAMPLES", "MAX_SAMPLES"):
        monkeypatch.setattr(timer, name, 2)
    both = [9.0, 130.0, *[99.0] * hiccups, 150.0]
    alone = [100.0, *[100.0] * hiccups, 90.0]
    if hiccups > timer.MOST_HICCUPS:
        words = r"must add time to the kernel before it, got -1\.0 us"
        with pytest.raises(RuntimeError, match=words):
            timer._settled_samples(iter(both), 10, less=iter(alone))
        return
    timing = timer._settled_samples(iter(both), 10, less=iter(alone))
    assert timing.samples_us == (3.0, 6.0)
    assert timing.power_w == (0, 1 + hiccups)
    assert timing.sm_clock_mhz == (1900, 1900)


def test_a_replay_begins_once_the_host_has_queued_it_and_calls_from_python_do_not(monkeypatch):
    order = []

    class Event:
        def __init__(self, enable_timing):
            self.record = lambda: order.append("record")
            self.synchronize = lambda: None

        def elapsed_time(self, end):
            return 1.0

    monkeypatch.setattr(timer.torch.cuda, "Event", Event)
    monkeypatch.setattr(timer.torch.cuda, "_sleep", lambda cycles: order.append(cycles))
    monkeypatch.setattr(timer, "_host_us", lambda replay: next(host))
    host = iter([700.0, 300.0, 20.0, 3.0, 3.0, 3.0])
    assert timer._queue_us(print) == 600.0
    assert timer._queue_us(print) == timer.MIN_QUEUE_US
    for queue_us in (600.0, 0.0):
        assert timer._event_us(lambda: order.append("replay"), queue_us=queue_us) == 1000.0
    assert order == [1_200_000, *(sample := ["record", "replay", "record"]), *sample]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["graph", "graph-behind", "eager", "profiler"])
def test_every_gpu_timer_sees_twice_the_work_take_longer(name):
    small, large = (torch.zeros(n * 2**28, device="cuda") for n in (1, 2))
    calls = [partial(torch.neg, x, out=x) for x in (small, large)]
    once, twice = (median(run_timer(name)(call).samples_us) for call in calls)
    assert once < twice


@pytest.mark.gpu
def test_a_cold_graph_uses_every_copy_equally_often():
    counts = [torch.zeros(1, device="cuda") for _ in range(3)]
    timing = timer.time_graph_cold([partial(c.add_, 1) for c in counts])
    assert len({c.item() for c in counts[1:]}) == 1
    assert timing.calls_per_sample % 3 == 0
