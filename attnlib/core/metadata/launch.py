"""Launch an already compiled Triton kernel directly: the one place that knows how Triton does it.

`kernel[grid](...)` binds arguments and looks its cache up at every call, which takes longer than a
short kernel runs. `DirectLaunches` keeps what the first call found and calls the compiled kernel's
own launcher. It relies on the launcher's first nine arguments, which `require_known_launcher`
compares with what it was written for (Triton 3.6 and 3.7), so another Triton is an error and not a
wrong launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

LAUNCHER_ARGUMENTS = (
    "gridX",
    "gridY",
    "gridZ",
    "stream",
    "function",
    "kernel_metadata",
    "launch_metadata",
    "launch_enter_hook",
    "launch_exit_hook",
)
ACCESS_BYTES = 16
"""Of the widest load; Triton compiles another kernel for pointers that are no multiples of it."""
HOPPER = 9
NO_OVERLAP, WAIT, WAIT_AND_LET_START = 0, 1, 2
"""Programmatic dependent launch: none; start early and wait for the kernel before; let the kernel
after us start early too, which only pays while our whole grid is on the GPU at once."""


_OVERLAPPING = ContextVar("overlapping", default=True)


@contextmanager
def without_overlap() -> Iterator[None]:
    """Launch kernels one after the other, so that a measurement can tell what the overlap gives."""
    token = _OVERLAPPING.set(False)
    try:
        yield
    finally:
        _OVERLAPPING.reset(token)


class DirectLaunches:
    """Launches of one kernel whose arguments differ in values and addresses only.

    The caller makes one for each signature (shapes, dtypes): what Triton would compile another
    kernel for, except constants, warps, the pointers' alignment and the overlap, which are told
    apart here. The kernel's last parameter is the overlap.
    """

    def __init__(self, kernel: Any, device: torch.device) -> None:
        self._kernel = kernel
        self._index = device.index or 0
        self._slots = _slots(device)
        self._ready: dict[tuple[Any, ...], _Ready] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[torch.Tensor | None, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
    ) -> None:
        """Launch on the current stream: tensors, then numbers, constants and the overlap."""
        overlap = self._overlap(grid[0] * grid[1])
        key = (overlap, num_warps, constants)
        pointers, seen = [], 0
        for tensor in tensors:
            pointer = None if tensor is None else tensor.data_ptr()
            pointers.append(pointer)
            seen |= pointer or 0
        aligned = not seen % ACCESS_BYTES
        ready = self._ready.get(key) if aligned else None
        if ready is not None:
            ready(grid, self._index, (*pointers, *numbers, *constants, overlap))
            return
        options = {"launch_pdl": True} if overlap else {}
        arguments = (*tensors, *numbers, *constants, overlap)
        compiled = self._kernel[grid](*arguments, num_warps=num_warps, **options)
        if aligned and not interpreting():
            self._ready[key] = _Ready(compiled)

    def _overlap(self, programs: int) -> int:
        # A waiting successor takes slots that programs of ours have not had yet.
        if not self._slots or not _OVERLAPPING.get():
            return NO_OVERLAP
        return WAIT_AND_LET_START if programs <= self._slots else WAIT


@dataclass(frozen=True)
class Known:
    """A signature that has passed every check, and what follows from it.

    `reachable` is the largest `max_pages` (or `decode_length`) that its tensors have room for.
    """

    batch: int
    reachable: int
    scalars: tuple[int, ...]
    constants: tuple[Any, ...]
    launches: DirectLaunches = field(compare=False)
    warps: int = 4
    turns: int = 1


def remember(
    cache: dict[tuple[Any, ...], Known], signature: tuple[Any, ...] | None, known: Known
) -> Known:
    """Keep `known` for the next call with its signature; one without is checked every time."""
    return known if signature is None else cache.setdefault(signature, known)


def _slots(device: torch.device) -> int:
    """Programs that are on the GPU at once, two a multiprocessor; 0 where none can overlap."""
    if interpreting() or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return 0
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


class _Ready:
    """A compiled kernel with what its launcher wants at every call."""

    def __init__(self, compiled: Any) -> None:
        require_known_launcher(compiled.run)
        self._compiled = compiled
        self._run = compiled.run
        self._function = compiled.function
        self._packed = compiled.packed_metadata

    def __call__(self, grid: tuple[int, int], device: int, arguments: tuple[Any, ...]) -> None:
        # Triton takes an integer for a pointer as it is.
        hooks = knobs.runtime
        if _idle(hooks.launch_enter_hook) and _idle(hooks.launch_exit_hook):
            stream = driver.active.get_current_stream(device)
            fixed = (stream, self._function, self._packed, None, None, None)
            self._run(grid[0], grid[1], 1, *fixed, *arguments)
        else:
            self._compiled[(*grid, 1)](*arguments)


def _idle(hook: Any) -> bool:
    """Whether nobody hears of launches: no hook, or a chain of none, which costs two calls."""
    return hook is None or not getattr(hook, "calls", True)


def require_known_launcher(launcher: Any) -> None:
    """RuntimeError unless a launcher takes the arguments that this module passes.

    Triton 3.6 names the first five and takes the others in `*args`, 3.7 names nine.
    """
    *named, rest = inspect.signature(launcher).parameters
    if len(named) not in (5, 9) or tuple(named) != LAUNCHER_ARGUMENTS[: len(named)]:
        raise RuntimeError(
            f"Triton {triton.__version__} launches with {(*named, rest)}, this module was written "
            f"for {LAUNCHER_ARGUMENTS} and the kernel's own: install triton>=3.6,<3.8"
        )


def interpreting() -> bool:
    """Whether Triton runs kernels in Python, on the CPU (TRITON_INTERPRET=1)."""
    return knobs.runtime.interpret


def require_launchable(device: torch.device) -> None:
    """Raise unless kernels can be launched for tensors on `device`, which must be the current."""
    if interpreting():
        return
    if device.type != "cuda":
        raise ValueError(
            f"tensors must be on a CUDA device (or set TRITON_INTERPRET=1 to run the kernel in "
            f"Python), got {device}"
        )
    if device.index != torch.cuda.current_device():
        raise ValueError(
            f"tensors must be on the current CUDA device {torch.cuda.current_device()}, "
            f"got {device}: use torch.cuda.device({device.index})"
        )
