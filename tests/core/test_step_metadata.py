"""What is special to the step's one launch: the schedule's words, whose they are, and their use."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import drawn_calls
from support import metadata_cases as cases
from support.metadata_cases import DEVICE, ON_GPU, POISON, SCHEDULES, SMS, Shape
from support.schedule_words import is_written

from attnlib.core.backends import flash_attn3
from attnlib.core.batch import DecodeBatch
from attnlib.core.metadata.schedules import build_step_schedules
from attnlib.core.schedule import library
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.flash_attn3 import precompute, unwritten
from attnlib.core.schedule.kinds import StepSchedules
from attnlib.core.schedule.splits import blocks_in_l2
from attnlib.core.spec import AttnSpec
from attnlib.measure.calls.check import Judge
from attnlib.measure.calls.decode import measure as decode
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.decode.measure import build_workload

SMALL = Shape(4, 64, 4)
BUILDS_OF_WORDS = ("sglang-0.4.4", "sglang", "upstream")


def over_own_buffers(batch):
    """`batch` over empty buffers, and the arguments that fill them from a request pool."""
    page_size = batch.spec.page_size
    width = batch.page_table.shape[1]
    offsets = torch.arange(page_size, device=batch.page_table.device, dtype=torch.int32)
    slots = batch.page_table[:, :, None] * page_size + offsets
    seq_lens = torch.zeros_like(batch.seq_lens)
    page_table = torch.zeros_like(batch.page_table)
    return replace(batch, seq_lens=seq_lens, page_table=page_table), {
        "seq_lens": batch.seq_lens.long(),
        "req_pool_indices": torch.arange(batch.batch_size, device=slots.device),
        "req_to_token": slots.view(batch.batch_size, width * page_size),
        "cache_seqlens": seq_lens,
        "cu_seqlens_k": torch.zeros_like(batch.kv_indptr),
        "page_table": page_table,
        "page_size": page_size,
        "max_pages": width,
    }


def schedule(facts, lens, delta=0):
    """The words of `lens`, by a call that has no page to copy: any width, little memory."""
    schedules = StepSchedules.reserve({"full": facts}, torch.device(DEVICE))
    schedules.words.fill_(POISON)
    batch = facts.batch_size
    sizes = {
        "cache_seqlens": (batch,),
        "cu_seqlens_k": (batch + 1,),
        "page_table": (batch, facts.max_seqlen_k // facts.page_size),
        "req_to_token": (1, 1),
    }
    build_step_schedules(
        **{name: torch.empty(n, dtype=torch.int32, device=DEVICE) for name, n in sizes.items()},
        seq_lens=torch.from_numpy(lens.astype(np.int64) - delta).to(DEVICE),
        req_pool_indices=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
        page_size=facts.page_size,
        max_pages=0,
        seq_len_delta=delta,
        schedules=schedules,
    )
    return schedules["full"]


def assert_models(facts, lens, delta=0):
    cases.assert_schedule(schedule(facts, lens, delta), torch.from_numpy(lens))


def in_domain(facts):
    page = facts.page_size
    one_token = facts.max_seqlen_q == 1 and not facts.varlen_q
    pages = page is not None and not page & (page - 1) and not facts.max_seqlen_k % page
    return one_token and pages and (facts.packs or not facts.must_pack)


@given(st.integers(0, 10_000), st.integers(0, 5), st.sampled_from(BUILDS_OF_WORDS))
@settings(max_examples=25)
def test_the_schedule_of_random_facts_and_lengths_is_the_models(seed, delta, build):
    calls = drawn_calls.draw_calls(seed, num_sms=SMS, hdim96=seed % 2 == 0, build=build)
    call = next(c for c in calls if in_domain(c.facts) and c.facts.batch_size <= 64)
    assert_models(call.facts, call.lengths()[0], delta)


WIDE = SchedulerFacts(7, 8, 1, 128, 1, 2**17, SMS, page_size=256, causal=True)
UNSPLIT = replace(WIDE, batch_size=8, num_qo_heads=64, num_kv_heads=32, num_splits=1)
FIT = [blocks_in_l2(UNSPLIT) // heads for heads in (2, 4, 8, 16)]
SEVERAL = np.array([1, 2**14, 900, 900, 5000, 130, 128])
EDGES = [
    *(
        pytest.param(replace(WIDE, batch_size=n, causal=causal), np.full(n, 70_000), id=f"ties-{n}")
        for n in (1, 2, 7, 8, 9, 129)
        for causal in ((False, True) if n < 129 or ON_GPU else (True,))
    ),
    (replace(WIDE, num_qo_heads=256, num_splits=1, pack_gqa=True), SEVERAL),
    (replace(WIDE, num_qo_heads=256, num_splits=1, pack_gqa=False), SEVERAL),
    (replace(WIDE, num_qo_heads=512, num_kv_heads=2), SEVERAL),
    # Just as many blocks of a head as fit the L2 cache with others, and one more.
    (UNSPLIT, np.array([n * UNSPLIT.tile[1] + more for n in FIT for more in (0, 1)])),
]


@pytest.mark.parametrize("facts, lens", EDGES)
def test_ties_and_unpacked_heads_are_scheduled_as_in_the_model(facts, lens):
    assert_models(facts, lens)


@pytest.mark.parametrize("heads", [(8, 1), (32, 8)])
def test_a_share_that_falls_on_a_whole_number_of_blocks_is_rounded_as_in_the_model(heads):
    # With the margin of 1.1, 120 blocks of one head are one for each of 132 multiprocessors.
    facts = SchedulerFacts(
        1,
        *heads,
        128,
        1,
        2**21,
        SMS,
        page_size=256,
        num_splits=255,
    )
    step = 120 // heads[1]
    for blocks in {step * k + more for k in (1, 3, 7, 50, 91, 100, 127) for more in (-1, 0, 1)}:
        assert_models(facts, np.array([blocks * facts.tile[1]]))


@pytest.fixture
def step():
    """A call, its facts, its device, and a reservation for it."""
    call = cases.arguments(SMALL)
    facts = cases.facts_of(call)
    device = call["seq_lens"].device
    call["schedules"] = StepSchedules.reserve({"full": facts}, device)
    made = call["schedules"]["full"]
    return SimpleNamespace(call=call, facts=facts, device=device, made=made)


def test_words_are_refused_until_written_and_after_a_foreign_write(step):
    assert step.made.facts == step.facts.settled
    assert step.facts.num_splits == 0
    refusals = ("written before they are used", "those of this scheduler metadata")
    for refusal in refusals:
        with pytest.raises(ValueError, match=f"words must be {refusal}"):
            step.made.require_fits(step.facts, device=step.device)
        build_step_schedules(**step.call)
        step.made.require_fits(step.facts, device=step.device)
        cases.assert_schedule(step.made, step.call["cache_seqlens"])
        step.made.words.add_(1)


def test_a_reservation_is_checked_like_a_precomputed_one(step):
    if ON_GPU:
        with pytest.raises(ValueError, match="num_sms must be that of"):
            unwritten(replace(step.facts, num_sms=SMS + 1), step.made.words)


def assert_words_of_library(scheduler, lens):
    """The library's own words, but for the padding, which it leaves as it was."""
    written = is_written(scheduler.facts)
    theirs = precompute(scheduler.facts, lens).words.cpu().numpy()
    np.testing.assert_array_equal(scheduler.words.cpu().numpy()[written], theirs[written])


