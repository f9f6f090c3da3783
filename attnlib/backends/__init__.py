"""Backend names, and how to get one: each module is imported only when its name is asked for.

`create` never falls back: an unknown name lists the valid ones, a backend that cannot run here
raises with the reason and what to install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..batch import AttnSpec
    from .base import Backend

_CLASSES = {
    "sdpa": ("sdpa", "Sdpa"),
    "flashinfer-auto": ("flashinfer", "FlashInferAuto"),
    "flashinfer-fa2": ("flashinfer", "FlashInferFa2"),
    "flashinfer-fa3": ("flashinfer", "FlashInferFa3"),
    "flashinfer-cuda-cores": ("flashinfer", "FlashInferCudaCores"),
    "flashinfer-graph-auto": ("flashinfer", "FlashInferGraphAuto"),
    "fa3": ("fa3", "Fa3"),
    "fa3-precomputed": ("fa3", "Fa3Precomputed"),
}

BACKENDS = tuple(_CLASSES)


def backend_class(name: str) -> type[Backend]:
    """The class of a backend name; raises ValueError listing the names there are."""
    if name not in _CLASSES:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    module, cls = _CLASSES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)


def create(name: str, spec: AttnSpec, *, device: str = "cuda", cuda_graph: bool = False) -> Backend:
    """A backend ready to `plan` batches of `spec`; raises RuntimeError saying why it cannot."""
    cls = backend_class(name)
    reason = cls.unavailable() or cls.unsupported(spec)
    if reason:
        raise RuntimeError(f"{name} cannot run {spec}: {reason}")
    return cls(device=device, cuda_graph=cuda_graph)


def available() -> dict[str, str]:
    """Every backend name with the reason it cannot run here; empty means that it can."""
    return {name: backend_class(name).unavailable() for name in BACKENDS}
