"""Rates the GPU really reaches, measured with the same timer as the kernels they judge.

| ceiling | how | counts |
|---|---|---|
| `copy` | elementwise kernel over 4 GiB, out of place | bytes read plus bytes written |
| `matmul` | 8192 x 8192 x 8192 bf16 product of random data, cuBLAS | 2 n^3 FLOPs |

The copy is a kernel (negation), not a memcpy: inside a graph a memcpy node goes to a copy engine,
which on an H200 reaches 2.8 TB/s where a kernel reaches 4 and more.
"""

from collections.abc import Callable

import torch

COPY_BYTES = 4 * 2**30
MATMUL_SIZE = 8192
Ceiling = tuple[Callable[[], object], float]
"""The call that is timed, and what it counts."""


def _copy() -> Ceiling:
    source = torch.randn(
        COPY_BYTES // 2,
        dtype=torch.bfloat16,
        device="cuda",
    )
    target = torch.empty_like(source)
    return lambda: torch.neg(source, out=target), 2.0 * COPY_BYTES


def _matmul() -> Ceiling:
    # Random data, because zeros run faster.
    shape = (2, MATMUL_SIZE, MATMUL_SIZE)
    a, b = torch.randn(
        shape,
        device="cuda",
        dtype=torch.bfloat16,
    )
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * MATMUL_SIZE**3


CEILINGS = {"copy": _copy, "matmul": _matmul}
