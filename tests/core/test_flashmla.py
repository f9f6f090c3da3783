"""FlashMLA's schedule is reused for the call that it was made for, and for no other."""

import pytest
import torch
from support.library_fakes import FakeFlashMla

from attnlib.core import backends
from attnlib.core.schedule import library
from attnlib.core.schedule.flashmla import GuardedSchedMeta


@pytest.fixture
def fake(monkeypatch):
    fake = FakeFlashMla()
    monkeypatch.setattr(library, "load", lambda name: fake)
    return fake


def sparse(meta, bs=2, heads=64, top_k=64, **options):
    indices = torch.zeros(bs, 1, top_k, dtype=torch.int32)
    q, cache = torch.zeros(bs, 1, heads, 576), torch.zeros(4, 64, 1, 656).to(torch.float8_e4m3fn)
    options |= {"indices": indices, "softmax_scale": 1.0, "use_legacy": True}
    return meta.attend(q, cache, None, None, 512, **options)


def dense(meta, seq_lens, bs=2):
    q, cache = torch.zeros(bs, 1, 64, 576), torch.zeros(4, 64, 1, 576).bfloat16()
    table = torch.zeros(bs, 4, dtype=torch.int32)
    return meta.attend(q, cache, table, seq_lens, 512, softmax_scale=1.0, use_legacy=True)


@pytest.mark.parametrize("changes", [{"bs": 3}, {"heads": 128}, {"top_k": 128}, {"causal": True}])
def test_one_schedule_serves_every_layer_and_another_call_is_refused(fake, changes):
    meta = GuardedSchedMeta()
    sparse(meta)
    with pytest.raises(ValueError, match="FlashMLA's schedule must be for"):
        sparse(meta, **changes)
    sparse(meta)
    first, second = fake.calls
    assert first is second


def test_lengths_written_since_or_of_another_tensor_are_refused_until_refilled(fake):
    meta, seq_lens = GuardedSchedMeta(), torch.full((2,), 200, dtype=torch.int32)
    meta.refill(seq_lens)
    dense(meta, seq_lens)
    words, splits = fake.calls[0].tile_scheduler_metadata, fake.calls[0].num_splits
    with pytest.raises(ValueError, match="schedule must be for"):
        dense(meta, seq_lens.clone())
    seq_lens.fill_(90)
    with pytest.raises(ValueError, match="schedule must be for"):
        dense(meta, seq_lens)
    meta.refill(seq_lens)
    assert (words.tolist(), splits.tolist()) == ([90, 90], [90, 90])
    dense(meta, seq_lens)
    assert fake.calls[0] is fake.calls[-1]


@pytest.fixture
def on_gpu():
    if reason := backends.unavailable("flashmla-dense"):
        pytest.skip(reason)


@pytest.mark.gpu
def test_on_a_gpu_dense_decode_refuses_stale_lengths_and_refills_right_ones(on_gpu):
    q = torch.randn(2, 1, 64, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(8, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4)
    seq_lens = torch.full((2,), 200, device="cuda", dtype=torch.int32)

    def attend(meta):
        return meta.attend(q, cache, table, seq_lens, 512, use_legacy=True)

    meta = GuardedSchedMeta()
    first = attend(meta)
    assert torch.equal(first, attend(meta))
    seq_lens.fill_(90)
    with pytest.raises(ValueError, match="schedule must be for"):
        attend(meta)
    meta.refill(seq_lens)
    refilled = attend(meta)
    assert torch.equal(refilled, attend(GuardedSchedMeta())) and not torch.equal(refilled, first)
