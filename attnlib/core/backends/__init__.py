"""Backends by name. A module is imported when one of its backends is needed.

`create` never falls back: an unknown name lists the valid names, a backend that cannot run here
raises with the reason and what to install. `table` lists the backends.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..spec import MASKS, AttnSpec, MlaSpec, require_word
from .table import BACKENDS, EXTEND_BACKENDS, MLA_BACKENDS, TABLE, entry_of

if TYPE_CHECKING:
    from .base import Backend

__all__ = ["BACKENDS", "EXTEND_BACKENDS", "MLA_BACKENDS", "TABLE", "entry_of"]


def backend_class(name: str) -> type[Backend[Any, Any]]:
    """The class of a backend; ValueError lists the valid names."""
    module, _, cls = entry_of(name).code.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)


def unavailable(name: str) -> str:
    """Why a backend cannot run here, and what to install, or the empty string."""
    return backend_class(name).unavailable(entry_of(name))


def unsupported(name: str, spec: AttnSpec | MlaSpec, *, mask: str = "causal") -> str:
    """Why a backend's library cannot run `spec` under `mask`, or the empty string."""
    require_word("mask", mask, MASKS)
    entry = entry_of(name)
    layer = MlaSpec if entry.plans == "mla" else AttnSpec
    if not isinstance(spec, layer):
        raise TypeError(f"spec must be an {layer.__name__} for {name}, got {type(spec).__name__}")
    if entry.plans == "extend" and isinstance(spec, AttnSpec) and spec.window:
        return f"window must be 0 for several queries per request, got {spec.window}"
    return backend_class(name).unsupported(entry, spec, mask)


def create(
    name: str,
    spec: AttnSpec | MlaSpec,
    *,
    mask: str = "causal",
    device: str = "cuda",
    cuda_graph: bool = False,
) -> Backend[Any, Any]:
    """A backend ready to `plan` batches of `spec` under `mask`; RuntimeError if it cannot."""
    if reason := unavailable(name) or unsupported(name, spec, mask=mask):
        raise RuntimeError(f"{name} cannot run {spec}: {reason}")
    return backend_class(name)(entry_of(name), device=device, cuda_graph=cuda_graph)


def available() -> dict[str, str]:
    """Every backend name with the reason it cannot run here; empty means that it can."""
    return {name: unavailable(name) for name in TABLE}
