"""FlashMLA's schedule: its words, and which tokens they read of a call with other lengths."""

import numpy as np
import pytest
import torch
from support.flashmla_words import schedule_words

from attnlib.core import backends, require_schedule
from attnlib.core.schedule import library
from attnlib.core.schedule.flashmla import tokens_read

ONE_LONG = np.array([8192, 1, 1, 1, 1, 1, 1, 1])


def walked(tiles, lens):
    """Block numbers of each request in the order of the parts, a block at a time."""
    read = [[] for _ in lens]
    for first, last, begin, end, *_ in tiles.tolist():
        request = first
        block = begin
        while first < len(lens) and request <= last:
            if block >= (end if request == last else -(-lens[request] // 64)):
                request = request + 1
                block = 0
                continue
            read[request].append(block)
            block += 1
    return read


@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_has_every_block_once_in_equal_parts_and_counts_its_splits(seed):
    draw = np.random.default_rng(seed)
    batch = draw.integers(1, 200)
    parts = draw.choice([132, 66, 7, 1])
    longest = 2 ** (3 + seed % 14)
    lens = draw.integers(seed % 2, longest + 1, batch)
    tiles, sums = schedule_words(lens, parts)
    blocks = -(-lens // 64)
    assert walked(tiles, lens) == [list(range(count)) for count in blocks]
    assert tokens_read(tiles, lens).tolist() == lens.tolist()
    working = tiles[tiles[:, 0] < batch]
    named = [range(first, last + 1) for first, last in working[:, :2]]
    assert [sum(r in part for part in named) for r in range(batch)] == np.diff(sums).tolist()
    share = -(-(np.maximum(blocks, 1) + 5).sum() // parts) + 5
    for part, requests in zip(working, named, strict=True):
        ends = {**dict(zip(requests, blocks[requests], strict=True)), part[1]: part[3]}
        cost = sum(ends.values()) - part[2] + 5 * len(requests)
        assert cost <= share + 5
        split = [sums[request + 1] - sums[request] > 1 for request in part[:2]]
        assert [bool(word) for word in part[5:7]] == split
    require_schedule(torch.tensor(tiles), torch.tensor(sums), torch.tensor(lens))


def test_a_schedule_of_one_long_request_reads_a_block_of_seven_others():
    """The lengths of TensorRT-LLM #18769: captured 8,192 and 7 x 1, replayed 8 x 4,096."""
    tiles, sums = map(torch.tensor, schedule_words(ONE_LONG, 132))
    require_schedule(tiles, sums, torch.tensor([8192, *[1] * 7]))
    assert tokens_read(tiles.numpy(), [4096] * 8).tolist() == [4096, *[64] * 7]
    words = "all 4096 tokens of request 1, it reads 64 .7 of 8 requests"
    with pytest.raises(RuntimeError, match=words):
        require_schedule(tiles, sums, torch.full((8,), 4096))


@pytest.mark.parametrize("batch", [7, 9])
def test_splits_and_tiles_of_two_batches_are_refused(batch):
    tiles, sums = map(torch.tensor, schedule_words(np.full(8, 4096), 132))
    _, others = map(torch.tensor, schedule_words(ONE_LONG, 132))
    with pytest.raises(ValueError, match="num_splits must be the sums of the 8 requests' splits"):
        require_schedule(tiles, others, torch.full((8,), 4096))
    with pytest.raises(ValueError, match=f"num_splits must be the sums of the {batch} requests'"):
        require_schedule(tiles, sums, torch.full((batch,), 4096))


@pytest.fixture
def on_gpu():
    if reason := backends.unavailable("flashmla-dense"):
        pytest.skip(reason)


@pytest.mark.gpu
def test_on_a_gpu_words_of_shorter_requests_are_refused_and_give_a_wrong_output(on_gpu):
    flash_mla = library.import_library(library.FLASHMLA)
    q = torch.randn(2, 1, 64, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(8, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(
        8,
        device="cuda",
        dtype=torch.int32,
    ).view(2, 4)
    seq_lens = torch.full((2,), 20, device="cuda", dtype=torch.int32)
    meta, _ = flash_mla.get_mla_metadata()

    def attend(meta):
        arguments = (q, cache, table, seq_lens, 512, meta)
        return flash_mla.flash_mla_with_kvcache(*arguments, use_legacy=True)[0]

    attend(meta)
    require_schedule(meta.tile_scheduler_metadata, meta.num_splits, seq_lens)
    seq_lens.fill_(250)
    right = attend(flash_mla.get_mla_metadata()[0])
    with pytest.raises(RuntimeError, match="must read all 250 tokens of request [01]"):
        require_schedule(meta.tile_scheduler_metadata, meta.num_splits, seq_lens)
    assert not torch.allclose(attend(meta), right)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_on_a_gpu_the_librarys_words_are_those_of_the_twin(on_gpu, heads):
    draw = np.random.default_rng(heads)
    for batch in (1, 8, 300):
        lens = draw.integers(1, 2 ** draw.integers(4, 17), batch)
        seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        tiles, sums = library.import_library(library.FLASHMLA).get_mla_decoding_metadata(
            seq_lens, heads, 1, heads, use_legacy=True
        )
        expected, expected_sums = schedule_words(lens, len(tiles))
        working = expected[:, 0] < batch
        seen = tiles.cpu().numpy()
        assert seen[working, :7].tolist() == expected[working, :7].tolist()
        assert (seen[:, 0] < batch).tolist() == working.tolist()
        assert sums.tolist() == expected_sums.tolist()
        require_schedule(tiles, sums, seq_lens)
