"""The model of the scheduler metadata, against known schedules and the library's own words."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import drawn_calls
from support import schedule_vectors as vectors
from support.schedule_words import candidates, is_written, wrong_parts

from attnlib.core.schedule.splits import SchedulerFacts, max_words, num_words, plan_splits
from attnlib.core.schedule.words import parts_of, schedule_words, words_of

SMS = 132
FACTS = SchedulerFacts(3, 32, 8, 128, 1, 4096, SMS, page_size=1, causal=True)


@pytest.mark.parametrize(
    "lens, words",
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
        plan_splits(FACTS, np.array(lens))


def test_query_lengths_go_with_a_call_that_passes_them():
    facts = replace(FACTS, batch_size=2, varlen_q=True, max_seqlen_q=100)
    plan = plan_splits(
        facts,
        np.array([4096, 4096]),
        np.array([1, 100]),
    )
    assert plan.num_m_blocks.tolist() == [1, 4]
    with pytest.raises(ValueError, match="q_lens must be given if facts.varlen_q, and only then"):
        plan_splits(facts, np.array([4096, 4096]))


def test_the_twin_takes_the_longest_query_for_all_and_refuses_a_build_of_other_words():
    facts = replace(FACTS, varlen_q=True, max_seqlen_q=100)
    lens = np.array([4096, 70, 900])
    words = schedule_words(facts, lens)
    assert np.array_equal(words, schedule_words(facts, lens, np.full(3, 100)))
    assert words[4:7].tolist() == [4, 4, 4]
    with pytest.raises(ValueError, match="build must be upstream or sglang, .* got vllm"):
        schedule_words(replace(FACTS, build="vllm"), lens)


@given(st.integers(0, 10_000))
def test_every_plan_keeps_its_cap_and_orders_each_request_once(seed):
    call = next(drawn_calls.draw_calls(seed, num_sms=SMS, hdim96=False))
    lens, q_lens = call.lengths()
    plan = plan_splits(call.facts, lens, q_lens)
    settled = call.facts.settled
    assert 1 <= plan.num_splits.min() <= plan.num_splits.max() <= max(1, call.facts.split_cap)
    words = words_of(plan)
    assert len(words) == num_words(call.facts) <= max_words(call.facts.batch_size)
    assert np.array_equal(words, words_of(plan_splits(settled, lens, q_lens)))


LARGEST = {vectors.COMMITTED: 1900, vectors.SGLANG: 90, vectors.STEPS: 1300}
"""File -> requests that some batch of it has more of."""


@pytest.mark.parametrize(
    "path, count",
    [
        (vectors.COMMITTED, 2000),
        (vectors.SGLANG, 1600),
        (vectors.STEPS, 1890),
    ],
)
def test_the_model_agrees_with_the_library_word_for_word(path, count):
    header, lines = vectors.read(path)
    answered = [(call, words) for call, words in lines if words is not None]
    assert len(answered) >= count
    sizes = [call.facts.batch_size for call, _ in answered]
    assert min(sizes) == 1
    assert max(sizes) > LARGEST[path]
    wrong = []
    rounded = 0
    for call, words in answered:
        plan, *others = candidates(plan_splits(call.facts, *call.lengths()))
        if wrong_parts(plan, words):
            rounded += 1
            if all(wrong_parts(other, words) for other in others):
                wrong.append(call)
    assert wrong == [], f"of {len(answered)} calls on {header['gpu']}, {header['library']}"
    assert rounded <= 2


def kind_of(facts):
    """The kind of layer, and of step, that a call is of."""
    layer = "window" if facts.is_local else "full"
    if facts.head_dim_v != facts.head_dim:
        layer = "mla"
    return layer, "decode" if facts.max_seqlen_q == 1 else "verify"


def test_the_twin_of_our_launch_writes_the_librarys_words_for_every_kind_of_layer():
    _, lines = vectors.read(vectors.STEPS)
    wrong = []
    seen = Counter()
    for call, words in lines:
        facts = call.facts
        written = is_written(facts)
        twin = schedule_words(facts, *call.lengths())
        if not np.array_equal(twin[written], words[written]):
            wrong.append(call)
        seen[facts.build, *kind_of(facts)] += 1
    assert wrong == []
    builds = ("sglang-0.4.4", "sglang", "upstream")
    kinds = product(builds, ("full", "window", "mla"), ("decode", "verify"))
    assert set(seen) == {*kinds} and min(seen.values()) >= 50


def test_the_splits_and_query_rows_of_vllms_build_are_the_librarys():
    _, lines = vectors.read(vectors.VLLM)
    wrong = []
    split = 0
    for call, words in lines:
        lens, q_lens = call.lengths()
        batch = len(lens)
        facts = call.facts
        rows = np.full(batch, facts.max_seqlen_q) if q_lens is None else q_lens
        parts = words[:-1].reshape(-1, -(-batch // 4) * 4)[:, :batch]
        has_splits = facts.split_cap > 1
        has_heads = facts.is_causal or facts.is_local
        right = len(parts) == 1 + has_splits + has_heads
        right &= np.array_equal(parts[0], rows * (facts.group_size if facts.packs else 1))
        if has_splits:
            plans = candidates(plan_splits(facts, lens, q_lens))
            right &= any(np.array_equal(parts[1], plan.num_splits) for plan in plans)
            split += parts[1].max() > 1
        if not right:
            wrong.append(call)
    assert len(lines) > 2500 and split > 400
    assert wrong == []


@pytest.mark.parametrize("part", ["num_splits", "num_m_blocks", "batch_order", "heads_in_l2"])
def test_the_judge_sees_a_wrong_word_of_each_part(part):
    plan = plan_splits(FACTS, np.array([1024, 32, 32]))
    words = words_of(plan)
    words[parts_of(plan.facts)[part]] += 1
    assert wrong_parts(plan, words) == {part}
    assert wrong_parts(plan, words[:-1]) == {"size"}
