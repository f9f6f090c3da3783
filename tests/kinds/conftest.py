"""FlashInfer's wrappers of fa2 on the CPU, for subjects that run them."""

import sys
from types import SimpleNamespace

import pytest
import torch
from support import library_fakes as fakes

from attnlib.core import backends
from attnlib.core.backends import flashinfer
from attnlib.core.fa2 import planner


@pytest.fixture
def fake_fa2(monkeypatch):
    """Wrappers that follow the plan in their workspace, on a GPU of 4 multiprocessors."""
    if torch.cuda.is_available():
        pytest.skip("the library's stand-ins are for machines without a GPU")
    fakes.FakeWrapper.made = made = []
    module = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=fakes.FakeDecode,
        BatchPrefillWithPagedKVCacheWrapper=fakes.FakePaged,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 2**24)
    monkeypatch.setattr(planner, "installed_version", lambda _: "0.6.4")
    small = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    monkeypatch.setattr(backends, "unavailable", lambda name: "")
    return made
