"""Which tokens a plan reads for other lengths, against blocks walked one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnlib.core import PlanLayout, PlanShape, plan_words, require_plan
from attnlib.core.fa2.coverage import tokens_read

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
        request, tile = words.request_indices[block], words.kv_tile_indices[block]
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
    assert tokens_read(image, tuple(info), [500, 7]).tolist() == [500, 7]


@pytest.mark.parametrize("window", [-1, 1023])
def test_a_plan_of_a_window_covers_what_the_window_sees(window):
    lens = torch.tensor([8192, 300, 5000, 1000])
    words, image = image_of(shape_of(4, 8192, window), lens.numpy())
    wrapper = SimpleNamespace(_plan_info=words.info, _window_left=window)
    wrapper._int_workspace_buffer = torch.from_numpy(image).view(torch.uint8)
    require_plan(wrapper, lens)
    words, image = image_of(shape_of(4, 8192, window), [1023, 300, 1023, 1000])
    wrapper._plan_info = words.info
    wrapper._int_workspace_buffer = torch.from_numpy(image).view(torch.uint8)
    with pytest.raises(RuntimeError, match="tokens of request 0, it reads"):
        require_plan(wrapper, lens)


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
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), pages.cumsum(0).int()])
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    indices = torch.arange(int(ends[-1]), dtype=torch.int32, device="cuda")
    wrapper.plan(ends.cuda(), indices, (lens - 1) % 16 + 1, 32, 8, 128, 16, **dtypes)
    require_plan(wrapper, lens.cuda())
    with pytest.raises(RuntimeError, match="tokens of request 1, it reads"):
        require_plan(wrapper, torch.full((8,), 4096, device="cuda"))
