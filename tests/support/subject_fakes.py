"""A backend that computes the oracle's own output, and a worker that measures it without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from attnlib.core import backends
from attnlib.kinds import call
from attnlib.run.worker import Worker


@dataclass
class OracleBackend:
    """Gives `attend`'s output, off by `factor`; any call of it runs kernels of `family`.

    An empty family is the one that is pinned. `refusal` may name the `{mask}` of the call.
    """

    attend: Callable[..., torch.Tensor]
    family: str = ""
    factor: float = 1.0
    missing: str = ""
    refusal: str = ""

    def plan(self, batch, out=None):
        return SimpleNamespace(batch=batch, reported_backend="oracle")

    def run(self, q, kv, plan):
        return (self.attend(q, kv, plan.batch) * self.factor).bfloat16()


def measure_with(backend, item, monkeypatch):
    """The record of `item`, run by `backend` in place of its own."""
    monkeypatch.setattr(backends, "unavailable", lambda name: backend.missing)
    monkeypatch.setattr(
        backends, "unsupported", lambda name, spec, mask: backend.refusal.format(mask=mask)
    )
    monkeypatch.setattr(backends, "create", lambda name, spec, **_: backend)
    ran = backend.family or backends.TABLE[item.backend].family
    monkeypatch.setattr(call, "kernel_family", lambda names, family_of: ran)
    return measure(item)


def measure(item, device="cpu"):
    """The record that a worker makes of `item`."""
    job = {"study": "demo", "round": 0, "device": device, "command": "repeat me"}
    return Worker(job).measure(item)
