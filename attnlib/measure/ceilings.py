"""Rates the GPU really reaches, measured with the same timer as the kernels they judge.

| ceiling | how | counts |
|---|---|---|
| `copy` | elementwise kernel over 4 GiB, out of place | bytes read plus bytes written |
| `read` | sum of 4 GiB, a reduction that writes next to nothing | bytes read |
| `matmul` | 8192 x 8192 x 8192 bf16 product of random data, cuBLAS | 2 n^3 FLOPs |
| `launch` | an empty Triton kernel, hundreds in one graph: what each kernel costs | launches |
| `gather` | 2 M words, one in every 64 bytes of 2 GiB, read and stored densely | words |

The copy is a kernel (negation), not a memcpy: inside a graph a memcpy node goes to a copy engine,
which on an H200 reaches 2.8 TB/s where a kernel reaches 4 and more.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

COPY_BYTES = 4 * 2**30
GATHER_WORDS, GATHER_STRIDE, GATHER_BLOCK = 2**21, 16, 1024
MATMUL_SIZE = 8192


@triton.jit
def do_nothing_kernel() -> None:
    """Nothing: the launch is what is measured."""


@triton.jit
def gather_kernel(source, target, STRIDE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One word in STRIDE, nothing else: no lengths, no tables, no tails."""
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + words, tl.load(source + words * STRIDE))


Ceiling = tuple[Callable[[], object], float]
"""The call that is timed, and what it counts."""


def _copy() -> Ceiling:
    source = torch.randn(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return lambda: torch.neg(source, out=target), 2.0 * COPY_BYTES


def _read() -> Ceiling:
    source = torch.randn(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    out = torch.empty((), dtype=torch.float32, device="cuda")
    return lambda: torch.sum(source, dim=0, out=out), float(COPY_BYTES)


def _launch() -> Ceiling:
    return lambda: do_nothing_kernel[(1,)](), 1.0


def _gather() -> Ceiling:
    source = torch.zeros(512 * 2**20, dtype=torch.int32, device="cuda")
    target = torch.empty(GATHER_WORDS, dtype=torch.int32, device="cuda")
    grid = (GATHER_WORDS // GATHER_BLOCK,)
    constants = {"STRIDE": GATHER_STRIDE, "BLOCK": GATHER_BLOCK}
    return lambda: gather_kernel[grid](source, target, **constants), float(GATHER_WORDS)


def _matmul() -> Ceiling:
    # Random data, because zeros run faster.
    a, b = torch.randn((2, MATMUL_SIZE, MATMUL_SIZE), device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * MATMUL_SIZE**3


CEILINGS = {"copy": _copy, "read": _read, "matmul": _matmul, "launch": _launch, "gather": _gather}
