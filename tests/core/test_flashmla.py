"""FlashMLA's schedule under guard: the first call's facts and lengths, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlib.core import backends
from attnlib.core.schedule import library
from attnlib.core.schedule.flashmla import GuardedSchedMeta


class FakeFlashMla:
    """Makes schedules with memory of their own; notes which each call and each refill was given."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.given: list[Any] = []
        self.asked: list[tuple[Any, ...]] = []

    def get_mla_metadata(self) -> tuple[Any, None]:
        words, splits = (torch.zeros(size, dtype=torch.int32) for size in ((1, 2), 2))
        self.made.append(SimpleNamespace(tile_scheduler_metadata=words, num_splits=splits))
        return self.made[-1], None

    def get_mla_decoding_metadata(
        self, seq_lens: torch.Tensor, *sizes: int, **options: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append((*sizes, options))
        return seq_lens[None], seq_lens

    def flash_mla_with_kvcache(self, q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        self.given.append(arguments[4])
        return q, q


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFlashMla:
    made = FakeFlashMla()
    monkeypatch.setattr(library, "load", lambda name: made)
    return made


class Call:
    """A sparse decode of 2 requests, top-k 64; `dense` drops the indices."""

    def __init__(self, **changes: Any) -> None:
        sizes = {"bs": 2, "q_len": 1, "heads": 64, "page": 64, "width": 656, "topk": 64} | changes
        self.q = torch.zeros(sizes["bs"], sizes["q_len"], sizes["heads"], 576)
        self.k_cache = torch.zeros(4, sizes["page"], 1, sizes["width"], dtype=torch.uint8)
        self.table = torch.zeros(sizes["bs"], 4, dtype=torch.int32)
        self.seq_lens = torch.full((sizes["bs"],), 200, dtype=torch.int32)
        self.indices = torch.zeros(sizes["bs"], sizes["q_len"], sizes["topk"], dtype=torch.int32)
        self.topk_length = torch.full((sizes["bs"],), 50, dtype=torch.int32)

    def sparse(self, meta: GuardedSchedMeta, **options: Any) -> None:
        options = {"indices": self.indices, "topk_length": self.topk_length} | options
        meta.attend(self.q, self.k_cache, None, None, 512, use_legacy=True, **options)

    def dense(self, meta: GuardedSchedMeta, **options: Any) -> None:
        meta.attend(
            self.q, self.k_cache, self.table, self.seq_lens, 512, use_legacy=True, **options
        )


def test_one_schedule_serves_every_layer_of_a_step(fake):
    meta, call = GuardedSchedMeta(), Call()
    for _ in range(5):
        call.sparse(meta)
    assert len(fake.made) == 1 and fake.given == fake.made * 5


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
def test_another_shape_is_refused_with_the_field_and_both_values(fake, changes, words):
    meta = GuardedSchedMeta()
    Call().sparse(meta)
    with pytest.raises(ValueError, match=f"does not fit the call: {words}"):
        Call(**changes).sparse(meta)
    assert len(fake.given) == 1


def test_the_dense_path_is_guarded_where_flashmla_checks_nothing(fake):
    meta = GuardedSchedMeta()
    Call().dense(meta)
    with pytest.raises(ValueError, match="batch_size must be 2, got 3"):
        Call(bs=3).dense(meta)
    with pytest.raises(ValueError, match="topk must be None, got 64"):
        Call().sparse(meta)


@pytest.mark.parametrize("options", [{"enable_batch_invariant": True}, {"kv_format": "V4"}])
def test_other_options_are_refused(fake, options):
    meta, call = GuardedSchedMeta(), Call()
    call.sparse(meta)
    with pytest.raises(ValueError, match="options must be"):
        call.sparse(meta, **options)


def test_lengths_written_in_place_are_refused_though_the_tensor_is_the_same(fake):
    meta, call = GuardedSchedMeta(), Call()
    call.sparse(meta)
    call.topk_length.fill_(60)
    with pytest.raises(ValueError, match="topk_length must not change .* written 0 .* got 1"):
        call.sparse(meta)
    meta.renew()
    call.sparse(meta)
    assert len(fake.made) == 2


def test_other_lengths_are_refused_and_so_is_leaving_them_out(fake):
    meta, call = GuardedSchedMeta(), Call()
    call.sparse(meta)
    with pytest.raises(ValueError, match="topk_length must be the tensor that"):
        call.sparse(meta, topk_length=call.topk_length.clone())
    with pytest.raises(ValueError, match="topk_length must be given as .* a tensor, got none"):
        call.sparse(meta, topk_length=None)


def test_dense_attention_depends_on_cache_seqlens_and_sparse_does_not(fake):
    meta, call = GuardedSchedMeta(), Call()
    call.dense(meta)
    call.seq_lens.add_(1)
    with pytest.raises(ValueError, match="cache_seqlens must not change"):
        call.dense(meta)
    sparse = GuardedSchedMeta()
    call.sparse(sparse)
    call.seq_lens.add_(1)
    call.sparse(sparse)


def test_a_refused_call_leaves_the_schedule_to_the_one_it_was_made_for(fake):
    meta, call = GuardedSchedMeta(), Call()
    call.sparse(meta)
    with pytest.raises(ValueError, match="does not fit"):
        Call(bs=4).sparse(meta)
    call.sparse(meta)
    assert len(fake.made) == 1


def test_tensors_of_the_wrong_rank_are_refused_by_name(fake):
    call = Call()
    call.q = call.q[:, 0]
    with pytest.raises(ValueError, match=r"q must be \[bs, q_len, .* got \[2, 64, 576\]"):
        call.sparse(GuardedSchedMeta())


def test_a_missing_library_comes_with_its_install_line(monkeypatch):
    monkeypatch.setattr(library, "find_module", lambda _: "")
    library.load.cache_clear()
    with pytest.raises(RuntimeError, match="pip install sgl-flash-mla"):
        GuardedSchedMeta().attend(*[torch.zeros(1, 1, 1, 1)] * 2, None, None, 512)


@pytest.fixture
def on_gpu() -> None:
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
    meta = GuardedSchedMeta()
    first, _ = meta.attend(q, cache, table, seq_lens, 512, use_legacy=True)
    again, _ = meta.attend(q, cache, table, seq_lens, 512, use_legacy=True)
    assert torch.equal(first, again)
    seq_lens.fill_(90)
    with pytest.raises(ValueError, match="cache_seqlens must not change"):
        meta.attend(q, cache, table, seq_lens, 512, use_legacy=True)
    meta.refill(seq_lens)
    refilled, _ = meta.attend(q, cache, table, seq_lens, 512, use_legacy=True)
    fresh, _ = GuardedSchedMeta().attend(q, cache, table, seq_lens, 512, use_legacy=True)
    assert torch.equal(refilled, fresh) and not torch.equal(refilled, first)


def test_a_dense_schedule_is_refilled_in_the_memory_that_a_graph_reads(fake):
    meta, call = GuardedSchedMeta(), Call()
    meta.refill(call.seq_lens)
    assert meta.made_for is None and fake.asked == []
    call.dense(meta)
    words, splits = fake.made[0].tile_scheduler_metadata, fake.made[0].num_splits
    call.seq_lens.fill_(90)
    meta.refill(call.seq_lens)
    assert (words.tolist(), splits.tolist()) == ([[90, 90]], [90, 90])
    assert fake.asked == [(64, 1, 64, {"use_legacy": True})]
    call.dense(meta)
    assert len(fake.made) == 1
