"""What is special to the step's one launch: the schedule's words, whose they are, and their use."""

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import drawn_calls
from support.metadata_cases import (
    DEVICE,
    ON_GPU,
    POISON,
    SMS,
    STEP,
    Shape,
    arguments,
    assert_schedule,
    compiled,
    facts_of,
    poisoned,
    reserved,
)

from attnlib.core.backends import fa3
from attnlib.core.batch import DecodeBatch
from attnlib.core.metadata.step import build_step_metadata
from attnlib.core.schedule import library
from attnlib.core.schedule.fa3 import SchedulerMetadata, precompute, reserve
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import max_words, plan_splits
from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import Oracle, build_workload
from attnlib.kinds.step.measure import over_own_buffers
from attnlib.studies.scheduler_metadata import vectors
from attnlib.studies.scheduler_metadata.words import PADDING, words_of

SMALL = Shape(4, 64, 4)
needs_the_stand_in = pytest.mark.skipif(ON_GPU, reason="FakeFa3 and the interpreter run on the CPU")


def schedule(facts: SchedulerFacts, lens: np.ndarray, delta: int = 0) -> SchedulerMetadata:
    """The words of `lens`, by a call that has no page to copy: any width, little memory."""
    scheduler = reserved(facts)
    build_step_metadata(**without_pages(facts, lens, delta), scheduler=scheduler)
    return scheduler


def without_pages(facts: SchedulerFacts, lens: np.ndarray, delta: int = 0) -> dict[str, Any]:
    batch, columns = facts.batch_size, facts.max_seqlen_k // facts.page_size
    sizes = {"cache_seqlens": batch, "cu_seqlens_k": batch + 1}
    outputs = {name: torch.empty(n, dtype=torch.int32, device=DEVICE) for name, n in sizes.items()}
    return outputs | {
        "seq_lens": torch.from_numpy(lens.astype(np.int64) - delta).to(DEVICE),
        "req_pool_indices": torch.zeros(batch, dtype=torch.int64, device=DEVICE),
        "req_to_token": torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        "page_table": torch.empty(batch, columns, dtype=torch.int32, device=DEVICE),
        "page_size": facts.page_size,
        "max_pages": 0,
        "seq_len_delta": delta,
    }


@st.composite
def decode_facts(draw: st.DrawFn) -> SchedulerFacts:
    heads = draw(st.sampled_from([*drawn_calls.HEADS, (256, 1), (512, 2)]))
    page_size = 2 ** draw(st.integers(4, 9))
    windowed = draw(st.booleans())
    return SchedulerFacts(
        draw(st.integers(1, 64)),
        *heads,
        draw(st.sampled_from(drawn_calls.HEAD_DIMS)),
        1,
        page_size * draw(st.integers(1, 4096)),
        SMS,
        page_size=page_size,
        dtype=draw(st.sampled_from(("bfloat16", "float8_e4m3fn"))),
        causal=draw(st.booleans()),
        window=(draw(st.integers(0, 5000)), 0) if windowed else (-1, -1),
        has_softcap=draw(st.booleans()),
        num_splits=draw(st.sampled_from((0, 0, 1, 2, 7, 32, 255))),
        sm_margin=draw(st.sampled_from((0, 0, 1, 50))) if SMS > 50 else 0,
        hdim96=draw(st.booleans()),
    )


@given(decode_facts(), st.data())
@settings(max_examples=120)
def test_the_schedule_of_random_facts_and_lengths_is_the_models(
    facts: SchedulerFacts, data: st.DataObject
) -> None:
    # A few lengths drawn again and again: ties, which keep the order of requests.
    few = data.draw(st.lists(st.integers(0, facts.max_seqlen_k), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 1000))
    lens = np.random.default_rng(seed).choice([*few, facts.max_seqlen_k], facts.batch_size)
    lens[seed % facts.batch_size] = max(1, lens[seed % facts.batch_size])
    delta = data.draw(st.integers(0, 5))
    assert_schedule(schedule(facts, lens, delta), torch.from_numpy(lens))


