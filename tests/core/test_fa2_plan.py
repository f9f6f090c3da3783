"""Our plan of fa2: every token once, room for all lengths, and the kernel as its twin says."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from attnlib.core.fa2.choice import (
    BLOCK_TOKENS,
    MARGIN,
    MAX_TOKENS,
    PlanShape,
    blocks_per_head,
    choose,
    counted,
    predicted_time,
)
from attnlib.core.fa2.kernel import build_fa2_plan, parts_of
from attnlib.core.fa2.library import FA2_INFO, MIN_CHUNK
from attnlib.core.fa2.words import PlanLayout, chunk_in, plan_words

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


@triton.jit
def parts_kernel(lens_ptr, chunks_ptr, out_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    inverse = tl.div_rn(1.0, tl.load(chunks_ptr + at).to(tl.float32))
    tl.store(out_ptr + at, parts_of(tl.load(lens_ptr + at), inverse).to(tl.int32))


POISON = -77
HERE = "cuda" if torch.cuda.is_available() else "cpu"
everywhere = pytest.mark.parametrize(
    "seed",
    [
        2,
        pytest.param(5, marks=pytest.mark.gpu),
        pytest.param(6, marks=pytest.mark.gpu),
    ],
)
"""Once by Triton's interpreter, twice on a GPU."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_are_whole_at_each_end_of_a_chunk(device):
    """Rounded by an addition: right at lengths one token around a multiple of the chunk."""
    rng = np.random.default_rng(0)
    chunks = np.concatenate([np.arange(16, 1024), rng.integers(1024, MAX_TOKENS, 1040)])
    multiples = rng.integers(0, MAX_TOKENS // chunks + 1, (8, len(chunks))) * chunks
    lens = np.clip(multiples + rng.integers(-1, 2, multiples.shape), 0, MAX_TOKENS)
    chunks = np.broadcast_to(chunks, lens.shape)
    inputs = [torch.tensor(x.ravel(), dtype=torch.int32, device=device) for x in (lens, chunks)]
    out = torch.full_like(inputs[0], POISON)
    parts_kernel[(8,)](*inputs, out, 2048)
    np.testing.assert_array_equal(out.cpu(), -(-lens // chunks).ravel())


def room(shape):
    """Words of the int workspace."""
    return PlanLayout.of(shape).int_bytes // 4


def arguments(shape, lens):
    words = torch.full(
        (room(shape),),
        POISON,
        dtype=torch.int32,
        device=HERE,
    )
    lens = torch.tensor(lens, dtype=torch.int32, device=HERE)
    return {"seq_lens": lens, "words": words, "shape": shape}


def drawn(shape, seed, count=4):
    """Lengths of batches that people serve, and the extremes."""
    rng = np.random.default_rng(seed)
    batch = shape.max_batch_size
    most = shape.max_seq_len
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
        used = words.block_valid_mask[: shape.max_blocks]
        chunk = choose(shape, lens).chunk
        seen = counted(shape, lens)
        blocks = blocks_per_head(seen, np.array([chunk])) * shape.q_tiles
        assert used.sum() == blocks <= shape.max_blocks
        indices = (words.request_indices, words.qo_tile_indices, words.kv_tile_indices)
        found = list(zip(*(index[used].tolist() for index in indices), strict=True))
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
        assert (merged[: len(rows)] == rows).all()
        assert not merged[len(rows) :].any()
        assert (words.merge_indptr[:: shape.q_len] == words.o_indptr).all()
        layout = PlanLayout.of(shape)
        lse = layout.info[FA2_INFO.index("s_offset")]
        sums = 4 * shape.num_qo_heads
        assert words.o_indptr[-1] * sums * shape.head_dim <= lse
        assert lse + words.o_indptr[-1] * sums <= layout.float_bytes


@everywhere
@pytest.mark.parametrize("number, shape", enumerate(SHAPES.values()), ids=SHAPES)
def test_the_kernel_writes_what_the_twin_says_over_any_words_before(number, shape, seed):
    batches = [*drawn(shape, seed, 40)]
    if HERE == "cpu":
        # Of the five extremes every second one, and of the next shape the others.
        batches = [*batches[1 - number % 2 : 5 : 2], batches[5]]
    for turn, lens in enumerate(batches):
        delta = turn % 2
        given = lens - delta * (lens > 0)
        call = arguments(shape, given)
        call["seq_lens"] = call["seq_lens"].to((torch.int32, torch.int64)[delta])
        call["words"].fill_(POISON - turn)
        build_fa2_plan(**call, seq_len_delta=delta)
        words = call["words"].cpu().numpy()
        chunk = chunk_in(words, PlanLayout.of(shape))
        wanted = plan_words(shape, given + delta, chunk).image(room(shape), POISON - turn)
        assert np.flatnonzero(words != wanted).tolist() == []
        twin = np.array([choose(shape, given + delta).chunk, chunk])
        times = predicted_time(shape, counted(shape, given + delta), twin)
        assert times[1] == pytest.approx(times[0], rel=0.01), twin


def test_a_grid_has_more_room_the_longer_its_calls_may_be_and_none_for_what_cannot_be():
    rooms = [replace(SHAPE, max_seq_len=n).max_blocks for n in (100, 300, 16384, 131072, 2**21)]
    assert rooms[:2] == [40, 40]
    assert rooms == sorted(rooms)
    assert rooms[-1] == 40 + 6 * 33
    assert replace(SHAPE, max_batch_size=1, max_seq_len=300).max_blocks == 3


def test_the_librarys_chunk_is_left_only_for_one_predicted_to_gain_more_than_a_merge_costs():
    kept = left = 0
    for tokens in range(1000, 60000, 1000):
        for batch in (5, 33, 40, 100):
            lens = np.full(batch, 500)
            lens[0] = tokens
            choice = choose(replace(SHAPE, max_batch_size=batch), lens)
            library = choice.times[-1]
            least = choice.times.min()
            gains = least + BLOCK_TOKENS < (1 - MARGIN) * library
            assert choice.chunk == choice.chunks[choice.times.argmin() if gains else -1]
            kept = kept + (not gains)
            left = left + gains
    assert kept > 20 and left > 20


def test_a_short_call_keeps_the_librarys_plan():
    """A merge costs time that a call of 20 us feels."""
    for kv_heads, lens in (
        (1, [900] * 12),
        (1, [3000, 40, 80]),
        (8, [500] * 3),
        (8, [200] * 30),
    ):
        shape = PlanShape(8, kv_heads, 128, 2, len(lens), 4096, 132)
        choice = choose(shape, np.array(lens))
        assert choice.chunk == choice.chunks[-1]


def test_equal_requests_of_a_wave_stay_whole_and_those_just_past_one_are_cut():
    at, past = (replace(SHAPE, max_batch_size=n) for n in (33, 34))
    assert choose(at, np.full(33, 2048)).chunk == 2048
    assert choose(past, np.full(34, 2048)).chunk < 2048


def paged_call(lens, page_size, capacity, columns=256):
    """A call that writes page arrays from a block table inside a wider tensor, and the table."""
    shape = replace(SHAPE, max_batch_size=6, max_seq_len=256, page_size=page_size)
    wide = np.random.default_rng(7).permutation(8 * (columns + 3)).reshape(8, -1).astype(np.int32)
    outputs = {"kv_indptr": 7, "kv_indices": capacity, "kv_last_page_len": 6}
    words = {n: torch.full((size,), POISON, dtype=torch.int32) for n, size in outputs.items()}
    words["overflow"] = torch.zeros(2, dtype=torch.int32)
    words["block_table"] = torch.from_numpy(wide)[:, :columns]
    call = arguments(shape, lens) | {"page_size": page_size}
    return call | {name: tensor.to(HERE) for name, tensor in words.items()}


def assert_planned(call, lens):
    """The plan is the twin's, and the page arrays FlashInfer's, for requests of `lens` tokens."""
    size = call["page_size"]
    table = call["block_table"].cpu()
    pages = -(-lens // size)
    wanted = np.concatenate([table[:0, 0], *(table[i, :n] for i, n in enumerate(pages))])
    assert call["kv_indptr"].tolist() == [0, *np.cumsum(np.pad(pages, (0, 6 - len(lens))))]
    got = call["kv_indices"].cpu().numpy()
    assert (got[: len(wanted)] == wanted).all()
    assert (got[len(wanted) :] == POISON).all()
    last = np.pad(np.where(pages > 0, lens - (pages - 1) * size, 0), (0, 6 - len(lens)))
    assert call["kv_last_page_len"].tolist() == last.tolist()
    assert_words(call, lens)


def assert_words(call, lens):
    words = call["words"].cpu().numpy()
    chunk = chunk_in(words, PlanLayout.of(call["shape"]))
    assert (words == plan_words(call["shape"], lens, chunk).image(len(words), POISON)).all()
    assert chunk % call["shape"].page_size == 0


def of_pool(call, lens):
    """The same pages as slots of a request pool, where the requests lie in reverse."""
    call, size = dict(call), call["page_size"]
    first = call.pop("block_table")[:, :, None] * size
    slots = (first + torch.arange(size, dtype=torch.int32, device=HERE)).flatten(1)
    rows = torch.arange(
        len(slots) - 1,
        -1,
        -1,
        device=HERE,
    )[: len(lens)]
    return call | {"req_to_token": slots.flip(0).contiguous(), "req_pool_indices": rows}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, pytest.param(64, marks=pytest.mark.gpu)])
def test_a_table_or_pool_gives_the_page_arrays_and_a_long_request_is_planned_whole(
    page_size, pooled
):
    for lens in (
        [200, 0, 1, 256, 33],
        [5, 250 * page_size, 0],
        [256 * page_size] * 6,
        [],
    ):
        lens = np.array(lens, np.int64)
        call = paged_call(lens, page_size, 6 * 256)
        build_fa2_plan(**(of_pool(call, lens) if pooled else call))
        assert_planned(call, lens)
        assert call["overflow"].tolist() == [0, 0]


def test_a_request_without_room_is_empty_and_flagged_and_so_is_a_batch_of_too_many_pages():
    lens = np.array([40, 257 * 16, 300])
    call = paged_call(lens, 16, 6 * 256)
    build_fa2_plan(**call)
    assert_planned(call, np.array([40, 0, 300]))
    assert call["overflow"].tolist() == [257 * 16, 0]

    lens = np.array([160, 160, 1])
    call = paged_call(lens, 16, 21)
    build_fa2_plan(**call)
    assert_planned(call, lens)
    call = paged_call(lens, 16, 20)
    build_fa2_plan(**call)
    assert_words(call, lens * 0)
    assert call["overflow"].tolist() == [0, 21]
    assert len(call["kv_indices"]) == 20

    most = np.array([MAX_TOKENS, MAX_TOKENS + 1, 2**31 + 5])
    call = arguments(replace(SHAPE, max_seq_len=256), [1]) | {"overflow": call["overflow"]}
    call["seq_lens"] = torch.tensor(most, device=HERE)
    build_fa2_plan(**call)
    assert_words(call, np.array([MAX_TOKENS, 0, 0]))
    assert call["overflow"].tolist() == [2**31 - 1, 21]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"block_table": torch.zeros(5, 256)}, "block_table must be .* int32, got .* float32"),
        ({"block_table": torch.zeros(2, 256).int()}, r"a row .* per request, 3, got \[2, 256\]"),
        ({"block_table": torch.zeros(256, 5).int().T}, "neighbouring words"),
        ({"block_table": torch.zeros(5, 15).int()}, r"column per page for max_seq_len 256, page"),
        ({"block_table": np.zeros((5, 256))}, "block_table must be a tensor, got ndarray"),
        ({"block_table": torch.zeros(5, 256, device="meta").int()}, "block_table must be on seq_"),
        ({"req_to_token": torch.zeros(5, 256).int()}, "must be given without req_to_token"),
        ({"page_size": 12}, "page_size must be a power of two, got 12"),
        ({"overflow": torch.zeros(1).int()}, r"overflow must be \[2\] int32"),
        ({"kv_indptr": torch.zeros(6).int()}, r"kv_indptr must be \[7\] int32"),
        ({"kv_indices": torch.zeros(128).int()[::2]}, "kv_indices must be contiguous"),
        ({"overflow": None}, "overflow must be given where page arrays are written"),
        ({"page_size": 0}, "page_size must be given with block_table, got 0"),
    ],
)
def test_a_block_table_that_does_not_fit_is_refused_by_name_before_the_launch(change, words):
    call = paged_call(np.array([1, 2, 3]), 16, 64)
    moved = {n: t.to(HERE) if getattr(t, "is_cpu", 0) else t for n, t in change.items()}
    with pytest.raises((ValueError, TypeError), match=words):
        build_fa2_plan(**call | moved)
    assert (call["words"] == POISON).all()


