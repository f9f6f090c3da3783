"""Our plan of fa2: every token once, room for all lengths, and the kernel as its twin says."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnlib.core.fa2.choice import CHUNK_STEP, MIN_CHUNK, PlanShape, choose
from attnlib.core.fa2.kernel import PlanTensors, ladder, plan_fa2
from attnlib.core.fa2.words import Layout, plan_words

SHAPE = PlanShape(32, 8, 128, 2, 40, 131072, 132)
SHAPES = {
    "decode": SHAPE,
    "one KV head": replace(SHAPE, num_qo_heads=5, num_kv_heads=1),
    "no groups": replace(SHAPE, num_kv_heads=32),
    "FP8": replace(SHAPE, kv_bytes=1),
    "tile of 64": replace(SHAPE, q_len=7),
    "tiles of 128": replace(SHAPE, num_qo_heads=128, q_len=24),
    "window": replace(SHAPE, window=500),
    "odd batch, small GPU": replace(SHAPE, max_batch_size=37, num_sms=16),
    "very long": replace(SHAPE, max_seq_len=2**21),
}
WORDS = {
    "request": "request_indices",
    "q_tile": "qo_tile_indices",
    "kv_tile": "kv_tile_indices",
    "o_indptr": "o_indptr",
    "merge_indptr": "merge_indptr",
}


def drawn(shape, seed, count=4):
    """Lengths of batches that people serve, and the extremes."""
    rng, batch, most = np.random.default_rng(seed), shape.max_batch_size, shape.max_seq_len
    yield np.full(batch, most)
    yield np.ones(batch, int)
    yield np.zeros(batch, int)
    yield np.array([most])
    yield np.r_[np.full(batch - 1, 300), most]
    for _ in range(count):
        lens = np.clip(rng.lognormal(7, 1.5, batch), 0, most).astype(int)
        lens[rng.random(batch) < 0.2] = rng.choice([0, 1, most, 2048])
        yield lens


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_see_every_token_of_every_query_tile_once_and_fit(shape):
    for lens in drawn(shape, 1):
        words = plan_words(shape, lens)
        used = words.block_valid_mask.astype(bool)
        assert used.sum() == words.choice.blocks[words.choice.best] <= shape.max_blocks
        seen = np.minimum(lens, shape.seen)
        found = list(
            zip(
                words.request_indices[used].tolist(),
                words.qo_tile_indices[used].tolist(),
                words.kv_tile_indices[used].tolist(),
                strict=True,
            )
        )
        parts = -(-seen // words.kv_chunk_size)
        wanted = [
            (request, tile, part)
            for request, count in enumerate(parts.tolist())
            for tile in range(shape.q_tiles)
            for part in range(count)
        ]
        assert found == wanted
        rows = np.repeat(parts, shape.q_len)
        merged = np.diff(words.merge_indptr)
        assert (merged[: len(rows)] == rows).all() and not merged[len(rows) :].any()
        assert (words.merge_indptr[:: shape.q_len] == words.o_indptr).all()
        layout = Layout.of(shape)
        row_bytes = 4 * shape.num_qo_heads * shape.head_dim
        assert words.o_indptr[-1] * row_bytes <= layout.lse
        assert layout.lse + words.o_indptr[-1] * 4 * shape.num_qo_heads <= layout.float_bytes


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_writes_what_the_twin_says_over_any_words_before(shape):
    layout = Layout.of(shape)
    for poison, lens in enumerate(drawn(shape, 2)):
        room = torch.full((layout.int_bytes,), 0xFF - poison, dtype=torch.uint8)
        words, valid = room[: layout.valid].view(torch.int32), room[layout.valid :]
        delta = poison % 2
        given = torch.tensor(lens - delta * (lens > 0), dtype=(torch.int32, torch.int64)[delta])
        plan_fa2(PlanTensors(given, ladder(given.device), words, valid), shape, seq_len_delta=delta)
        wanted = plan_words(shape, given.numpy() + delta)
        for name, array in WORDS.items():
            expected, begin = getattr(wanted, array), getattr(layout, name)
            got = words[begin : begin + len(expected)].numpy()
            assert (got == expected).all(), (name, lens)
        assert words[layout.chunk] == wanted.kv_chunk_size
        assert words[layout.rows] == wanted.total_num_rows
        assert (valid.numpy() == wanted.block_valid_mask).all()


def test_words_lie_apart_and_aligned():
    for shape in SHAPES.values():
        layout = Layout.of(shape)
        sizes = [shape.max_blocks] * 3 + [shape.max_batch_size + 1]
        sizes += [shape.max_batch_size * shape.q_len + 1, 1, 1]
        starts = [layout.request, layout.q_tile, layout.kv_tile, layout.o_indptr]
        starts += [layout.merge_indptr, layout.chunk, layout.rows, layout.valid // 4]
        assert all(a + n <= b for a, n, b in zip(starts, sizes, starts[1:], strict=False))
        assert not any(start * 4 % 16 for start in starts)


def test_a_long_request_is_cut_where_the_library_cuts_nothing():
    lens = np.r_[np.full(39, 600), 100_000]
    choice = choose(SHAPE, lens)
    assert 1000 < choice.chunk < 4000
    assert choice.us[choice.best] < 0.2 * choice.us[0]


def test_equal_requests_of_a_wave_stay_whole_and_those_just_past_one_are_cut():
    at, past = (replace(SHAPE, max_batch_size=n) for n in (33, 34))
    assert choose(at, np.full(33, 2048)).chunk == 2048
    assert choose(past, np.full(34, 2048)).chunk < 2048


def test_candidates_are_whole_steps_and_at_least_what_the_library_takes():
    for lens in drawn(SHAPE, 3):
        chunks = choose(SHAPE, lens).chunks
        assert (chunks % CHUNK_STEP == 0).all() and (chunks >= MIN_CHUNK).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_lens": torch.zeros(41, dtype=torch.int32)}, "seq_lens must hold at most 40"),
        ({"seq_lens": torch.zeros(4)}, "seq_lens must be"),
        ({"words": torch.zeros(8, dtype=torch.int32)}, "words must be"),
        ({"valid": torch.zeros(8, dtype=torch.uint8)}, "valid must be"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_a_launch(change, words):
    layout = Layout.of(SHAPE)
    tensors = PlanTensors(
        torch.ones(40, dtype=torch.int32),
        ladder(torch.device("cpu")),
        torch.zeros(layout.valid // 4, dtype=torch.int32),
        torch.zeros(SHAPE.max_blocks, dtype=torch.uint8),
    )
    with pytest.raises(ValueError, match=words):
        plan_fa2(tensors._replace(**change), SHAPE)
    with pytest.raises(ValueError, match="seq_lens must be"):
        choose(SHAPE, np.ones(41, int))
