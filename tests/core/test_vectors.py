"""Vector files: drawn the same everywhere, read back as written, and judged without mercy."""

import itertools

import numpy as np
import pytest
from support import drawn_calls
from support import schedule_vectors as vectors
from support.schedule_words import candidates, parts_of, words_of

from attnlib.core.schedule.splits import SchedulerFacts, plan_splits

CALLS = list(itertools.islice(drawn_calls.draw_calls(7, num_sms=132, hdim96=False), 300))


def model_words(call):
    return words_of(plan_splits(call.facts, *call.lengths())).values


def test_calls_reach_every_regime_and_the_same_ones_of_a_seed():
    again = drawn_calls.draw_calls(7, num_sms=132, hdim96=False)
    assert list(itertools.islice(again, 300)) == CALLS
    facts = [call.facts for call in CALLS]
    assert {f.is_causal for f in facts} == {f.is_local for f in facts} == {True, False}
    assert {f.packs for f in facts} == {True, False}
    assert {f.paged_gather for f in facts if f.page_size} == {True, False}
    assert {f.varlen_q for f in facts} == {f.page_size is None for f in facts} == {True, False}
    assert min(f.batch_size for f in facts) == 1 and max(f.batch_size for f in facts) > 992
    assert {f.dtype for f in facts} == {"bfloat16", "float16", "float8_e4m3fn"}


def test_a_file_reads_back_as_written_and_is_byte_identical(tmp_path):
    words = [model_words(call) for call in CALLS[:20]]
    told = [*({"words": w.tolist()} for w in words), {"refused": "not built"}]
    lines = [drawn_calls.to_line(c) | more for c, more in zip(CALLS[:21], told, strict=True)]
    for name in ("a", "b"):
        drawn_calls.write(tmp_path / name, [{"gpu": "Test GPU"}, *lines])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    header, found = vectors.read(tmp_path / "a")
    assert header == {"gpu": "Test GPU"}
    assert [call for call, _ in found] == CALLS[:21]
    assert found[-1][1] is None
    assert all(np.array_equal(w, f) for w, (_, f) in zip(words, found, strict=False))


def test_the_models_own_words_are_right():
    assert [c for c in CALLS if vectors.compare(c, model_words(c)).wrong] == []


@pytest.fixture
def three():
    """Requests of 5, 1 and 1 blocks, of which the last two tie."""
    facts = SchedulerFacts(3, 32, 8, 128, 1, 1024, 132, page_size=1, causal=True, num_splits=1)
    return vectors.Call(facts, vectors.LengthSpec("skewed", 1024, 1), None)


@pytest.mark.parametrize("part", ["num_splits", "num_m_blocks", "batch_order", "heads_in_l2"])
def test_a_wrong_word_is_found_in_its_part(three, part):
    words = model_words(three)
    words[parts_of(three.facts)[part]] += 1
    assert part in vectors.compare(three, words).wrong
    assert vectors.compare(three, words[:-1]).wrong == {"size": 1}


def test_padding_is_not_looked_at_and_a_tie_comes_either_way_but_is_a_permutation(three):
    words = model_words(three)
    words[3] = 12345
    words[[9, 10]] = words[[10, 9]]
    assert vectors.compare(three, words).wrong == {}
    assert vectors.compare(three, words).open_alike["tie"] == 0
    words[9] = words[10]
    assert "ties" in vectors.compare(three, words).wrong


@pytest.mark.parametrize("kind", vectors.KINDS)
def test_lengths_lie_in_range_and_are_never_all_zero(kind):
    for high, seed in itertools.product((1, 2, 63, 5000), range(5)):
        lens = vectors.LengthSpec(kind, high, seed).sample(40)
        assert lens.min() >= (0 if kind == "zeros" else 1) and 1 <= lens.max() <= high
        assert lens.dtype == np.int32


def test_where_rounding_leaves_a_choice_the_words_must_follow_one_of_them():
    facts = SchedulerFacts(1, 8, 1, 128, 1, 15360, 132, page_size=1)
    call = vectors.Call(facts, vectors.LengthSpec("fixed", 15360, 0), None)
    plan = plan_splits(facts, *call.lengths())
    splits = [int(candidate.num_splits[0]) for candidate in candidates(plan)]
    assert splits == [103, 60]
    words = model_words(call)
    for n, wrong in ((103, {}), (60, {}), (80, {"num_splits": 1, "ties": 1})):
        words[0] = n
        assert vectors.compare(call, words).wrong == wrong