@pytest.mark.parametrize("batch", [1, 2, 7, 8, 9, 129, 400, 992])
@pytest.mark.parametrize("causal", [False, True])
def test_requests_of_equal_length_keep_their_order(batch: int, causal: bool) -> None:
    facts = SchedulerFacts(batch, 8, 1, 128, 1, 2**17, SMS, page_size=256, causal=causal)
    lens = np.full(batch, 70_000)
    scheduler = schedule(facts, lens)
    assert_schedule(scheduler, torch.from_numpy(lens))
    at = 2 * -(-batch // 4) * 4
    assert scheduler.words[at : at + batch].tolist() == list(range(batch))


@pytest.mark.parametrize("heads", [(8, 1), (32, 8)])
def test_a_share_that_falls_on_a_whole_number_of_blocks_is_rounded_as_in_the_model(heads) -> None:
    # With the margin of 1.1, 120 blocks of one head are one for each of 132 multiprocessors.
    width = 2**21
    facts = SchedulerFacts(1, *heads, 128, 1, width, SMS, page_size=256, num_splits=255)
    step = 120 // heads[1]
    for blocks in {step * k + more for k in (1, 3, 7, 50, 91, 100, 127) for more in (-1, 0, 1)}:
        lens = np.array([blocks * facts.tile[1]])
        assert_schedule(schedule(facts, lens), torch.from_numpy(lens))


@pytest.mark.parametrize("pack_gqa", [False, True])
def test_query_heads_that_are_not_packed_are_scheduled_one_by_one(pack_gqa: bool) -> None:
    sizes = SchedulerFacts(7, 256, 1, 128, 1, 2**14, SMS, page_size=256, causal=True, num_splits=1)
    facts = replace(sizes, pack_gqa=pack_gqa)
    assert facts.packs == pack_gqa
    lens = np.array([1, 2**14, 900, 900, 5000, 130, 128])
    assert_schedule(schedule(facts, lens), torch.from_numpy(lens))


def test_over_992_requests_nothing_is_split_and_each_ctas_share_is_sorted_alone() -> None:
    facts = SchedulerFacts(1001, 8, 1, 128, 1, 2**17, SMS, page_size=256, causal=True)
    lens = np.random.default_rng(3).integers(0, 2**17, 1001)
    scheduler = schedule(facts, lens)
    assert_schedule(scheduler, torch.from_numpy(lens))
    assert set(scheduler.words[:1001].tolist()) == {1}


@pytest.mark.parametrize("num_splits", [0, 1])
def test_lengths_of_zero_alone_give_one_split_each(num_splits: int) -> None:
    facts = SchedulerFacts(5, 32, 8, 128, 1, 4096, SMS, page_size=16, num_splits=num_splits)
    scheduler = schedule(facts, np.zeros(5, int))
    unsplit = words_of(plan_splits(replace(facts, num_splits=1), np.zeros(5, int)))
    assert scheduler.words.tolist() == unsplit.values.tolist()


def in_domain(facts: SchedulerFacts) -> bool:
    page = facts.page_size
    one_token = facts.max_seqlen_q == 1 and not facts.varlen_q
    pages = page is not None and not page & (page - 1) and not facts.max_seqlen_k % page
    return one_token and pages and (facts.packs or not facts.must_pack)


def library_schedules() -> list[tuple[vectors.Call, np.ndarray]]:
    """All committed calls that the kernel supports on a GPU; off it those that take no time."""
    header, found = vectors.read(vectors.COMMITTED)
    if ON_GPU and header["num_sms"] != SMS:
        pytest.skip(f"the vectors are of {header['num_sms']} multiprocessors, this GPU has {SMS}")
    known = [(c, words) for c, words in found if words is not None and in_domain(c.facts)]
    if ON_GPU:
        return known
    large = [pair for pair in known if pair[0].facts.batch_size > 992]
    return [pair for pair in known if pair[0].facts.batch_size <= 40] + large[:1]


def test_the_words_are_those_that_the_library_wrote() -> None:
    chosen = library_schedules()
    assert len(chosen) > (350 if ON_GPU else 200)
    for call, words in chosen:
        lens, _ = call.lengths()
        written = words_of(plan_splits(call.facts, lens)).why != PADDING
        mine = schedule(call.facts, lens).words.cpu().numpy()
        np.testing.assert_array_equal(mine[written], words[written], err_msg=str(call))
        assert not mine[~written].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 5}, "batch_size 4, as page_table [4, 26]"),
        ({"page_size": 8}, "page_size 4, as page_table"),
        ({"page_size": None}, "page_size 4, as page_table"),
        ({"max_seqlen_k": 100}, "max_seqlen_k 104, as page_table"),
        ({"max_seqlen_q": 2}, "max_seqlen_q 1, as page_table"),
        ({"varlen_q": True}, "varlen_q False, as page_table"),
    ],
)
def test_metadata_of_another_step_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str
) -> None:
    call = arguments(SMALL)
    right = reserved(facts_of(call))
    build_step_metadata(**call, scheduler=right)
    call["cache_seqlens"].fill_(POISON)
    wrong = reserved(replace(right.facts, **changes))
    with pytest.raises(ValueError, match=re.escape(message)):
        build_step_metadata(**call, scheduler=wrong)
    assert (call["cache_seqlens"] == POISON).all() and (wrong.words == POISON).all()


