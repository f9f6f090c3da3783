"""What is special to drafts: SGLang's own cases, pages that come again, and rows kept apart."""

import pytest
import torch
from support.metadata_cases import DEVICE, DRAFT, POISON, Draft, draft_arguments, poisoned

from attnlib.core.metadata.draft import build_draft_metadata
from attnlib.kinds.metadata import eager

both = pytest.mark.parametrize("build", (build_draft_metadata, eager.build_draft_metadata))
# Slots, tables, decode_length, last pages and lengths of SGLang's own tests, all of page size 4 and
# topk 2. They pass a column more than decode_length, as its allocator did, and tabulate that too.
SGLANG = {
    "one_step": ([[23, 24], [31, 32]], [[5, 6], [7, 8]], 1, [3], [4, 4]),
    "several_pages": (
        [[27, 28, 29, 30, 31, 32], [35, 36, 37, 38, 39, 40]],
        [[6, 7, 8, 0, 0, 0], [8, 9, 10, 0, 0, 0]],
        5,
        [3],
        [8, 8],
    ),
    "several_requests": (
        [[1, 2, 3, 4], [6, 7, 8, 9], [3, 8, 9, 10], [14, 15, 16, 17], [0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1, 0, 0], [1, 2, 0, 0], [0, 2, 0, 0], [3, 4, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
        3,
        [1, 3, 0],
        [4, 4, 6, 6, 3, 3],
    ),
}


def sglang_call(name):
    slots, tables, decode_length, last, _ = SGLANG[name]
    tensors = {"cache_loc": slots, "last_page_lens": last, "page_table": tables}
    call = {n: torch.tensor(v, dtype=torch.int32, device=DEVICE) for n, v in tensors.items()}
    call["page_table"].zero_()
    numbers = {"decode_length": decode_length, "topk": 2, "page_size": 4}
    return call | numbers | {"cache_seqlens": poisoned(len(slots))}


@both
@pytest.mark.parametrize("name", SGLANG)
def test_the_cases_of_sglangs_tests_give_their_lengths_and_pages(name, build):
    call, (_, tables, _, _, lens) = sglang_call(name), SGLANG[name]
    build(**call)
    assert call["cache_seqlens"].tolist() == lens
    for have, want, length in zip(call["page_table"].tolist(), tables, lens, strict=True):
        within = -(-length // 4)
        assert have[:within] == want[:within]
    build(**call | {"decode_length": call["cache_loc"].shape[1]})
    assert call["page_table"].tolist() == tables


@both
def test_a_page_that_comes_again_is_written_again(build):
    call = draft_arguments(Draft(1, 1, 6, 4))
    call["cache_loc"][0, :6] = torch.tensor([9, 8, 20, 11, 10, -1])
    build(**call)
    assert call["page_table"][0].tolist() == [2, 5, 2, -1, POISON, POISON, POISON]


@both
@pytest.mark.parametrize(("width", "said"), [(4, "page_table 4,"), (3, "page_table 3,")])
def test_a_table_too_narrow_for_the_drafted_tokens_is_refused(width, said, build):
    call = draft_arguments(Draft(4, 2, 5, 4))
    call["page_table"] = poisoned(8, width)
    with pytest.raises(ValueError, match=f"decode_length must be <= {width} .*{said}.* got 5"):
        build(**call)


@both
def test_rows_of_a_padded_batch_that_have_no_slots_get_their_lengths_alone(build):
    call = draft_arguments(Draft(5, 4, 3, 16))
    call["cache_loc"] = call["cache_loc"][:12]
    build(**call)
    DRAFT.assert_right(call)
    assert (call["page_table"][12:] == POISON).all()
