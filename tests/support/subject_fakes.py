"""A backend that computes the oracle's own output, and a worker that measures it without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlib.core import backends
from attnlib.kinds import call
from attnlib.kinds.item import Item
from attnlib.run.record import Record
from attnlib.run.worker import Worker


@dataclass
class OracleBackend:
    """Gives `attend`'s output, off by `factor`; any call of it runs kernels of `family`."""

    attend: Callable[..., torch.Tensor]
    pinned_family: str
    family: str = ""
    factor: float = 1.0
    missing: str = ""
    refusal: str = ""
    name = distribution = "torch"

    def unavailable(self) -> str:
        return self.missing

    def unsupported(self, asked: Any) -> str:
        return self.refusal

    def plan(self, batch: Any, out: Any = None) -> Any:
        return SimpleNamespace(batch=batch, reported_backend="oracle")

    def run(self, q: torch.Tensor, kv: Any, plan: Any) -> torch.Tensor:
        return (self.attend(q, kv, plan.batch) * self.factor).bfloat16()


def measure_with(
    backend: OracleBackend, item: Item, kind: str, monkeypatch: pytest.MonkeyPatch
) -> Record:
    """The record of `item`, run by `backend` in place of the `kind`'s (`mla`, `extend`) own."""
    monkeypatch.setattr(backends, f"{kind}_class", lambda name: backend)
    monkeypatch.setattr(backends, f"create_{kind}", lambda name, asked, **_: backend)
    ran = backend.family or backend.pinned_family
    monkeypatch.setattr(call, "kernel_family", lambda names: ran)
    return measure(item, "cpu")


def measure(item: Item, device: str) -> Record:
    """The record that a worker makes of `item`."""
    job = {"study": "demo", "round": 0, "device": device, "command": "repeat me"}
    return Worker(job).measure(item)
