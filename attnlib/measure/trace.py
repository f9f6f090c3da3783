"""Which kernels really ran: names, counts and GPU time from torch.profiler (CUPTI).

Labels lie, kernels do not. `kernel_family` reads the family off the names:

| a kernel named | family |
|---|---|
| `BatchPrefillWithPagedKVCacheKernel` | fa2 (FlashInfer, packed query rows, split-KV) |
| `PrefillWithKVCacheKernel`, `FP8PrefillWithKVCacheKernel` | fa3 (FlashInfer, Hopper) |
| `BatchDecodeWithPagedKVCacheKernel` | cuda-cores (FlashInfer) |
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

TRACED_CALLS = 3
FAMILIES = {
    "BatchPrefillWithPagedKVCacheKernel": "fa2",
    "PrefillWithKVCacheKernel": "fa3",
    "FP8PrefillWithKVCacheKernel": "fa3",
    "BatchDecodeWithPagedKVCacheKernel": "cuda-cores",
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call: function name, launches a call, GPU microseconds a call."""

    name: str
    launches: float
    gpu_us: float


def trace_kernels(call: Callable[[], object]) -> tuple[Kernel, ...]:
    """Kernels of `call`, longest first; RuntimeError if the profiler saw none."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(TRACED_CALLS):
            call()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[short_name(event.name)].append(event.time_range.elapsed_us())
    if not spent:
        raise RuntimeError("torch.profiler saw no GPU activity: is CUPTI in use by another tool?")
    kernels = [
        Kernel(name, len(times) / TRACED_CALLS, round(sum(times) / TRACED_CALLS, 3))
        for name, times in spent.items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.gpu_us))


def short_name(name: str) -> str:
    """A kernel's function name without return type, namespace, template and call arguments."""
    if name.startswith(("Memcpy", "Memset")):
        return name.partition(" (")[0]
    bare = name.replace("(anonymous namespace)", "anonymous")
    while bare != (bare := re.sub(r"<[^<>]*>", "", bare)):
        pass
    words = bare.partition("(")[0].split()
    return words[-1].split("::")[-1] if words else name


def kernel_family(names: Iterable[str]) -> str:
    """The attention kernel family that `names` prove, or the empty string if none is known."""
    found = sorted({FAMILIES[name] for name in names if name in FAMILIES})
    return "+".join(found)
