"""Stand-ins on the CPU for the libraries behind our backends."""

import sys
from types import SimpleNamespace

import pytest
import torch
from support import library_fakes as fakes

from attnlib.core import backends
from attnlib.core.backends import flashinfer
from attnlib.core.fa2 import planner
from attnlib.core.schedule import library


@pytest.fixture
def libraries(monkeypatch, fake_fa3):
    """The libraries on the CPU: FlashInfer's wrappers as they are made, and FlashMLA."""
    if torch.cuda.is_available():
        pytest.skip("the libraries' stand-ins are for machines without a GPU")
    fakes.FakeWrapper.made = []
    module = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=fakes.FakeDecode,
        BatchPrefillWithPagedKVCacheWrapper=fakes.FakePaged,
        BatchPrefillWithRaggedKVCacheWrapper=fakes.FakeRagged,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    latent = SimpleNamespace(BatchMLAPagedAttentionWrapper=fakes.FakeMla)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", latent)
    found = SimpleNamespace(wrappers=fakes.FakeWrapper.made, flashmla=fakes.FakeFlashMla())
    loaded = {library.FA3: fake_fa3, library.FLASHMLA: found.flashmla}
    monkeypatch.setattr(library, "load", lambda name=library.FA3: loaded[name])
    several, one = fakes.FakeFlashAttention(), fake_fa3.flash_attn_with_kvcache
    fake_fa3.flash_attn_varlen_func = several.flash_attn_varlen_func
    fake_fa3.flash_attn_with_kvcache = lambda *tensors, **options: (
        several.flash_attn_with_kvcache if "cu_seqlens_q" in options else one
    )(*tensors, **options)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 2**24)
    monkeypatch.setattr(planner, "installed_version", lambda _: "0.6.4")
    small = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    monkeypatch.setattr(backends, "unavailable", lambda name: "")
    return found


@pytest.fixture
def on_hopper():
    if reason := backends.unavailable("fa3"):
        pytest.skip(reason)