@pytest.mark.parametrize("pooled", [False, True])
def test_a_request_without_room_is_refused_where_a_check_is_asked_for(pooled):
    for lens, capacity, words in (
        ([40, 257 * 16, 300], 6 * 256, r"seq_lens must lie in 0..4096 .* got 40..4112"),
        ([160, 160, 1], 20, "kv_indices must have room for 21 pages, got 20"),
        ([160, 159, 0], 20, ""),
    ):
        call = paged_call(np.array(lens), 16, capacity)
        call = of_pool(call, lens) if pooled else call
        if words:
            with pytest.raises(ValueError, match=words):
                build_fa2_plan(**call, check=True)
            assert (call["words"] == POISON).all()
        else:
            build_fa2_plan(**call, check=True)
    call = arguments(SHAPE, [MAX_TOKENS + 1])
    with pytest.raises(ValueError, match=rf"seq_lens must lie in 0..{MAX_TOKENS} with"):
        build_fa2_plan(**call, check=True)


def test_a_length_far_below_zero_is_an_empty_request():
    call = arguments(replace(SHAPE, max_seq_len=256), [1, 1])
    call["seq_lens"] = torch.tensor([-(2**32) + 5, -(2**63)], device=HERE)
    build_fa2_plan(**call)
    assert_words(call, np.array([0, 0]))


