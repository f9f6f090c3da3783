"""Which kernels really ran: names, counts and GPU time from torch.profiler (CUPTI)."""

import json
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .spans import CALL, Kernel, short_name

Work = Callable[[], object]
TRACED_CALLS = 3
_RECORDING = threading.Lock()


def trace_kernels(call: Work) -> tuple[Kernel, ...]:
    """Kernels of `call`, longest first; RuntimeError if the profiler saw none."""
    spent: dict[str, list[float]] = defaultdict(list)
    for symbol, duration in _profile(call, TRACED_CALLS):
        spent[short_name(symbol)].append(duration)
    kernels = []
    for name, us in spent.items():
        launches = len(us) / TRACED_CALLS
        gpu_us = round(sum(us) / TRACED_CALLS, 3)
        kernels.append(Kernel(name, launches, gpu_us))
    return tuple(sorted(kernels, key=lambda kernel: -kernel.gpu_us))


def kernel_times(call: Work, calls: int) -> list[float]:
    """Microseconds of all kernels of each of `calls` calls, added up.

    RuntimeError unless the calls all ran equally many kernels, which separates them.
    """
    times = [gpu_us for _, gpu_us in _profile(call, calls)]
    if len(times) % calls:
        raise RuntimeError(f"{calls} calls must run equally many kernels, saw {len(times)} in all")
    kernels = len(times) // calls
    sums = []
    for start in range(0, len(times), kernels):
        of_call = times[start : start + kernels]
        sums.append(round(sum(of_call), 3))
    return sums


def kernel_family(
    names: Iterable[str],
    family_of: Callable[[str], str],
) -> str:
    """The kernel families that `names` prove by `family_of`, joined by `+`; empty if none."""
    families = {family_of(name) for name in names}
    families.discard("")
    return "+".join(sorted(families))


def trace_calls(
    call: Work,
    calls: int,
    *,
    gpu: bool,
    settle: int = 1,
) -> dict[str, Any]:
    """The Chrome trace of `calls` calls in a row: operators, and with `gpu` launches and kernels.

    Each call is marked (`spans.CALL`), after `settle` unmarked ones: the first call under the
    profiler pays for its start. Names of the machine and of its folders are left out.
    """

    def run() -> None:
        repeat(call, settle)
        if gpu:
            torch.cuda.synchronize()
        for _ in range(calls):
            with torch.profiler.record_function(CALL):
                call()

    profile = _record(run, cpu=True, gpu=gpu)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    trace.pop("host_name", None)
    trace.pop("traceName", None)
    return trace


def _profile(
    call: Work,
    calls: int,
) -> list[tuple[str, float]]:
    """Name and microseconds of all that the GPU ran in `calls` calls, by start."""
    call()
    torch.cuda.synchronize()
    profile = _record(
        lambda: repeat(call, calls),
        cpu=False,
        gpu=True,
    )
    cuda = torch.autograd.DeviceType.CUDA
    on_gpu = [event for event in profile.function_events if event.device_type == cuda]
    if not on_gpu:
        raise RuntimeError("torch.profiler saw no GPU activity: is CUPTI in use by another tool?")
    on_gpu.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in on_gpu]


def repeat(call: Work, calls: int) -> None:
    """Call it `calls` times in a row."""
    for _ in range(calls):
        call()


def _record(
    run: Work,
    *,
    cpu: bool,
    gpu: bool,
) -> Any:
    """The profile of `run`; RuntimeError while another one is recorded."""
    # Kineto reports its own stages on stderr, which a notebook shows as if the cell had failed.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Not `torch.profiler.profile`, which imports torch's compiler for seconds.
    # A second recording would empty the first one, and may end the process.
    if torch.autograd._profiler_enabled() or not _RECORDING.acquire(blocking=False):
        raise RuntimeError("torch.profiler must not be recording already, in any thread: end that")
    try:
        with torch.autograd.profiler.profile(
            use_kineto=True,
            use_cpu=cpu,
            use_device="cuda" if gpu else None,
        ) as profile:
            run()
            if gpu:
                torch.cuda.synchronize()
        return profile
    finally:
        _RECORDING.release()