@pytest.mark.gpu
def test_the_words_are_those_that_the_library_writes_now(on_hopper):
    rng = np.random.default_rng(11)
    calls = drawn_calls.draw_calls(
        11,
        num_sms=SMS,
        hdim96=library.has_hdim96(),
        build=library.build(),
    )
    for facts in itertools.islice((c.facts for c in calls if in_domain(c.facts)), 300):
        lens = rng.integers(1, facts.max_seqlen_k + 1, facts.batch_size)
        assert_words_of_library(
            schedule(facts, lens),
            torch.from_numpy(lens).int().to(DEVICE),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batch_size", [1, 5, 130])
def test_a_graph_of_a_step_replays_with_new_lengths(on_hopper, batch_size, page_size):
    case = DecodeCase(AttnSpec(16, 2, 128, page_size), batch_size, 4000, "ragged")
    work = build_workload(case, device="cuda")
    own, call = over_own_buffers(work.batch)
    facts = {"full": flash_attn3.facts_of(own)}
    schedules = StepSchedules.reserve(facts, own.seq_lens.device)
    scheduler = schedules["full"]

    def step():
        build_step_schedules(**call, schedules=schedules)
        return [flash_attn3.attend(work.q, work.kv, own, metadata=scheduler) for _ in range(4)]

    for out in step():
        judge = Judge(decode.attend, work.q, work.kv, work.batch)
        assert judge.check(out).passed
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
            assert Judge(decode.attend, work.q, work.kv, batch).check(out).passed


@pytest.mark.gpu
def test_other_facts_and_lengths_compile_nothing_once_the_structure_is_known():
    facts = SchedulerFacts(6, 32, 8, 128, 1, 4096, SMS, page_size=16, causal=True)
    schedule(facts, np.full(6, 900))
    before = SCHEDULES.compiled()
    for changes in (
        {"num_splits": 3},
        {"head_dim": 80},
        {"num_qo_heads": 16, "num_kv_heads": 1},
    ):
        for delta in (0, 1, 16):
            schedule(replace(facts, **changes), np.full(6, 4000), delta)
    assert SCHEDULES.compiled() == before