@pytest.mark.parametrize(
    "first, second",
    [
        ("kv_indptr", "kv_last_page_len"),
        ("words", "kv_indices"),
        ("seq_lens", "overflow"),
        ("block_table", "kv_indices"),
    ],
)
def test_an_output_across_another_tensor_is_refused(first, second):
    call = paged_call(np.array([1, 2, 3]), 16, 64)
    call["seq_lens"] = call["seq_lens"].int()
    tensors = (call[first], call[second])
    room = torch.zeros(sum(tensor.numel() for tensor in tensors) + 1, dtype=torch.int32).to(HERE)
    for start, name in enumerate((first, second)):
        call[name] = room[start : start + call[name].numel()].view_as(call[name])
    with pytest.raises(ValueError, match=f"{second} must not share memory with {first}|{first} mu"):
        build_fa2_plan(**call)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"head_dim": 80}, "head_dim must be one of 64, 128, 256, got 80"),
        ({"kv_bytes": 3}, "kv_bytes must be one of 1, 2, got 3"),
        ({"head_dim": 0}, "head_dim must be .* got 0"),
    ],
)
def test_a_shape_that_fa2_has_not_is_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        replace(SHAPE, **sizes)


@pytest.mark.parametrize("window", [-1, 5000])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_chunks_are_whole_pages_and_the_librarys_is_its_own(page_size, window):
    """FlashInfer takes the least number of pages whose blocks all run at once."""
    shape = replace(SHAPE, num_kv_heads=2, max_batch_size=15, max_seq_len=30748, window=window)
    for drawn_lens in drawn(shape, 11, 20):
        lens = counted(shape, drawn_lens)
        chunks = choose(replace(shape, page_size=page_size), lens).chunks
        assert not (chunks % page_size).any()
        sizes = np.arange(max(MIN_CHUNK // page_size, 1), 30748 // page_size + 2) * page_size
        fits = blocks_per_head(lens, sizes) <= shape.wave
        if lens.any() and chunks[-1] < 4096:
            least = sizes[fits][0]
            assert least <= chunks[-1] < least + max(page_size, least / 64)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"seq_lens": torch.zeros(41, dtype=torch.int32)}, "seq_lens must hold at most 40"),
        ({"seq_lens": torch.zeros(4)}, "seq_lens must be"),
        ({"words": torch.zeros(8, dtype=torch.int32)}, "words must be"),
        ({"seq_len_delta": -1}, "seq_len_delta must be"),
        ({"page_size": 16}, "overflow must be given where page arrays are written"),
        (
            {"block_table": torch.zeros(40, 8).int()},
            "page_size must be given with block_table, got",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_a_launch(change, words):
    with pytest.raises((ValueError, TypeError), match=words):
        build_fa2_plan(**arguments(SHAPE, np.ones(40)) | change)
    for lens in (np.ones(41, int), np.ones(4)):
        with pytest.raises(ValueError, match=rf"seq_lens must be .*\({len(lens)},\) {lens.dtype}"):
            choose(SHAPE, lens)


def test_a_chunk_of_ones_own_takes_the_place_of_the_choice():
    words = plan_words(SHAPE, [5000, 300], chunk=1024)
    assert words.kv_chunk_size == 1024
    assert words.o_indptr[:3].tolist() == [0, 5, 6]
    with pytest.raises(ValueError, match="chunk must cut into at most 238 blocks, got 313 of 128"):
        plan_words(SHAPE, [40_000], chunk=128)
