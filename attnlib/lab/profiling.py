"""Profile any callable: its kernels, the gaps between them, and the host's time beside the GPU's.

`profile` runs a callable three times over: to warm it up, then timed and untraced, then traced. A
callable that uses no GPU is profiled by its CPU operators, and every output says that they are
operators: nothing stands in for a kernel.
"""

from __future__ import annotations

import datetime
import gzip
import json
from collections.abc import Callable
from typing import Any

import torch

from ..measure.machine import identify_gpu
from ..measure.spans import gpu_work, read_spans, saw_cuda
from ..measure.timer import capture, time_loop, warm_up
from ..measure.trace import short_name, trace_calls
from .profile import Profile

DEVICES = ("auto", "cuda", "cpu")
CALLS, WARM_UP = 10, 3


def profile(
    fn: Callable[..., object],
    *args: Any,
    calls: int = CALLS,
    warmup: int = WARM_UP,
    device: str = "auto",
    cuda_graph: bool = False,
    name: str = "",
) -> Profile:
    """Profile `fn(*args)`: `warmup` calls, `calls` untraced ones for the clock, `calls` traced.

    With any warm-up there is one more, traced and not counted: it pays for the profiler's start.

    `device` `auto` shows the kernels that fn runs, or, if it runs none or no CUDA GPU is here, its
    CPU operators, and says so; `cuda` raises then; `cpu` shows the operators whatever else runs.
    With `cuda_graph` fn is captured once and its replays are profiled: it must be capturable.

    The GPU that is waited for is the current device; work on others is traced as far as it ended.
    TypeError and ValueError name a wrong argument, RuntimeError says what cannot be had here. What
    fn raises is left as it is.
    """
    _require_arguments(fn, calls, warmup, device)
    gpu = _uses_gpu(device)
    if cuda_graph and not gpu:
        raise ValueError(f"cuda_graph=True needs kernels to capture: {_why_no_gpu(device)}")
    counted = _Counted(fn, args)
    for _ in range(warmup):
        counted()
    subject = _captured(counted) if cuda_graph else counted
    host_us, wall_us = time_loop(subject, calls, gpu=gpu)
    trace = trace_calls(subject, calls, gpu=gpu, settle=min(1, warmup))
    if gpu and not saw_cuda(trace):
        raise RuntimeError(
            "torch.profiler saw no CUDA call, not even its own: is CUPTI in use by another tool? "
            "device='cpu' shows the operators"
        )
    spans = read_spans(trace, shorten=short_name)
    on_gpu = bool(gpu_work(spans))
    if (device == "cuda" or cuda_graph) and not on_gpu:
        asked = "cuda_graph=True" if cuda_graph else "device='cuda'"
        raise RuntimeError(f"{asked} needs an fn that uses the GPU, torch.profiler saw no kernel")
    return Profile(
        name=name or getattr(fn, "__name__", type(fn).__name__),
        device="cuda" if on_gpu else "cpu",
        note="" if on_gpu else f"These are CPU operators, not kernels: {_why_no_gpu(device)}.",
        machine=identify_gpu() if on_gpu else {"gpu": "", "gpu_id": "cpu"},
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        calls=calls,
        ran=counted.ran,
        cuda_graph=cuda_graph,
        spans=spans,
        host_us=host_us,
        wall_us=wall_us,
        packed_trace=gzip.compress(json.dumps(trace).encode(), mtime=0),
    )


class _Counted:
    """A callable with its arguments, and how often it was called."""

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.fn, self.args, self.ran = fn, args, 0

    def __call__(self) -> None:
        self.ran += 1
        self.fn(*self.args)


def _require_arguments(fn: object, calls: int, warmup: int, device: str) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}: pass it, do not call it")
    for name, value, least in (("calls", calls, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")


def _uses_gpu(device: str) -> bool:
    """Whether GPU activity is traced; RuntimeError if it was asked for and cannot be."""
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device='cuda' cannot be had: {_why_no_gpu(device)}")
    return device != "cpu" and torch.cuda.is_available()


def _why_no_gpu(device: str) -> str:
    if device == "cpu":
        return "device='cpu' was asked for, and what a GPU did is not shown"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA GPU is here (torch.cuda.is_available() is False)"
    return "the callable used no GPU"


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of a CUDA graph of `call`; RuntimeError if it cannot be captured."""
    warm_up(call)
    try:
        return capture([call]).replay
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"cuda_graph=True needs an fn that can be captured: {words}") from error
