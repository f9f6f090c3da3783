"""Stand-ins on the CPU for the libraries behind our backends."""

import sys
from types import SimpleNamespace

import pytest
from support import library_fakes as fakes

from attnlib.core import backends
from attnlib.core.schedule import library


@pytest.fixture
def libraries(monkeypatch, fake_fa2, fake_fa3):
    """The libraries on the CPU: FlashInfer's wrappers as they are made, and FlashMLA."""
    latent = SimpleNamespace(BatchMLAPagedAttentionWrapper=fakes.FakeMla)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", latent)
    found = SimpleNamespace(wrappers=fake_fa2, flashmla=fakes.FakeFlashMla())
    loaded = {library.FLASH_ATTN_3: fake_fa3, library.FLASHMLA: found.flashmla}
    monkeypatch.setattr(library, "load", lambda name=library.FLASH_ATTN_3: loaded[name])
    return found


@pytest.fixture
def on_hopper():
    if reason := backends.unavailable("flash-attn-3"):
        pytest.skip(reason)
