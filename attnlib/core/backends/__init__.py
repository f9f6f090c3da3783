"""Backend names, and how to get one: each module is imported only when its name is asked for.

`create` never falls back: an unknown name lists the valid ones, a backend that cannot run here
raises with the reason and what to install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...kinds.extend.case import ExtendCase
    from ..spec import AttnSpec, MlaSpec
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

_MLA_CLASSES = {
    "flashinfer-mla-fa2": ("mla", "FlashInferMlaFa2"),
    "flashinfer-mla-fa3": ("mla", "FlashInferMlaFa3"),
    "flashmla-dense": ("mla", "FlashMlaDense"),
    "flashmla-sparse-fp8": ("mla", "FlashMlaSparseFp8"),
}

MLA_BACKENDS = tuple(_MLA_CLASSES)
"""Latent attention: they plan an `MlaBatch`, and answer `unsupported` for an `MlaSpec`."""

_EXTEND_CLASSES = {
    "flashinfer-prefill-auto": ("prefill", "FlashInferPrefillAuto"),
    "flashinfer-prefill-fa2": ("prefill", "FlashInferPrefillFa2"),
    "flashinfer-prefill-fa3": ("prefill", "FlashInferPrefillFa3"),
    "fa3-extend": ("fa3", "Fa3Extend"),
}

EXTEND_BACKENDS = tuple(_EXTEND_CLASSES)
"""Several queries a request: they plan an `ExtendBatch`, `unsupported` takes an `ExtendCase`."""


def backend_class(name: str) -> type[Backend]:
    """The class of a backend name; raises ValueError listing the names there are."""
    return _find(name, _CLASSES, "")


def mla_class(name: str) -> type[Backend]:
    """The class of an MLA backend name; raises ValueError listing the names there are."""
    return _find(name, _MLA_CLASSES, " for MLA")


def extend_class(name: str) -> type[Backend]:
    """The class of a name in `EXTEND_BACKENDS`; raises ValueError listing the names there are."""
    return _find(name, _EXTEND_CLASSES, " for several queries a request")


def create(name: str, spec: AttnSpec, *, device: str = "cuda", cuda_graph: bool = False) -> Backend:
    """A backend ready to `plan` batches of `spec`; raises RuntimeError saying why it cannot."""
    return _able(backend_class(name), spec)(device=device, cuda_graph=cuda_graph)


def create_mla(
    name: str, spec: MlaSpec, *, device: str = "cuda", cuda_graph: bool = False
) -> Backend:
    """An MLA backend ready to `plan` batches of `spec`; RuntimeError saying why it cannot."""
    return _able(mla_class(name), spec)(device=device, cuda_graph=cuda_graph)


def create_extend(
    name: str, case: ExtendCase, *, device: str = "cuda", cuda_graph: bool = False
) -> Backend:
    """A backend ready to `plan` batches like those of `case`; RuntimeError saying why it cannot."""
    return _able(extend_class(name), case)(device=device, cuda_graph=cuda_graph)


def available() -> dict[str, str]:
    """Every backend name with the reason it cannot run here; empty means that it can."""
    attention = {name: backend_class(name).unavailable() for name in BACKENDS}
    latent = {name: mla_class(name).unavailable() for name in MLA_BACKENDS}
    return attention | latent | {n: extend_class(n).unavailable() for n in EXTEND_BACKENDS}


def _find(name: str, classes: dict[str, tuple[str, str]], kind: str) -> type[Backend]:
    if name not in classes:
        raise ValueError(f"backend must be one of {', '.join(classes)}{kind}, got {name!r}")
    module, cls = classes[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)


def _able(cls: type[Backend], spec: AttnSpec | MlaSpec | ExtendCase) -> type[Backend]:
    reason = cls.unavailable() or cls.unsupported(spec)
    if reason:
        raise RuntimeError(f"{cls.name} cannot run {spec}: {reason}")
    return cls
