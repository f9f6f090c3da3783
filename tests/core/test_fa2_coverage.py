"""Which tokens a plan reads for other lengths, against blocks walked one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnlib.core import PlanLayout, PlanShape, plan_words, require_plan
from attnlib.core.fa2.coverage import tokens_read
from attnlib.core.fa2.library import FA2_INFO

HEADS = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "kv_bytes": 2, "num_sms": 132}


def shape_of(batch_size, longest, window=-1):
    sizes = {"max_batch_size": batch_size, "max_seq_len": longest, "window": window}
    return PlanShape(**sizes, page_size=16, **HEADS)


def image_of(shape, lens):
    words = plan_words(shape, np.array(lens))
    return words, words.image(PlanLayout.of(shape).int_bytes // 4, fill=0)


def walked(words, lens):
    """A set of tokens per request: every block reads its chunk, token by token."""
    read = [set() for _ in lens]
    for block, valid in enumerate(words.block_valid_mask[: len(words.request_indices)]):
        request = words.request_indices[block]
        tile = words.kv_tile_indices[block]
        if valid and request < len(lens):
            start = tile * words.kv_chunk_size
            end = min(start + words.kv_chunk_size, lens[request])
            read[request].update(range(start, end))
    return [len(tokens) for tokens in read]


@pytest.mark.parametrize("seed", range(40))
def test_tokens_read_are_those_of_the_blocks(seed):
    draw = np.random.default_rng(seed)
    shape = shape_of(8, 4096)
    planned, now = draw.integers(0, 4097, (2, 8))
    words, image = image_of(shape, planned)
    assert tokens_read(image, words.info, planned).tolist() == planned.tolist()
    assert tokens_read(image, words.info, now).tolist() == walked(words, now)


def test_a_plan_without_splits_reads_whole_requests_that_have_a_block():
    shape = shape_of(2, 64)
    words, image = image_of(shape, [64, 64])
    info = list(words.info)
    info[-1] = 0  # split_kv
    assert tokens_read(
        image,
        tuple(info),
        [500, 7],
    ).tolist() == [500, 7]


def wrapper_of(words, image, window):
    return SimpleNamespace(
        _plan_info=words.info,
        _int_workspace_buffer=torch.from_numpy(image).view(torch.uint8),
        _window_left=window,
    )


def test_a_window_of_ones_own_token_needs_a_tile_of_each_request():
    planned = image_of(shape_of(3, 8192, window=0), [16, 16, 16])
    require_plan(
        wrapper_of(*planned, window=0),
        torch.tensor([8192, 16, 300]),
    )


@pytest.mark.parametrize("window", [-1, 1023])
def test_a_plan_of_a_window_covers_what_the_window_sees(window):
    lens = torch.tensor([8192, 300, 5000, 1000])
    whole = image_of(shape_of(4, 8192, window), lens.numpy())
    require_plan(wrapper_of(*whole, window), lens)
    short = image_of(shape_of(4, 8192, window), [1023, 300, 1023, 1000])
    with pytest.raises(RuntimeError, match="tokens of request 0, it reads"):
        require_plan(wrapper_of(*short, window), lens)


WORD_OF = {
    name: FA2_INFO.index(f"{name}_offset") for name in ("request_indices", "kv_tile_indices")
}


@pytest.mark.parametrize(
    "name, value, words",
    [
        (
            "request_indices",
            123456789,
            r"request_indices in 0..7 .* got 123456789 in block [0-9]+ of",
        ),
        (
            "request_indices",
            -5,
            r"request_indices in 0..7 in every block .* got -5 in block [0-9]+ of",
        ),
        ("request_indices", 8, "request_indices in 0..7"),
        ("kv_tile_indices", -1, "kv_tile_indices >= 0"),
    ],
)
@pytest.mark.parametrize("split_kv", [True, False])
def test_blocks_behind_the_plan_are_looked_at_where_they_run(name, value, words, split_kv):
    """FlashInfer #4002: without split-KV a graph runs 66 blocks of which 8 are written."""
    lens = torch.tensor([300, 20, 64, 1, 7, 9, 1000, 30])
    words_of_plan, image = image_of(shape_of(8, 4096), lens.numpy())
    info = list(words_of_plan.info)
    info[FA2_INFO.index("split_kv")] = split_kv
    last = info[0] - 1
    assert not words_of_plan.block_valid_mask[last], "it is behind the plan"
    image[info[WORD_OF[name]] // 4 + last] = value
    wrapper = SimpleNamespace(_plan_info=info, _window_left=-1)
    wrapper._int_workspace_buffer = torch.from_numpy(image).view(torch.uint8)
    if split_kv:
        require_plan(wrapper, lens)  # the mask leaves it out
        mask = image[info[FA2_INFO.index("block_valid_mask_offset")] // 4 :].view(np.uint8)
        mask[last] = 1
    with pytest.raises(RuntimeError, match=words):
        require_plan(wrapper, lens)


def test_a_plan_for_more_requests_than_the_call_has_is_refused():
    lens = torch.tensor([300, 20, 64, 100])
    words, image = image_of(shape_of(4, 4096), lens.numpy())
    wrapper = SimpleNamespace(_plan_info=words.info, _window_left=-1)
    wrapper._int_workspace_buffer = torch.from_numpy(image).view(torch.uint8)
    with pytest.raises(RuntimeError, match="request_indices in 0..2 in every block that runs, got"):
        require_plan(wrapper, lens[:3])


def test_a_wrapper_without_such_a_plan_is_refused():
    for info, got in ((None, "none"), ([1] * 10, "one of 10 integers")):
        with pytest.raises(ValueError, match=f"plan of fa2 .15 integers., got {got}"):
            require_plan(SimpleNamespace(_plan_info=info), torch.ones(2))


@pytest.mark.gpu
def test_flashinfers_own_plan_covers_its_lengths_and_no_longer_ones():
    flashinfer = pytest.importorskip("flashinfer")
    lens = torch.tensor([8192, *[1] * 7], dtype=torch.int32)
    pages = -(-lens // 16)
    room = torch.zeros(4096, dtype=torch.int32, device="cuda")
    indptr = torch.zeros(9, dtype=torch.int32, device="cuda")
    last = torch.ones(8, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(2**27, dtype=torch.uint8, device="cuda"),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=room,
        paged_kv_last_page_len_buffer=last,
        backend="fa2",
    )
    ends = torch.cat(
        [
            torch.zeros(1, dtype=torch.int32),
            pages.cumsum(0).int(),
        ]
    )
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    indices = torch.arange(
        int(ends[-1]),
        dtype=torch.int32,
        device="cuda",
    )
    wrapper.plan(
        ends.cuda(),
        indices,
        (lens - 1) % 16 + 1,
        32,
        8,
        128,
        16,
        **dtypes,
    )
    require_plan(wrapper, lens.cuda())
    with pytest.raises(RuntimeError, match="tokens of request 1, it reads"):
        require_plan(wrapper, torch.full((8,), 4096, device="cuda"))