def test_words_that_cannot_be_the_librarys_are_refused() -> None:
    call = arguments(SMALL)
    facts = facts_of(call).settled
    words = torch.zeros(17, dtype=torch.int32, device=DEVICE)
    for wrong, message in (
        (words[:16], "scheduler.words must be [17] int32, got [16] int32"),
        (words.long(), "scheduler.words must be [17] int32, got [17] int64"),
        (words.to("meta"), "scheduler.words must be on seq_lens's device"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            build_step_metadata(**call, scheduler=SchedulerMetadata(wrong, facts))
    with pytest.raises(TypeError, match="scheduler must be SchedulerMetadata, got Tensor"):
        build_step_metadata(**call, scheduler=words)


def test_words_are_refused_until_written_and_after_a_foreign_write() -> None:
    call = arguments(SMALL)
    facts = facts_of(call)
    scheduler = reserve(facts, call["seq_lens"].device)
    assert scheduler.facts == facts.settled and facts.num_splits == 0
    refusals = ("written before they are used", "those of this scheduler metadata")
    for refusal in refusals:
        with pytest.raises(ValueError, match=f"words must be {refusal}"):
            scheduler.require_fits(facts, device=scheduler.words.device)
        build_step_metadata(**call, scheduler=scheduler)
        scheduler.require_fits(facts, device=scheduler.words.device)
        assert_schedule(scheduler, call["cache_seqlens"])
        scheduler.words.add_(1)


def test_a_launch_into_a_shared_buffer_takes_it_from_the_step_before() -> None:
    buffer = poisoned(max_words(8))
    calls = [arguments(Shape(batch, 64, 4)) for batch in (4, 8)]
    facts = [facts_of(call) for call in calls]
    small, large = (reserve(f, buffer.device, out=buffer) for f in facts)
    build_step_metadata(**calls[0], scheduler=small)
    assert not buffer[len(small.words) :].any()
    build_step_metadata(**calls[1], scheduler=large)
    large.require_fits(facts[1], device=buffer.device)
    with pytest.raises(ValueError, match="words must be those of this scheduler metadata"):
        small.require_fits(facts[0], device=buffer.device)
    build_step_metadata(**calls[0], scheduler=small)
    small.require_fits(facts[0], device=buffer.device)


def test_a_launch_forgets_the_stream_of_the_step_before() -> None:
    call = arguments(SMALL)
    facts = facts_of(call)
    scheduler = reserve(facts, call["seq_lens"].device)
    for stream in ((False, 0x10), (False, 0x20)):
        build_step_metadata(**call, scheduler=scheduler)
        scheduler.require_fits(facts, device=scheduler.words.device, stream=stream)


def test_a_reservation_is_checked_like_a_precomputed_one() -> None:
    call = arguments(SMALL)
    facts, device = facts_of(call), call["seq_lens"].device
    with pytest.raises(ValueError, match="pack_gqa must be None or True"):
        reserve(replace(facts, pack_gqa=False), device)
    with pytest.raises(ValueError, match=r"out must be \[>= 17\] int32, got \[16\]"):
        reserve(facts, device, out=torch.zeros(16, dtype=torch.int32, device=device))
    if ON_GPU:
        with pytest.raises(ValueError, match="num_sms must be that of"):
            reserve(replace(facts, num_sms=SMS + 1), device)


@needs_the_stand_in
def test_attention_takes_the_words_at_the_cap_that_they_were_made_for(fake_fa3) -> None:
    work = build_workload(DecodeCase(AttnSpec(8, 2, 64, 16), 5, 300, "ragged"), device="cpu")
    own, call = over_own_buffers(work.batch)
    scheduler = reserve(fa3.facts_of(own), own.seq_lens.device)
    with pytest.raises(ValueError, match="words must be written before they are used"):
        fa3.attend(work.q, work.kv, own, metadata=scheduler)
    for _ in range(2):
        build_step_metadata(**call, scheduler=scheduler)
        for _ in range(3):
            out = fa3.attend(work.q, work.kv, own, metadata=scheduler)
            assert Oracle(work.q, work.kv, work.batch).check(out).passed
    assert fake_fa3.asked == [] and len(fake_fa3.launched) == 6
    assert {seen["num_splits"] for seen in fake_fa3.launched} == {scheduler.facts.num_splits}
    assert all(seen["scheduler_metadata"] is scheduler.words for seen in fake_fa3.launched)
    assert torch.equal(scheduler.words, precompute(fa3.facts_of(own), own.seq_lens).words)


def assert_words_of_library(scheduler: SchedulerMetadata, lens: torch.Tensor) -> None:
    """The library's own words, but for the padding, which it leaves as it was."""
    written = words_of(plan_splits(scheduler.facts, lens.cpu().numpy())).why != PADDING
    theirs = precompute(scheduler.facts, lens).words.cpu().numpy()
    np.testing.assert_array_equal(scheduler.words.cpu().numpy()[written], theirs[written])


@pytest.mark.gpu
def test_the_words_are_those_that_the_library_writes_now(on_hopper) -> None:
    rng = np.random.default_rng(11)
    calls = drawn_calls.draw_calls(11, num_sms=SMS, hdim96=library.has_hdim96())
    for facts in itertools.islice((c.facts for c in calls if in_domain(c.facts)), 300):
        lens = rng.integers(1, facts.max_seqlen_k + 1, facts.batch_size)
        scheduler = schedule(facts, lens)
        assert_words_of_library(scheduler, torch.from_numpy(lens).int().to(DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batch_size", [1, 5, 130])
def test_a_graph_of_a_step_replays_with_new_lengths(on_hopper, batch_size, page_size) -> None:
    case = DecodeCase(AttnSpec(16, 2, 128, page_size), batch_size, 4000, "ragged")
    work = build_workload(case, device="cuda")
    own, call = over_own_buffers(work.batch)
    scheduler = reserve(fa3.facts_of(own), own.seq_lens.device)

    def step() -> list[torch.Tensor]:
        build_step_metadata(**call, scheduler=scheduler)
        return [fa3.attend(work.q, work.kv, own, metadata=scheduler) for _ in range(4)]

    for out in step():
        assert Oracle(work.q, work.kv, work.batch).check(out).passed
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for most in (4000, 1, 129, 2500):
        lens = torch.randint(1, most + 1, (batch_size,), dtype=torch.int32)
        lens = lens.minimum(work.batch.seq_lens_cpu)
        call["seq_lens"].copy_(lens)
        own.page_table.fill_(0)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert_words_of_library(scheduler, own.seq_lens)
        batch = DecodeBatch.build(case.spec, lens, work.batch.page_table)
        for out in outs:
            assert Oracle(work.q, work.kv, batch).check(out).passed


@pytest.mark.gpu
def test_other_facts_and_lengths_compile_nothing_once_the_structure_is_known() -> None:
    facts = SchedulerFacts(6, 32, 8, 128, 1, 4096, SMS, page_size=16, causal=True)
    schedule(facts, np.full(6, 900))
    before = compiled(STEP)
    for changes in ({"num_splits": 3}, {"head_dim": 80}, {"num_qo_heads": 16, "num_kv_heads": 1}):
        for delta in (0, 1, 16):
            schedule(replace(facts, **changes), np.full(6, 4000), delta)
    assert compiled(STEP) == before
