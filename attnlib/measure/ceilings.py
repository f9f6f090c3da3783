"""Rates the GPU really reaches, measured with the same timer as the kernels they judge.

| ceiling | how | counts |
|---|---|---|
| `copy` | device-to-device copy of 4 GiB | bytes read plus bytes written |
| `matmul` | 8192 x 8192 x 8192 bf16 product of random data, cuBLAS | 2 n^3 FLOPs |
"""

from __future__ import annotations

from collections.abc import Callable

import torch

COPY_BYTES = 4 * 2**30
MATMUL_SIZE = 8192


def copy_call() -> tuple[Callable[[], object], float]:
    """A device copy and the bytes it moves (read plus written)."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2.0 * COPY_BYTES


def matmul_call() -> tuple[Callable[[], object], float]:
    """A bf16 matrix product and its FLOPs; random data, because zeros run faster."""
    a, b = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * MATMUL_SIZE**3


CEILINGS = {"copy": copy_call, "matmul": matmul_call}
