"""What is special to decode metadata: rows, slots and lengths at the edges, and the baseline."""

import pytest
import torch
from support.metadata_cases import DECODE, POISON, SCHEDULES, Shape, arguments

from attnlib.core.metadata.decode import build_decode_metadata


@pytest.mark.parametrize(
    "lens, max_pages",
    [
        ([0, 20, 0], 5),
        ([64, 64, 3], 5),
        ([10, 50, 100, 200, 300, 450, 500, 512], 128),
    ],
)
def test_lengths_of_zero_have_no_page_and_those_beyond_max_pages_stop_there(lens, max_pages):
    call = arguments(
        Shape(
            len(lens),
            max(lens),
            4,
        ),
        lens,
    ) | {"max_pages": max_pages}
    build_decode_metadata(**call)
    DECODE.assert_right(call)


def test_a_slot_beyond_the_window_map_reads_nothing_and_gives_minus_one():
    call = arguments(Shape(1, 8, 1, swa=True), [8])
    call["req_to_token"].fill_(2_000_000)
    build_decode_metadata(**call)
    assert call["swa_page_table"][0, :8].tolist() == [-1] * 8


@pytest.mark.parametrize("builder", [DECODE, SCHEDULES], ids=["decode", "schedules"])
def test_lengths_may_be_their_own_output_where_they_stay_as_they_are(builder):
    call = builder.arguments(Shape(4, 64, 4, lens_dtype=torch.int32))
    call["cache_seqlens"] = call["seq_lens"]
    for build in filter(None, (builder.ours, builder.ours, builder.eager)):
        build(**call)
        builder.assert_right(call, tails=False)
        with pytest.raises(ValueError, match="cache_seqlens must not share memory"):
            build(**call | {"seq_len_delta": 1})


@pytest.mark.parametrize(
    "length, counted, live",
    [
        (2**31 - 1, 2**31 - 1, 2),
        (2**31 + 9, 2**31 - 1, 2),
        (-(2**32) + 5, -(2**31) + 1, 0),
    ],
)
def test_a_length_at_or_beyond_the_edge_of_int32_does_not_wrap(length, counted, live):
    call = arguments(Shape(1, 32, 16, extra_columns=0), [32])
    call["seq_lens"] = torch.tensor([length], device=call["page_table"].device)
    build_decode_metadata(**call)
    assert call["cache_seqlens"].tolist() == [counted]
    written = (call["page_table"] != POISON).sum()
    assert int(written) == live
