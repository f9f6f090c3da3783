"""What a backend is: two verbs, `plan` and `run`, and honest answers about what it cannot do.

| verb | does | costs |
|---|---|---|
| `plan(batch, out=None) -> Plan` | all that depends on lengths only | host time, a few copies |
| `run(q, kv, plan) -> out` | one attention call [bs, num_qo_heads, head_dim] | GPU time |

One class per mode of a library. With `out`, `plan` writes into that plan's buffers, so a CUDA graph
captured over `run(q, kv, out)` sees the new lengths at its next replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import torch

from ..batch import DecodeBatch, PagedKV
from ..spec import AttnSpec


@dataclass(frozen=True)
class Plan:
    """What `plan` decided.

    `reported_backend` is the library's own word for the kernel family it chose; the kernels that
    a trace shows are the proof (`measure.trace.kernel_family`). `state` belongs to the backend.
    """

    batch: DecodeBatch
    reported_backend: str
    state: Any


class Backend(ABC):
    """One mode of one library.

    `cuda_graph=True` asks for buffers fixed at the first `plan`, as engines need them for capture.
    """

    name: ClassVar[str]
    distribution: ClassVar[str]
    pinned_family: ClassVar[str] = ""
    """The kernel family that must run; empty where the library may choose."""

    def __init__(self, *, device: str, cuda_graph: bool = False) -> None:
        self.device = torch.device(device)
        self.cuda_graph = cuda_graph

    @abstractmethod
    def plan(self, batch: DecodeBatch, out: Plan | None = None) -> Plan:
        """Prepare for `batch`; with `out`, in place of that plan (same batch size)."""

    @abstractmethod
    def run(self, q: torch.Tensor, kv: PagedKV, plan: Plan) -> torch.Tensor:
        """Attention of `q` [bs, num_qo_heads, head_dim] over `kv`, in the spec's `out_dtype`."""

    @classmethod
    @abstractmethod
    def unavailable(cls) -> str:
        """Why this mode cannot run here (and what to install), or the empty string."""

    @classmethod
    @abstractmethod
    def unsupported(cls, spec: AttnSpec) -> str:
        """Why this mode cannot run `spec` (library rules), or the empty string."""


def missing(distribution: str) -> str:
    """What `distribution` lacks to run here: itself, or a CUDA GPU; or the empty string."""
    if not installed_version(distribution):
        return f"{distribution} is not installed: pip install {distribution}"
    if not torch.cuda.is_available():
        return "needs a CUDA GPU (torch.cuda.is_available() is False)"
    return ""


def not_hopper() -> str:
    """Why the current GPU lacks Hopper's instructions (wgmma), or the empty string."""
    major, minor = torch.cuda.get_device_capability()
    return "" if major == 9 else f"needs compute capability 9.x (Hopper), got {major}.{minor}"


def installed_version(distribution: str) -> str:
    """Version of an installed distribution, or the empty string."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
