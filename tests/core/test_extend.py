"""The batch of several queries a request: prefix sums, masks, refusals, buffers of a replan."""

from dataclasses import replace

import pytest
import torch

from attnlib.core import AttnSpec, DecodeBatch, ExtendBatch

SPEC = AttnSpec(4, 2, 16, 4)
LENS = (9, 4, 6)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def paged(*lens, page_size=4):
    columns = -(-max(lens) // page_size)
    table = torch.arange(len(lens) * columns, dtype=torch.int32).view(len(lens), columns)
    return DecodeBatch.build(replace(SPEC, page_size=page_size), int32(*lens), table)


def in_order(*lens):
    """Pages of one token, numbered through the requests."""
    rows = torch.arange(sum(lens), dtype=torch.int32).split(lens)
    table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return DecodeBatch.build(replace(SPEC, page_size=1), int32(*lens), table)


def test_prefix_sums_and_sizes_follow_from_the_queries():
    batch = ExtendBatch.build(paged(*LENS), int32(2, 4, 1))
    assert batch.qo_indptr.tolist() == [0, 2, 6, 7]
    assert batch.qo_indptr.dtype == torch.int32
    assert batch.rows == 7
    assert batch.max_q_len == 4
    assert batch.spec == SPEC
    assert batch.custom_mask is None


def test_a_custom_mask_is_what_is_before_the_drafts_and_the_drafts_request_by_request():
    drafts = torch.tensor(
        [
            [[1, 0], [0, 1]],
            [[1, 0], [1, 1]],
        ]
    ).bool()
    batch = ExtendBatch.build(
        paged(3, 2),
        int32(2, 2),
        mask="tree",
        drafts=drafts,
    )
    assert batch.custom_mask.int().tolist() == [1, 1, 0, 1, 0, 1, 1, 0, 1, 1]


ALIKE = "out must be a plan of the same spec, mask, form"
TREE = {"mask": "tree", "drafts": torch.ones(3, 2, 2).bool()}
WIDE = {"mask": "chain", "drafts": torch.ones(3, 2, 3).bool()}


@pytest.mark.parametrize(
    "q_lens, options, words",
    [
        (int32(1, 1, 1), {"mask": "window"}, "mask must be one of causal, full, tree, chain, got"),
        (int32(1, 5, 1), {}, r"q_lens must lie in 1..4 \(tokens\) for request 1, got 5"),
        (int32(1, 1, 0), {}, r"q_lens must lie in 1..6 \(tokens\) for request 2, got 0"),
        (int32(1, 1), {}, r"q_lens must be \[3\] int32, got \[2\]"),
        (int32(1, 1, 1).long(), {}, r"q_lens must be \[3\] int32, got \[3\] int64"),
        (int32(1, 1, 1), {"mask": "tree"}, "given for .*, got none with mask 'tree'"),
        (int32(2, 2, 2), TREE | {"mask": "causal"}, "for .*, got some with mask 'causal'"),
        (int32(2, 2, 1), TREE, "q_lens must be alike for a custom mask"),
        (int32(2, 2, 2), WIDE, r"drafts must be \[3, 2, 2\] bool, got \[3, 2, 3\]"),
        (int32(*LENS), {"ragged": True}, "page_table must name pages of one token in order"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(q_lens, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        ExtendBatch.build(paged(*LENS), q_lens, **options)


def test_a_ragged_batch_has_its_tokens_in_order_and_all_as_queries():
    assert ExtendBatch.build(
        in_order(*LENS),
        int32(*LENS),
        ragged=True,
    ).rows == sum(LENS)
    with pytest.raises(ValueError, match="q_lens must be the requests' tokens"):
        ExtendBatch.build(in_order(*LENS), int32(9, 4, 5), ragged=True)
    shuffled = paged(*LENS, page_size=1)
    with pytest.raises(ValueError, match="pages of one token in order"):
        ExtendBatch.build(shuffled, int32(*LENS), ragged=True)


@pytest.mark.parametrize(
    "other, words",
    [
        (
            ExtendBatch.build(
                paged(*LENS),
                int32(2, 4, 1),
                mask="full",
            ),
            ALIKE,
        ),
        (
            ExtendBatch.build(
                in_order(*LENS),
                int32(*LENS),
                ragged=True,
            ),
            ALIKE,
        ),
        (ExtendBatch.build(paged(*LENS), int32(5, 4, 1)), "at most 4, as first planned, got 5"),
    ],
)
def test_a_batch_that_is_not_alike_or_has_more_queries_is_refused(other, words):
    held = ExtendBatch.build(
        paged(*LENS),
        int32(2, 4, 1),
    ).cloned()
    with pytest.raises(ValueError, match=words):
        held.overwrite(other)
    assert held.qo_indptr.tolist() == [0, 2, 6, 7]
