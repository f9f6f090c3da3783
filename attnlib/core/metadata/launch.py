"""Launch Triton kernels with checked arguments.

First call with new shapes: check, compile, remember. Later calls: compare the shapes, launch.
What is remembered is the compiled kernel: `kernel[grid](...)` binds its arguments anew at each
call, which takes longer than a short kernel runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from ..gpu import HOPPER
from ..spec import require_int

ACCESS_BYTES = 16
"""The widest load; Triton compiles another kernel for pointers that are not multiples of it."""
NO_OVERLAP = 0
"""No programmatic dependent launch."""
WAIT = 1
"""Start early, and wait for the previous kernel."""
WAIT_AND_LET_START = 2
"""Also let the next kernel start early: it pays only while our whole grid is resident."""
OLDEST_TRITON = (3, 6)
"""With older ones no kernel was tried; an engine's environment may have one."""
MAX_REMEMBERED = 4096
"""Shapes; eager steps bring new ones all the time."""

Grid = tuple[int, int]
Cut = tuple[Grid, tuple[Any, ...], int]
"""Grid, the kernel's constants, and the warps of a program."""
Arguments = tuple[Any, ...]
Numbers = tuple[int, ...]
Pointers = list[int | None]
_OVERLAPPING = ContextVar("overlapping", default=True)


@contextmanager
def without_overlap() -> Iterator[None]:
    """Launch kernels one after the other, to measure what the overlap gives.

    On Hopper and later a kernel of ours may start before the previous one has ended (programmatic
    dependent launch). Within this context none does.

    Examples
    --------
    >>> with without_overlap():  # doctest: +SKIP
    ...     build_decode_metadata(**call)
    """
    token = _OVERLAPPING.set(False)
    try:
        yield
    finally:
        _OVERLAPPING.reset(token)


class Bound(NamedTuple):
    """A number of a call: its name, its largest value (the least is 0), and why."""

    name: str
    largest: int
    reason: str = ""


class Span(NamedTuple):
    """Where a tensor's words lie: `rows` of `width` bytes, `pitch` bytes apart."""

    rows: int
    width: int
    pitch: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Span":
        """Of a tensor that is contiguous, or whose rows are."""
        size = tensor.element_size()
        if tensor.is_contiguous():
            width = tensor.numel() * size
            return cls(1, width, width)
        rows, columns = tensor.shape
        return cls(rows, columns * size, tensor.stride(0) * size)

    @property
    def end(self) -> int:
        """Bytes from the first word to the end of the last one."""
        return (self.rows - 1) * self.pitch + self.width

    def overlaps(self, other: "Span", distance: int) -> bool:
        """Whether a word of `other`, which begins `distance` bytes after this one, is one of ours.

        Rows of one pitch may lie between each other, as columns of one buffer do, and a single row
        between the rows of the other. Else whatever lies in the range of the other overlaps.
        """
        if not (self.width and other.width):
            return False
        if distance < 0:
            return other.overlaps(self, -distance)
        if distance >= self.end:
            return False
        if self.rows == 1 or (other.rows > 1 and other.pitch != self.pitch):
            return True
        beside = distance % self.pitch
        return beside < self.width or beside + other.width > self.pitch


class Apart(NamedTuple):
    """Positions of an output and of a tensor that must not share memory with it.

    Other programs still read an input while the output is written. With `same_if_zero` both may be
    one tensor where the call's first number, a length delta, is 0.
    """

    other: int
    output: int
    names: tuple[str, str]
    spans: tuple[Span, Span]
    same_if_zero: bool = False


@dataclass(frozen=True)
class Launch:
    """The launch for shapes that passed their checks, and what each call is still checked for.

    `sizes` are the kernel's arguments after the numbers. `cut(*numbers)` gives the grid, the
    kernel's constants and the warps of a program.
    """

    bounds: tuple[Bound, ...]
    apart: tuple[Apart, ...]
    sizes: tuple[int, ...]
    cut: Callable[..., Cut]
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    found_apart: set[tuple[Any, ...]] = field(default_factory=set)
    """Addresses that passed: engines pass the same buffers in every step."""

    def check_numbers(self, numbers: Numbers) -> None:
        """Raise for a number out of range."""
        for number, bound in zip(numbers, self.bounds, strict=True):
            if type(number) is int and 0 <= number <= bound.largest:
                continue
            require_int(bound.name, number, least=0)
            if number > bound.largest:
                raise ValueError(
                    f"{bound.name} must be <= {bound.largest}{bound.reason}, got {number}"
                )

    def check_apart(self, pointers: Pointers, delta: int) -> None:
        """Raise where an output shares memory with another tensor."""
        key = (*pointers, bool(delta))
        if key in self.found_apart:
            return
        for other, output, names, (others, outputs), same_if_zero in self.apart:
            distance = (pointers[output] or 0) - (pointers[other] or 0)
            if distance == 0 and same_if_zero and not delta:
                continue
            if others.overlaps(outputs, distance):
                raise ValueError(
                    f"{names[1]} must not share memory with {names[0]}, got one that begins "
                    f"{distance} bytes after it"
                )
        if len(self.found_apart) >= MAX_REMEMBERED:
            self.found_apart.clear()
        self.found_apart.add(key)


