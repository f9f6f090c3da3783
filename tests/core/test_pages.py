"""Page tables and page arrays against lengths and pool, by walks over single tokens."""

import numpy as np
import pytest
import torch
from support.metadata_cases import Shape, kv_arguments

from attnlib.core import build_kv_indices
from attnlib.core.schedule.pages import require_arrays, require_table

PAGE = 4
POOL = 30


def is_good(table, lens, window):
    """Whether each token that a query sees lies in a page of the pool."""
    for row, length in zip(table.tolist(), lens.tolist(), strict=True):
        first = max(0, length - window) if window else 0
        for token in range(first, length):
            if token // PAGE >= len(row) or not 0 <= row[token // PAGE] < POOL:
                return False
    return True


@pytest.mark.parametrize("seed", range(200))
def test_a_table_passes_if_every_token_that_is_seen_has_a_page_of_the_pool(seed):
    draw = np.random.default_rng(seed)
    lens = torch.tensor(draw.integers(0, 22, 3))
    table = torch.tensor(
        draw.integers(
            -1 if seed % 3 == 0 else 0,
            POOL + seed % 2,
            (3, 5),
        )
    )
    window = int(draw.choice([0, 1, 4, 9]))
    options = {"page_size": PAGE, "num_pages": POOL, "window": window}
    if is_good(table, lens, window):
        require_table(table, lens, **options)
    else:
        with pytest.raises(RuntimeError, match="page_table must .* request [0-2] of [0-9]+ tokens"):
            require_table(table, lens, **options)


def test_an_empty_batch_and_a_wider_table_pass():
    require_table(
        torch.zeros(0, 4),
        torch.zeros(0),
        page_size=4,
        num_pages=1,
    )
    require_table(
        torch.zeros(9, 4).int(),
        torch.tensor([16, 3]),
        page_size=4,
        num_pages=1,
    )


def arrays(lens):
    call = kv_arguments(Shape(len(lens), max(lens), 4), lens)
    build_kv_indices(**call)
    names = ("kv_indptr", "kv_indices", "kv_last_page_len", "seq_lens")
    return {name: call[name] for name in names} | {"page_size": 4, "num_pages": 2500}


WRONG = {
    "kv_indptr": ([2], 9, r"must have 5 tokens of request 1, got \d+ in 6 pages"),
    "kv_last_page_len": ([0], 4, "must have 9 tokens of request 0, got 12 in 3 pages"),
    "kv_indices": ([4], 2500, "0..2499 for request 1 of 5 tokens, got 2500 as its page 1$"),
    "seq_lens": ([1], 8, "must have 8 tokens of request 1, got 5 in 2 pages"),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_word_of_page_arrays_is_named(name):
    given = arrays([9, 5, 0])
    require_arrays(**given)
    place, value, words = WRONG[name]
    given[name][place] = value
    with pytest.raises(RuntimeError, match=words):
        require_arrays(**given)


def test_page_arrays_without_room_are_refused_and_what_lies_behind_them_is_not_read():
    given = arrays([9, 5, 0])
    given["kv_indices"][5:] = -9
    require_arrays(**given)
    given["kv_indices"] = given["kv_indices"][:4]
    with pytest.raises(RuntimeError, match="kv_indices must have room for 5 pages, got 4"):
        require_arrays(**given)
