"""Launch Triton kernels: check a signature once, then call the compiled kernel's own launcher.

`kernel[grid](...)` binds arguments and looks its cache up at every call, which takes longer than a
short kernel runs. A `Launcher` keeps what the first call found, per signature (shapes, dtypes,
device), and calls the compiled kernel directly. It relies on the first nine arguments of Triton's
launcher (3.6 and 3.7), so `require_known_launcher` makes another Triton an error.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver

from ..gpu import HOPPER
from .require import EveryCall

LAUNCHER_ARGUMENTS = (
    *("gridX", "gridY", "gridZ", "stream", "function", "kernel_metadata"),
    *("launch_metadata", "launch_enter_hook", "launch_exit_hook"),
)
ACCESS_BYTES = 16
"""Of the widest load; Triton compiles another kernel for pointers that are no multiples of it."""
NO_OVERLAP, WAIT, WAIT_AND_LET_START = 0, 1, 2
"""Programmatic dependent launch: none; start early and wait for the kernel before; let the kernel
after us start early too, which only pays while our whole grid is on the GPU at once."""

Tensors = tuple[Any, ...]
Numbers = tuple[int, ...]
Grid = tuple[int, int]
Launch = Callable[[Grid, int, tuple[Any, ...]], None]
Signature = tuple[Any, ...] | None
"""All of a call that checks on tensors look at, but values and addresses; hashable. None where
something cannot be right (no tensor, several devices), and off CUDA devices: then there is nothing
to remember."""
MAX_KNOWN = 4096  # signatures; eager steps bring ever new ones, as wide as their lengths
_OVERLAPPING = ContextVar("overlapping", default=True)


@contextmanager
def without_overlap() -> Iterator[None]:
    """Launch kernels one after the other, so that a measurement can tell what the overlap gives."""
    token = _OVERLAPPING.set(False)
    try:
        yield
    finally:
        _OVERLAPPING.reset(token)


class Derived(NamedTuple):
    """What follows from a signature: `cut(*numbers)` is (grid, constants, warps) of a call."""

    batch: int
    scalars: tuple[int, ...]
    cut: Callable[..., tuple[Grid, tuple[Any, ...], int]]


@dataclass(frozen=True)
class _Known:
    """A signature that has passed every check, and its compiled kernels."""

    bounds: tuple[tuple[int, int], ...]
    apart: tuple[tuple[int, int, bool], ...]
    batch: int
    scalars: tuple[int, ...]
    cut: Callable[..., tuple[Grid, tuple[Any, ...], int]]
    device: int
    slots: int
    ready: dict[tuple[Any, ...], Launch] = field(default_factory=dict)

    def takes(self, numbers: Numbers, pointers: list[int | None]) -> bool:
        """Whether a call has passed what its signature does not hold."""
        for number, (low, high) in zip(numbers, self.bounds):  # noqa: B905 (strict is 0.2 us)
            if type(number) is not int or not low <= number <= high:
                return False
        for one, other, may_rest in self.apart:
            if pointers[one] == pointers[other] and (numbers[0] or not may_rest):
                return False
        return True


class Launcher:
    """Launches `kernel` for its builder: the one place that checks, remembers and launches.

    A call is tensors (named by `bundle`), fixed arguments (hashable, part of the signature) and
    numbers (runtime values). The kernel's parameters are the tensors, then batch, numbers,
    `Derived.scalars`, constants, and last the overlap. `require(bundle, *fixed, *numbers)` raises
    for a wrong call and says what every call is looked at for, `derive(bundle, *fixed)` says what
    follows; neither is called again for a known signature.
    """

    def __init__(
        self,
        kernel: Any,
        bundle: Callable[..., Any],
        require: Callable[..., EveryCall],
        derive: Callable[..., Derived],
        **options: Any,
    ) -> None:
        self.kernel, self.options = kernel, options
        self.known: dict[Signature, _Known] = {}
        self._bundle, self._require, self._derive = bundle, require, derive

    def launch(self, tensors: Tensors, fixed: tuple[Any, ...], numbers: Numbers) -> None:
        """Launch on the current stream, or raise as `require` does with nothing launched."""
        signature, pointers, aligned = signed(tensors, fixed)
        known = self.known.get(signature)
        if known is None or not known.takes(numbers, pointers):
            known = self._checked(signature, tensors, fixed, numbers)
        grid, constants, warps = known.cut(*numbers)
        overlap = overlap_of(grid[0] * grid[1], known.slots)
        key = (overlap, warps, constants)
        ready = known.ready.get(key) if aligned else None
        if ready is not None:
            values = (*pointers, known.batch, *numbers, *known.scalars, *constants, overlap)
            return ready(grid, known.device, values)
        options = {**self.options, "launch_pdl": True} if overlap else self.options
        values = (*tensors, known.batch, *numbers, *known.scalars, *constants, overlap)
        compiled = self.kernel[grid](*values, num_warps=warps, **options)
        if aligned and not interpreting():
            known.ready[key] = _ready(compiled)

    def _checked(
        self, signature: Signature, tensors: Tensors, fixed: tuple[Any, ...], numbers: Numbers
    ) -> _Known:
        bundle = self._bundle(*tensors)
        bounds, apart = self._require(bundle, *fixed, *numbers)
        device = bundle[0].device
        require_launchable(device)
        batch, scalars, cut = self._derive(bundle, *fixed)
        known = _Known(bounds, apart, batch, scalars, cut, device.index or 0, _slots(device))
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        return known if signature is None else self.known.setdefault(signature, known)


def signed(tensors: Tensors, fixed: tuple[Any, ...]) -> tuple[Signature, list[int | None], bool]:
    """The signature, the addresses, and whether those are all multiples of ACCESS_BYTES.

    One loop, because every step that no graph replays makes it.
    """
    parts: list[Any] = [*fixed, *map(type, fixed)]
    pointers: list[int | None] = []
    bits = 0
    try:
        device = tensors[0].get_device()
        parts.append(device)
        for tensor in tensors:
            if tensor is None:
                parts.append(None)
                pointers.append(None)
                continue
            if tensor.get_device() != device:
                return None, pointers, False
            if not tensor.is_contiguous():
                parts.append(tensor.stride())
            parts.append(tensor.shape)
            parts.append(tensor.dtype)
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            bits |= pointer
    except AttributeError:
        return None, pointers, False
    return tuple(parts) if device >= 0 else None, pointers, not bits % ACCESS_BYTES


def overlap_of(programs: int, slots: int) -> int:
    """The overlap of a launch, where `slots` programs are on the GPU at once, 0 if none overlap.

    A waiting successor takes slots that programs of ours have not had yet.
    """
    if not slots or not _OVERLAPPING.get():
        return NO_OVERLAP
    return WAIT_AND_LET_START if programs <= slots else WAIT


def _slots(device: torch.device) -> int:
    """Programs that surely are on the GPU at once, two per multiprocessor (LOG.md, 2026-11-21,
    overlapping launches); 0 where none can overlap."""
    if interpreting() or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return 0
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def _ready(compiled: Any) -> Launch:
    """Launch a compiled kernel with what its own launcher wants at every call."""
    require_known_launcher(compiled.run)
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def launch(grid: Grid, device: int, values: tuple[Any, ...]) -> None:
        # Triton takes an integer for a pointer as it is.
        if heard(knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
            compiled[(*grid, 1)](*values)
            return
        stream = driver.active.get_current_stream(device)
        run(*grid, 1, stream, function, packed, None, None, None, *values)

    return launch


def heard(enter: Any, leave: Any) -> bool:
    """Whether somebody hears of launches: a hook, or a chain of them that is not empty."""
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


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