class Launcher:
    """Launches `kernel` for its builder.

    A call is tensors, structure (hashable arguments that the launch depends on) and numbers
    (runtime values). `prepare(tensors, *structure)` raises for wrong tensors or structure, or
    returns their `Launch`. The kernel's parameters are the tensors, the numbers, `Launch.sizes`,
    the constants, and last the overlap.
    """

    def __init__(self, kernel: Any, prepare: Callable[..., Launch]) -> None:
        self.kernel = kernel
        self.prepare = prepare
        self.remembered: dict[tuple[Any, ...], Launch] = {}

    def check(
        self,
        tensors: Arguments,
        structure: Arguments,
        numbers: Numbers,
    ) -> tuple[Launch, Pointers]:
        """The launch and the tensors' addresses, or the error for a wrong argument."""
        shapes, pointers = shapes_of(tensors, structure)
        launch = None if shapes is None else self.remembered.get(shapes)
        if launch is None:
            launch = self.prepare(tensors, *structure)
            require_launchable(tensors[0].device)
        launch.check_numbers(numbers)
        launch.check_apart(pointers, numbers[0])
        if shapes is not None and shapes not in self.remembered:
            if len(self.remembered) >= MAX_REMEMBERED:
                self.remembered.clear()
            self.remembered[shapes] = launch
        return launch, pointers

    def launch(
        self,
        tensors: Arguments,
        structure: Arguments,
        numbers: Numbers,
        require_values: Callable[[], None] | None = None,
    ) -> None:
        """Launch on the current stream, or raise with nothing launched; `require_values` may raise
        for what lies in checked tensors."""
        launch, pointers = self.check(tensors, structure, numbers)
        if require_values is not None:
            require_values()
        grid, constants, warps = launch.cut(*numbers)
        at_once = programs_at_once(tensors[0].get_device())
        overlap = overlap_of(grid[0] * grid[1], at_once)
        values = (*numbers, *launch.sizes, *constants, overlap)
        key = (overlap, warps, constants)
        aligned = not any(pointer and pointer % ACCESS_BYTES for pointer in pointers)
        if aligned and key in launch.compiled:
            # Triton takes an address for a tensor.
            launch.compiled[key][(*grid, 1)](*pointers, *values)
            return
        options = {"launch_pdl": True} if overlap else {}
        compiled = self.kernel[grid](*tensors, *values, num_warps=warps, **options)
        if aligned and not interpreting():
            launch.compiled[key] = compiled


def shapes_of(
    tensors: Arguments,
    structure: Arguments,
) -> tuple[Arguments | None, Pointers]:
    """A hashable key of all that `prepare` reads, and the tensors' addresses.

    The key is None where something must be wrong (not a tensor, several devices, another device
    than the current one), and off CUDA devices: nothing is remembered then.
    """
    parts: list[Any] = [*structure, *map(type, structure)]
    pointers: Pointers = []
    devices = set()
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
            pointers.append(None)
        elif isinstance(tensor, Tensor):
            devices.add(tensor.get_device())
            parts += (tensor.shape, tensor.stride(), tensor.dtype)
            pointers.append(tensor.data_ptr())
        else:
            return None, pointers
    is_one_gpu = len(devices) == 1 and min(devices) >= 0  # -1: the CPU
    if not is_one_gpu or devices != {torch.cuda.current_device()}:
        return None, pointers
    return (*parts, *devices), pointers


def overlap_of(programs: int, at_once: int) -> int:
    """The overlap of a launch of `programs` programs; 0 if none can overlap.

    A successor that waits takes places that our own programs have not had yet.
    """
    if not at_once or not _OVERLAPPING.get():
        return NO_OVERLAP
    return WAIT_AND_LET_START if programs <= at_once else WAIT


@cache
def programs_at_once(device: int) -> int:
    """Programs that are resident on a GPU together, two per SM; 0: no overlap there."""
    if interpreting() or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return 0
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def interpreting() -> bool:
    """Whether Triton runs kernels in Python, on the CPU (TRITON_INTERPRET=1)."""
    return knobs.runtime.interpret


def require_launchable(device: torch.device) -> None:
    """Raise unless kernels can be launched for tensors on `device`, which must be the current."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        raise RuntimeError(f"triton must be {oldest} or newer, got {triton.__version__}")
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
