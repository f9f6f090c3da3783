"""FlashMLA's schedule is reused for the call that it was made for, and for no other."""

from types import SimpleNamespace

import pytest
import torch

from attnlib.core import backends
from attnlib.core.schedule import library
from attnlib.core.schedule.flashmla import GuardedSchedMeta


class FakeFlashMla:
    """Makes schedules with memory of their own, and keeps what each call was given."""

    def __init__(self):
        self.made, self.given = [], []

    def get_mla_metadata(self):
        tiles, splits = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        self.made.append(SimpleNamespace(tile_scheduler_metadata=tiles, num_splits=splits))
        return self.made[-1], None

    def flash_mla_with_kvcache(self, q, *arguments, **options):
        self.given.append(arguments[4])
        return q, q

    def get_mla_decoding_metadata(self, seq_lens, rows, kv_heads, heads, *, use_legacy):
        assert (rows, kv_heads, heads, use_legacy) == (64, 1, 64, True)
        return seq_lens[None], seq_lens


@pytest.fixture
def fake(monkeypatch):
    library_fake = FakeFlashMla()
    monkeypatch.setattr(library, "load", lambda name: library_fake)
    return library_fake


def sparse(meta, bs=2, heads=64, top_k=64, **options):
    indices = torch.zeros(bs, 1, top_k, dtype=torch.int32)
    q, cache = torch.zeros(bs, 1, heads, 576), torch.zeros(4, 64, 1, 656, dtype=torch.uint8)
    return meta.attend(q, cache, None, None, 512, indices=indices, use_legacy=True, **options)


def dense(meta, seq_lens, bs=2):
    q, cache = torch.zeros(bs, 1, 64, 576), torch.zeros(4, 64, 1, 576)
    table = torch.zeros(bs, 4, dtype=torch.int32)
    return meta.attend(q, cache, table, seq_lens, 512, use_legacy=True)


@pytest.mark.parametrize("changes", [{"bs": 3}, {"heads": 128}, {"top_k": 128}, {"causal": True}])
def test_one_schedule_serves_every_layer_and_another_call_is_refused(fake, changes):
    meta = GuardedSchedMeta()
    sparse(meta)
    with pytest.raises(ValueError, match="FlashMLA's schedule must be for"):
        sparse(meta, **changes)
    sparse(meta)
    assert len(fake.made) == 1 and fake.given == fake.made * 2


def test_lengths_written_since_or_of_another_tensor_are_refused_until_refilled(fake):
    meta, seq_lens = GuardedSchedMeta(), torch.full((2,), 200, dtype=torch.int32)
    meta.refill(seq_lens)
    dense(meta, seq_lens)
    words, splits = fake.made[0].tile_scheduler_metadata, fake.made[0].num_splits
    with pytest.raises(ValueError, match="schedule must be for"):
        dense(meta, seq_lens.clone())
    seq_lens.fill_(90)
    with pytest.raises(ValueError, match="schedule must be for"):
        dense(meta, seq_lens)
    meta.refill(seq_lens)
    assert (words.tolist(), splits.tolist()) == ([[90, 90]], [90, 90])
    dense(meta, seq_lens)
    assert len(fake.made) == 1


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
