"""The interface of a backend: `plan`, `run`, and the reasons why it cannot run.

`plan(batch, out=None)` does on the host what depends on lengths only. With `out` it writes into
that plan's buffers: a CUDA graph captured over `run(q, cache, out)` sees the new lengths at the
next replay. `run(q, cache, plan)` is one attention call; its output has the query's shape. A
backend writes `prepare`, which makes or overwrites the state of a plan, and `attend`, the call.

| plans | batch | query | cache |
|---|---|---|---|
| decode | `DecodeBatch` | [bs, num_qo_heads, head_dim] | `PagedKV` |
| extend | `ExtendBatch` | [rows, num_qo_heads, head_dim] | `PagedKV` |
| mla | `MlaBatch` | [bs, num_qo_heads, 576] | tensor, see `core.mla` |
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from ..gpu import HOPPER
from ..schedule import library
from ..schedule.library import FLASH_ATTN_3
from ..spec import require_word
from .table import Entry, installed_version

DEVICES = ("cuda", "cpu")
Batch = TypeVar("Batch", bound=Any)
Cache = TypeVar("Cache")


def require_device(device: object) -> None:
    """ValueError unless a device is `cuda`, with a number or without, or `cpu`."""
    kind, _, _ = str(device).partition(":")
    require_word("device", kind, DEVICES)


@dataclass(eq=False)
class Plan(Generic[Batch]):
    """The result of `plan`."""

    batch: Batch
    """What it was made for, or was last overwritten for."""
    reported_backend: str
    """The backend that the library reports; only a trace proves it."""
    state: Any
    """Belongs to the backend."""


class Backend(ABC, Generic[Batch, Cache]):
    """A wrapper of one library, in the mode of `entry`.

    With `cuda_graph=True` buffers are fixed at the first `plan`, as engines need them for capture.
    `source` names a library that `schedule.library` finds by its modules, not by a distribution.
    """

    source: ClassVar[str] = ""

    def __init__(self, entry: Entry, *, device: str, cuda_graph: bool = False) -> None:
        self.entry = entry
        require_device(device)
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            words = "torch.cuda.is_available() is False"
            raise RuntimeError(f"device must be cpu for {entry.name} here ({words}), got {device}")
        self.cuda_graph = cuda_graph

    def plan(
        self,
        batch: Batch,
        out: Plan[Batch] | None = None,
    ) -> Plan[Batch]:
        """Prepare for `batch`; with `out`, in place of that plan.

        ValueError unless `out` is over as many requests and page-table columns of the same layer.
        """
        held = None
        if out is not None:
            out.batch.require_alike(batch)
            held = out.state
        state = self.prepare(batch, held)
        if out is not None:
            out.batch = batch
        return Plan(batch, self.reported(state), state)

    @abstractmethod
    def prepare(self, batch: Batch, held: Any) -> Any:
        """The state of a plan for `batch`; `held`, if not None, is one whose buffers it takes."""

    def reported(self, state: Any) -> str:
        """The backend that the library reports, or the one that the mode asks for; for
        FlashAttention-3 with the distribution that supplied it."""
        family = self.entry.family or self.entry.name
        if self.source == FLASH_ATTN_3:
            return f"{family} ({library.supplier()})"
        return family

    def run(self, q: Tensor, cache: Cache, plan: Plan[Batch]) -> Tensor:
        """Attention of `q` over `cache`, in the spec's output dtype.

        ValueError for a query of other rows, heads or dtype than the plan's batch, and for other
        pages.
        """
        plan.batch.require_query(q)
        return self.attend(q, cache, plan)

    @abstractmethod
    def attend(self, q: Tensor, cache: Cache, plan: Plan[Batch]) -> Tensor:
        """The library's call for a query that fits the plan. ValueError for other pages."""

    @classmethod
    def unavailable(cls, entry: Entry) -> str:
        """Why the mode cannot run here (and what to install), or the empty string."""
        from packaging.version import Version  # as FlashInfer requires it, this package does not

        name = entry.distribution
        since = entry.since or entry.library.since
        if cls.source:
            lacks = library.missing(cls.source)
        elif not (version := installed_version(name)):
            lacks = f"{name} is not installed: pip install {name}"
        elif since and Version(version) < Version(since):
            lacks = f'{name} {version} has no {entry.name}: pip install "{name}>={since}"'
        else:
            lacks = ""
        return lacks or _lacks_gpu(entry) or (cls.source and library.broken(cls.source))

    @classmethod
    @abstractmethod
    def unsupported(cls, entry: Entry, spec: Any, mask: str) -> str:
        """Why the mode cannot run `spec` under `mask` (library rules), or the empty string."""


def _lacks_gpu(entry: Entry) -> str:
    """Why the GPU cannot run a mode: there is none, or it is not Hopper (wgmma)."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU (torch.cuda.is_available() is False)"
    major, minor = torch.cuda.get_device_capability()
    if entry.hopper and major != HOPPER:
        return f"needs compute capability 9.x (Hopper), got {major}.{minor}"
    return ""
