"""The batch of latent attention: slots, and what is refused before a kernel would read it."""

import pytest
import torch

from attnlib.core import MlaSpec
from attnlib.core.mla import MlaBatch, attended_pages

SPEC = MlaSpec(2, top_k=3, page_size=4)
TABLE = torch.tensor(
    [
        [5, 2],
        [7, 0],
    ],
    dtype=torch.int32,
)
LENS = torch.tensor([6, 3], dtype=torch.int32)
CHOSEN = torch.tensor(
    [
        [5, 0, 3],
        [2, -1, 1],
    ],
    dtype=torch.int32,
)


DENSE = MlaBatch.build(MlaSpec(2, page_size=4), LENS, TABLE)


def batch_with(places):
    """The sparse batch, with these places (row, column) in place of its own."""
    chosen = CHOSEN.clone()
    for place, token in places.items():
        chosen[place] = token
    return MlaBatch.build(SPEC, LENS, TABLE, chosen)


def test_a_slot_is_page_times_page_size_plus_offset():
    slots = batch_with({}).slots()
    assert slots.tolist() == [
        [9, 20, 23],
        [30, -1, 29],
    ]
    assert slots.dtype == torch.int32


@pytest.mark.parametrize(
    "batch, ragged",
    [
        (
            batch_with({}),
            (
                [0, 3, 5],
                [9, 20, 23, 30, 29],
                [3, 2],
                1,
            ),
        ),
        (
            DENSE,
            (
                [0, 2, 3],
                [5, 2, 7],
                [6, 3],
                4,
            ),
        ),
    ],
)
def test_chosen_tokens_are_pages_of_one_token_and_a_dense_batch_attends_to_its_pages(batch, ragged):
    *tensors, page_size = attended_pages(batch)
    assert (*(tensor.tolist() for tensor in tensors), page_size) == ragged
    assert {tensor.dtype for tensor in tensors} == {torch.int32}


@pytest.mark.parametrize(
    "places, words",
    [
        ({(0, 1): 6}, r"in 0\.\.5 for request 0 of 6 tokens, or be -1 for none, got 6 in column 1"),
        ({(1, 2): 3}, r"in 0\.\.2 for request 1 of 3 tokens, or be -1 for none, got 3 in column 2"),
        ({(1, 0): -2}, r"in 0\.\.2 for request 1 of 3 tokens.* got -2 in column 0"),
        ({(1, 0): -1, (1, 2): -1}, "at least one token of every request.*request 1"),
    ],
)
def test_a_place_outside_its_request_or_a_request_without_a_token_is_refused(places, words):
    batch = batch_with(places)
    for ask in (batch.slots, lambda: attended_pages(batch)):
        with pytest.raises(ValueError, match=words):
            ask()


@pytest.mark.parametrize(
    "spec, chosen, words",
    [
        (SPEC, None, "where top_k is not 0, and only then, got none with top_k 3"),
        (MlaSpec(2, 0, 4), CHOSEN, "where top_k is not 0, and only then, got some with top_k 0"),
        (SPEC, CHOSEN[:, :2], r"chosen must be \[2, 3\] int32, got \[2, 2\]"),
        (SPEC, CHOSEN.long(), r"chosen must be \[2, 3\] int32, got .* int64"),
        (SPEC, CHOSEN.to("meta"), "chosen must be on page_table's device, cpu, got meta"),
    ],
)
def test_chosen_tokens_that_do_not_fit_the_spec_are_refused(spec, chosen, words):
    with pytest.raises(ValueError, match=words):
        MlaBatch.build(spec, LENS, TABLE, chosen)


@pytest.mark.parametrize(
    "spec, chosen, words",
    [
        (SPEC, CHOSEN, "q_len must be 1 where top_k is not 0, got 4 with 3"),
        (MlaSpec(2, page_size=4), None, r"seq_lens must be at least q_len \(4\), got 3"),
    ],
)
def test_several_queries_of_chosen_tokens_or_of_a_shorter_request_are_refused(spec, chosen, words):
    with pytest.raises(ValueError, match=words):
        MlaBatch.build(spec, LENS, TABLE, chosen, q_len=4)


def test_a_dense_batch_has_no_slots_and_a_length_beyond_the_page_table_is_refused():
    with pytest.raises(ValueError, match="got None"):
        DENSE.slots()
    with pytest.raises(ValueError, match=r"seq_lens must lie in 1\.\.8"):
        MlaBatch.build(SPEC, LENS + 3, TABLE, CHOSEN)
