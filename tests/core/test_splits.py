"""The model of the scheduler metadata, against known schedules and the library's own words."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import drawn_calls
from support import schedule_vectors as vectors
from support import schedule_words as reasons
from support.schedule_words import SPECIFIED, TIE, candidates, parts_of, words_of

from attnlib.core.schedule.splits import SchedulerFacts, max_words, num_words, plan_splits

VECTORS = vectors.COMMITTED
SMS = 132


def decode(batch_size, heads, width, **changes):
    facts = SchedulerFacts(batch_size, *heads, 128, 1, width, SMS, page_size=1, causal=True)
    return replace(facts, **changes)


def uniform(facts):
    return plan_splits(facts, np.full(facts.batch_size, facts.max_seqlen_k))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, {"num_splits": 0, "num_m_blocks": 8, "batch_order": 16, "heads_in_l2": 24}),
        ({"causal": False}, {"num_splits": 0, "num_m_blocks": 8, "batch_order": 16}),
        ({"window": (99, 0)}, {"num_splits": 0, "num_m_blocks": 8, "heads_in_l2": 16}),
    ],
)
def test_the_layout_has_a_part_where_the_mask_needs_it_and_the_semaphore_last(changes, parts):
    plan = uniform(decode(5, (32, 8), 4096, **changes))
    end = num_words(plan.facts) - 1
    assert parts_of(plan.facts) == {**parts, "semaphore": end}
    words = words_of(plan)
    assert end == 8 * len(parts) and len(words.values) <= max_words(5)
    assert words.values[-1] == 0 and words.specified[-1]
    for at in parts.values():
        assert (words.why[at + 5 : at + 8] == reasons.PADDING).all()
        assert (words.why[at : at + 5] != reasons.PADDING).all()


def test_equal_keys_leave_the_order_open_and_nothing_else_that_is_equal():
    plan = plan_splits(decode(4, (32, 8), 4096), np.array([700, 4096, 700, 700]))
    why = words_of(plan).why.reshape(-1)[:-1].reshape(4, 4)
    assert why[2].tolist() == [SPECIFIED, TIE, TIE, TIE]
    assert (why[[0, 1, 3]] == SPECIFIED).all()


def test_some_zero_lengths_are_fine():
    facts = decode(3, (32, 8), 4096)
    assert plan_splits(facts, np.array([0, 900, 0])).num_splits.tolist() == [1, 8, 1]
    unsplit = replace(facts, num_splits=1)
    assert plan_splits(unsplit, np.zeros(3, int)).num_splits.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("lens", "words"),
    [
        ([1, 2], r"seq_lens must be \[3\] integers, got \[2\] int64"),
        ([1.0, 2.0, 3.0], r"seq_lens must be \[3\] integers, got \[3\] float64"),
        ([1, 2, 4097], r"seq_lens must lie in 0..4096, got 1..4097"),
        ([1, -2, 3], r"seq_lens must lie in 0..4096, got -2..3"),
        ([0, 0, 0], "must hold a length above zero"),
    ],
)
def test_wrong_lengths_are_refused_by_name(lens, words):
    with pytest.raises(ValueError, match=words):
        plan_splits(decode(3, (32, 8), 4096), np.array(lens))


def test_query_lengths_go_with_a_call_that_passes_them():
    facts = decode(2, (32, 8), 4096, varlen_q=True, max_seqlen_q=100)
    plan = plan_splits(facts, np.array([4096, 4096]), np.array([1, 100]))
    assert plan.num_m_blocks.tolist() == [1, 4]
    with pytest.raises(ValueError, match="q_lens must be given if facts.varlen_q, and only then"):
        plan_splits(facts, np.array([4096, 4096]))


def test_a_quotient_on_an_integer_leaves_open_what_rounding_would_change():
    # 120 blocks with the margin of 1.1 are 132, one for each SM.
    plan = plan_splits(decode(1, (8, 1), 15360, causal=False), np.array([15360]))
    assert [other.blocks_per_sm for other in candidates(plan)] == [1, 2]
    counts = words_of(plan).counts()
    assert counts["rounding"] == 1 and words_of(plan).why[0] == reasons.ROUNDING


def test_a_buffer_for_a_batch_holds_every_layout():
    assert [max_words(batch) for batch in (1, 4, 5, 992)] == [17, 17, 33, 3969]


@given(st.integers(0, 10_000))
def test_every_plan_keeps_its_cap_and_orders_each_request_once(seed):
    call = next(drawn_calls.draw_calls(seed, num_sms=SMS, hdim96=False))
    lens, q_lens = call.lengths()
    plan, settled = plan_splits(call.facts, lens, q_lens), call.facts.settled
    assert 1 <= plan.num_splits.min() <= plan.num_splits.max() <= max(1, call.facts.split_cap)
    assert sorted(plan.batch_order) == list(range(call.facts.batch_size))
    words = words_of(plan)
    assert len(words.values) == num_words(call.facts) <= max_words(call.facts.batch_size)
    assert np.array_equal(words.values, words_of(plan_splits(settled, lens, q_lens)).values)


def test_the_model_agrees_with_the_library_word_for_word(record_property):
    header, found = vectors.read(VECTORS)
    answered = [(call, words) for call, words in found if words is not None]
    assert len(answered) >= 2000
    sizes = [call.facts.batch_size for call, _ in answered]
    assert min(sizes) == 1 and max(sizes) > 1900
    verdicts = [vectors.compare(call, words) for call, words in answered]
    wrong = [call for (call, _), v in zip(answered, verdicts, strict=True) if v.wrong]
    assert wrong == [], f"of {len(answered)} calls on {header['gpu']}, {header['library']}"
    # Open words: padding is never written; ties are open among equal keys, and `compare` has
    # checked that they are a permutation of them; rounding is the one fast division.
    counts = sum((Counter(v.counts) for v in verdicts), Counter())
    record_property("words", dict(counts))
    share = {name: count / counts.total() for name, count in counts.items()}
    assert share["rounding"] <= 0.001 and share["padding"] <= 0.05 and share["specified"] >= 0.6
