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
    """A backend ready to plan batches of a layer. It never falls back to another one.

    Parameters
    ----------
    name : str
        One of `BACKENDS`, `MLA_BACKENDS` or `EXTEND_BACKENDS`; `available` lists them.
    spec : AttnSpec or MlaSpec
        The layer.
    mask : str
        `causal`, `full`, `tree` or `chain`; the last two are custom masks, passed bit by bit.
    device : str
        Where its buffers are.
    cuda_graph : bool
        Whether `run` will be captured: buffers are fixed at the first `plan`.

    Returns
    -------
    Backend
        With `plan(batch, out=None)`, on the host, and `run(q, cache, plan)`, one attention call.

    Raises
    ------
    ValueError
        For an unknown name or mask.
    RuntimeError
        If the backend cannot run here or on `device`, or cannot run the layer, with the reason.

    Examples
    --------
    One decode step of two requests, of 5 and 2 tokens, over pages of 4 tokens:

    >>> import torch
    >>> from attnlib.core import AttnSpec, DecodeBatch, PagedKV
    >>> spec = AttnSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=4)
    >>> seq_lens = torch.tensor([5, 2], dtype=torch.int32)
    >>> page_table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    >>> batch = DecodeBatch.build(spec, seq_lens, page_table)
    >>> k_cache = torch.randn(3, 4, 2, 64, dtype=torch.bfloat16)
    >>> cache = PagedKV(k_cache, torch.randn_like(k_cache))
    >>> backend = create("sdpa", spec, device="cpu")
    >>> plan = backend.plan(batch)
    >>> q = torch.randn(2, 4, 64, dtype=torch.bfloat16)
    >>> backend.run(q, cache, plan).shape
    torch.Size([2, 4, 64])
    """
    if reason := unavailable(name) or unsupported(name, spec, mask=mask):
        raise RuntimeError(f"{name} cannot run {spec}: {reason}")
    return backend_class(name)(entry_of(name), device=device, cuda_graph=cuda_graph)


def available() -> dict[str, str]:
    """Every backend name with the reason it cannot run here; empty means that it can.

    Returns
    -------
    dict of str to str
        Name -> reason, and what to install.

    Examples
    --------
    >>> available()["sdpa"]
    ''
    >>> [name for name, reason in available().items() if not reason][:1]
    ['sdpa']
    """
    return {name: unavailable(name) for name in TABLE}
