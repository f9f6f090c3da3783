"""FlashMLA's schedule under guard: the first call's facts and lengths, and no others."""

from types import SimpleNamespace

import pytest
import torch

from attnlib.core import backends
from attnlib.core.schedule import library
from attnlib.core.schedule.flashmla import GuardedSchedMeta


class FakeFlashMla:
    """Makes schedules with memory of their own, and notes what each call and refill was given."""

    def __init__(self):
        self.made, self.given, self.asked = [], [], []

    def get_mla_metadata(self):
        tables = (torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
        names = ("tile_scheduler_metadata", "num_splits")
        self.made.append(SimpleNamespace(**dict(zip(names, tables, strict=True))))
        return self.made[-1], None

    def flash_mla_with_kvcache(self, q, *arguments, **options):
        self.given.append(arguments[4])
        return q, q

    def get_mla_decoding_metadata(self, seq_lens, *sizes, **options):
        self.asked.append((*sizes, options))
        return seq_lens[None], seq_lens


@pytest.fixture
def fake(monkeypatch):
    made = FakeFlashMla()
    monkeypatch.setattr(library, "load", lambda name: made)
    return made


class Call:
    """A decode of 2 requests, top-k 64, through one schedule; `dense` leaves the indices out."""

    def __init__(self, bs=2, q_len=1, heads=64, page=64, width=656, topk=64, meta=None):
        self.meta = meta or GuardedSchedMeta()
        self.q = torch.zeros(bs, q_len, heads, 576)
        self.k_cache = torch.zeros(4, page, 1, width, dtype=torch.uint8)
        self.table = torch.zeros(bs, 4, dtype=torch.int32)
        self.seq_lens = torch.full((bs,), 200, dtype=torch.int32)
        self.indices = torch.zeros(bs, q_len, topk, dtype=torch.int32)
        self.topk_length = torch.full((bs,), 50, dtype=torch.int32)

    def sparse(self, **options):
        options = {"indices": self.indices, "topk_length": self.topk_length} | options
        self.meta.attend(self.q, self.k_cache, None, None, 512, use_legacy=True, **options)

    def dense(self):
        given = (self.q, self.k_cache, self.table, self.seq_lens, 512)
        self.meta.attend(*given, use_legacy=True)


@pytest.fixture
def call(fake):
    """A sparse call that has been made once."""
    made = Call()
    made.sparse()
    return made


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bs": 3}, "batch_size must be 2, got 3"),
        ({"q_len": 2}, "q_len must be 1, got 2"),
        ({"heads": 128}, "num_qo_heads must be 64, got 128"),
        ({"page": 32}, "page_size must be 64, got 32"),
        ({"width": 528}, "token_width must be 656, got 528"),
        ({"topk": 128}, "topk must be 64, got 128"),
    ],
)
def test_one_schedule_serves_every_layer_and_another_shape_is_refused(fake, call, changes, words):
    with pytest.raises(ValueError, match=f"does not fit the call: {words}"):
        Call(**changes, meta=call.meta).sparse()
    call.sparse()
    assert len(fake.made) == 1 and fake.given == fake.made * 2


@pytest.mark.parametrize("options", [{"enable_batch_invariant": True}, {"kv_format": "V4"}])
def test_other_options_are_refused(call, options):
    with pytest.raises(ValueError, match="must be None, got"):
        call.sparse(**options)


def test_lengths_written_in_place_other_ones_and_none_are_refused_until_renewed(fake, call):
    with pytest.raises(ValueError, match="topk_length must be the tensor that"):
        call.sparse(topk_length=call.topk_length.clone())
    with pytest.raises(ValueError, match="topk_length must be given as .* a tensor, got none"):
        call.sparse(topk_length=None)
    call.topk_length.fill_(60)
    with pytest.raises(ValueError, match="topk_length must not change .* written 0 .* got 1"):
        call.sparse()
    call.meta.renew()
    call.sparse()
    assert len(fake.made) == 2


def test_dense_attention_depends_on_cache_seqlens_and_sparse_does_not(call):
    call.seq_lens.add_(1)
    call.sparse()
    dense = Call()
    dense.dense()
    with pytest.raises(ValueError, match="batch_size must be 2, got 3"):
        Call(bs=3, meta=dense.meta).dense()
    with pytest.raises(ValueError, match="topk must be None, got 64"):
        dense.sparse()
    dense.seq_lens.add_(1)
    with pytest.raises(ValueError, match="cache_seqlens must not change"):
        dense.dense()


def test_a_dense_schedule_is_refilled_in_the_memory_that_a_graph_reads(fake):
    call = Call()
    call.meta.refill(call.seq_lens)
    assert call.meta.made_for is None and fake.asked == []
    call.dense()
    words, splits = fake.made[0].tile_scheduler_metadata, fake.made[0].num_splits
    call.seq_lens.fill_(90)
    call.meta.refill(call.seq_lens)
    assert (words.tolist(), splits.tolist()) == ([[90, 90]], [90, 90])
    assert fake.asked == [(64, 1, 64, {"use_legacy": True})]
    call.dense()
    assert len(fake.made) == 1


def test_tensors_of_the_wrong_rank_are_refused_by_name(call):
    call.q = call.q[:, 0]
    with pytest.raises(ValueError, match=r"q must be \[bs, q_len, .* got \[2, 64, 576\]"):
        call.sparse()


@pytest.fixture
def on_gpu():
    if reason := backends.unavailable("flashmla-dense"):
        pytest.skip(reason)


@pytest.mark.gpu
def test_sparse_decode_of_two_layers_runs_under_the_guard_and_other_top_k_does_not(on_gpu):
    q = torch.randn(2, 1, 64, 576, device="cuda", dtype=torch.bfloat16)
    k_cache = torch.zeros(4, 64, 1, 656, device="cuda", dtype=torch.uint8)
    cache = k_cache.view(torch.float8_e4m3fn)
    indices = torch.arange(128, device="cuda", dtype=torch.int32).expand(2, 1, 128).contiguous()
    meta = GuardedSchedMeta()
    for _ in range(2):
        out, _ = meta.attend(q, cache, None, None, 512, indices=indices, use_legacy=True)
    assert torch.isfinite(out).all()
    with pytest.raises(ValueError, match="topk"):
        meta.attend(q, cache, None, None, 512, indices=indices[..., :64], use_legacy=True)


@pytest.mark.gpu
def test_dense_decode_refuses_lengths_written_after_its_schedule(on_gpu):
    q = torch.randn(2, 1, 64, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(8, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4)
    seq_lens = torch.full((2,), 200, device="cuda", dtype=torch.int32)

    def attend(meta):
        return meta.attend(q, cache, table, seq_lens, 512, use_legacy=True)[0]

    meta = GuardedSchedMeta()
    first = attend(meta)
    assert torch.equal(first, attend(meta))
    seq_lens.fill_(90)
    with pytest.raises(ValueError, match="cache_seqlens must not change"):
        attend(meta)
    meta.refill(seq_lens)
    refilled = attend(meta)
    assert torch.equal(refilled, attend(GuardedSchedMeta())) and not torch.equal(refilled, first)
