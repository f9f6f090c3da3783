"""The nouns: what they refuse, what they derive, and that garbage beyond a row cannot matter."""

import random
import re
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from attnlib.core import AttnSpec, DecodeBatch, PagedKV

SPEC = AttnSpec(num_qo_heads=8, num_kv_heads=2, head_dim=16, page_size=4)
HUGE = 2**31 - 1


def refused(argument, got):
    """The error names the argument, what it must be, and what it was."""
    words = rf"(?s)^{argument} must .+got .*{re.escape(str(got))}"
    return pytest.raises((ValueError, TypeError), match=words)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def shuffled_table(lens, page_size, spare, garbage):
    """A page table of distinct pages in random order; dead columns and spare ones hold garbage."""
    used = [-(-n // page_size) for n in lens]
    pool = random.Random(0).sample(
        range(2 * sum(used)),
        sum(used),
    )
    width = max(used) + spare
    return [[pool.pop() for _ in range(n)] + [garbage] * (width - n) for n in used]


BAD_FIELDS = [
    *(("page_size", value) for value in (12, 0, 16.0)),
    *(("num_qo_heads", value) for value in (7, -8)),
    *(("num_kv_heads", 0), ("head_dim", True), ("head_dim", "64")),
    *(("dtype", "bf16"), ("kv_dtype", "int8")),
]


@pytest.mark.parametrize("argument, value", BAD_FIELDS)
def test_a_spec_refuses_a_bad_field_by_name_requirement_and_value(argument, value):
    with refused(argument, repr(value)):
        replace(SPEC, **{argument: value})


@pytest.mark.parametrize(
    "argument, got, seq_lens, page_table",
    [
        (
            "seq_lens",
            "list",
            [4, 4],
            int32([[0], [1]]),
        ),
        (
            "seq_lens",
            "[2] int64",
            torch.tensor([4, 4]),
            int32([[0], [1]]),
        ),
        (
            "seq_lens",
            "[2, 1] int32",
            int32([[4], [4]]),
            int32([[0], [1]]),
        ),
        (
            "page_table",
            "[2, 1] int64",
            int32([4, 4]),
            torch.tensor([[0], [1]]),
        ),
        ("page_table", "[2] int32", int32([4, 4]), int32([0, 1])),
        (
            "seq_lens",
            "[0] int32",
            int32([]),
            int32([]).reshape(0, 1),
        ),
        (
            "seq_lens",
            "[1] int32",
            int32([4]),
            int32([[0], [1]]),
        ),
        (
            "seq_lens",
            "0..4",
            int32([4, 0]),
            int32([[0], [1]]),
        ),
        (
            "seq_lens",
            "-3..4",
            int32([4, -3]),
            int32([[0], [1]]),
        ),
        (
            "seq_lens",
            "4..5",
            int32([4, 5]),
            int32([[0], [1]]),
        ),
        (
            "seq_lens",
            "1..1",
            int32([1]),
            int32([]).reshape(1, 0),
        ),
        (
            "page_table",
            "-1",
            int32([5, 4]),
            int32([[0, -1], [1, 2]]),
        ),
    ],
)
def test_a_batch_refuses_what_does_not_describe_a_decode_step(argument, got, seq_lens, page_table):
    with refused(argument, got):
        DecodeBatch.build(SPEC, seq_lens, page_table)


@pytest.mark.parametrize(
    "v_cache",
    [
        torch.zeros(3, 4, 2, 32),
        torch.zeros(4, 2, 16),
    ],
)
def test_a_cache_whose_halves_differ_is_refused(v_cache):
    with refused("k_cache and v_cache", list(v_cache.shape)[-1]):
        PagedKV(torch.zeros(3, 4, 2, 16), v_cache)


def test_a_specs_facts_follow_from_its_fields():
    spec = AttnSpec(32, 8, 64, 16)
    assert spec.group_size == 4
    assert spec.heads == "32/8"
    assert spec.softmax_scale == 0.125
    assert spec.kv_dtype == "bfloat16"
    assert spec.out_dtype == "bfloat16"
    assert AttnSpec(1, 1, 64, 1, "float8_e4m3fn").out_dtype == "bfloat16"
    assert AttnSpec(1, 1, 64, 1, "float16", "float8_e4m3fn").out_dtype == "float16"


@example(
    lens=[65, 1, 64, 63] * 64,
    page_size=64,
    spare=1,
    garbage=-1,
)
@example(
    lens=[1, 2] * 9,
    page_size=1,
    spare=1,
    garbage=-1,
)
@given(
    lens=st.lists(st.integers(1, 200), min_size=1, max_size=20),
    page_size=st.sampled_from([1, 2, 8, 64]),
    spare=st.integers(0, 3),
    garbage=st.sampled_from([-1, 0, HUGE, -HUGE]),
)
def test_the_ragged_page_list_is_exact_for_any_lengths(lens, page_size, spare, garbage):
    table = shuffled_table(lens, page_size, spare, garbage)
    given = int32(lens)
    batch = DecodeBatch.build(replace(SPEC, page_size=page_size), given, int32(table))
    given += 1  # an engine's next step, in its own buffer
    pages = [row[: -(-n // page_size)] for row, n in zip(table, lens, strict=True)]
    assert batch.kv_indptr.tolist() == [0, *accumulate(map(len, pages))]
    assert batch.kv_indices.tolist() == sum(pages, [])
    assert batch.kv_last_page_len.tolist() == [(n - 1) % page_size + 1 for n in lens]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == lens
    derived = (batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
    assert {t.dtype for t in (*derived, batch.seq_lens, batch.seq_lens_cpu)} == {torch.int32}
    assert batch.batch_size == len(lens)
