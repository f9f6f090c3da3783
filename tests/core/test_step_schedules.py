"""The schedules of all kinds of layers of a step: words, refusals, and whose they are."""

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import drawn_calls
from support import metadata_cases as cases
from support.metadata_cases import DEVICE, POISON, SCHEDULES, SMS, Shape
from support.schedule_words import candidates, wrong_parts

from attnlib.core import schedule_words
from attnlib.core.metadata import device
from attnlib.core.metadata.decode import NO_SCHEDULES, build_decode_metadata, launch_of
from attnlib.core.metadata.device import span_width
from attnlib.core.metadata.kv_indices import build_kv_indices
from attnlib.core.metadata.require import DecodeTensors
from attnlib.core.metadata.schedules import build_step_schedules
from attnlib.core.schedule import library
from attnlib.core.schedule.caps import CAPS, num_splits
from attnlib.core.schedule.facts import SchedulerFacts, latent_facts, layer_facts
from attnlib.core.schedule.flash_attn3 import precompute
from attnlib.core.schedule.guard import _differing, _made
from attnlib.core.schedule.kinds import StepSchedules
from attnlib.core.schedule.splits import plan_splits
from attnlib.core.spec import AttnSpec, MlaSpec

BUILDS = ("sglang-0.4.4", "sglang", "upstream")
SMALL = Shape(4, 64, 4)
GPT_OSS = AttnSpec(64, 8, 64, 1, window=128)
DEEPSEEK = MlaSpec(128, page_size=1)


def written(facts, lens, q_lens=None, delta=0):
    """The schedules of `lens`, by a call that has no page to copy: any width, little memory."""
    first = next(iter(facts.values()))
    batch = len(lens)
    sizes = {
        "cache_seqlens": (batch,),
        "cu_seqlens_k": (batch + 1,),
        "page_table": (batch, first.max_seqlen_k // first.page_size),
        "req_to_token": (1, 1),
    }
    call = {name: torch.empty(n, dtype=torch.int32, device=DEVICE) for name, n in sizes.items()}
    if q_lens is not None:
        sums = np.append(0, np.cumsum(q_lens))
        call["cu_seqlens_q"] = torch.tensor(sums, dtype=torch.int32, device=DEVICE)
    schedules = StepSchedules.reserve(facts, torch.device(DEVICE))
    schedules.words.fill_(POISON)
    build_step_schedules(
        **call,
        seq_lens=torch.tensor(lens - delta, dtype=torch.int64, device=DEVICE),
        req_pool_indices=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
        page_size=first.page_size,
        max_pages=0,
        seq_len_delta=delta,
        schedules=schedules,
    )
    return schedules


def assert_twins(facts, lens, q_lens=None, delta=0):
    """Every word of every kind is the twin's, and none between them is written."""
    schedules = written(facts, lens, q_lens, delta)
    gaps = schedules.words.clone()
    for name, kind in schedules.kinds.items():
        twin = schedule_words(kind.facts, lens, q_lens)
        np.testing.assert_array_equal(kind.words.cpu().numpy(), twin, err_msg=name)
        gaps[kind.words.storage_offset() :][: len(twin)] = POISON
    assert (gaps == POISON).all()
    return schedules


@pytest.mark.parametrize("build", BUILDS)
@given(st.integers(0, 100_000), st.integers(0, 8))
@settings(max_examples=25)
def test_random_steps_have_the_words_of_the_model(build, seed, delta):
    step = next(drawn_calls.draw_steps(seed, num_sms=SMS, build=build))
    lens, q_lens = step["full"].lengths()
    if q_lens is not None and (q_lens == step["full"].facts.max_seqlen_q).all() and seed % 2:
        # As many for each request need not be told.
        facts = {name: call.facts for name, call in step.items()}
        told = written(facts, lens, q_lens, delta)
        untold = written(facts, lens, None, delta)
        assert torch.equal(told.words, untold.words)
    assert_twins(
        {name: call.facts for name, call in step.items()},
        lens,
        q_lens,
        delta,
    )


def step_of(
    build="sglang",
    cap="default",
    *,
    batch_size=6,
    tokens=1,
    columns=2**17,
):
    """The kinds of gpt-oss-120b and of DeepSeek-V3 in one step, each under `cap`."""
    call = {
        "batch_size": batch_size,
        "max_seqlen_q": tokens,
        "columns": columns,
        "num_sms": SMS,
        "causal": True,
        "varlen_q": True,
        "build": build,
    }
    facts = {
        "full": layer_facts(GPT_OSS, window=(-1, -1), **call),
        "window": layer_facts(GPT_OSS, **call),
        "mla": latent_facts(DEEPSEEK, **call),
    }
    return {name: replace(each, num_splits=num_splits(each, cap)) for name, each in facts.items()}


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("cap", [*CAPS, "8"])
@pytest.mark.parametrize("build", BUILDS)
def test_each_build_cap_and_count_of_query_tokens_has_its_own_words(build, cap, tokens):
    lens = np.array([131_072, 2048, 0, 1, 40_000, 129])
    schedules = assert_twins(
        step_of(build, cap, tokens=tokens),
        lens,
        np.full(6, tokens),
    )
    splits = {name: int(kind.words[0]) for name, kind in schedules.kinds.items()}
    assert splits["window"] == 1 or cap == "8"
    if cap == "upstream":
        assert splits["mla"] > 4
    if cap == "default" and tokens == 8:
        assert (splits["mla"] < 6) == (build == "sglang"), "it counts the rows of all requests"


@pytest.mark.parametrize("cap", CAPS)
def test_padding_of_a_graph_or_of_a_rank_is_requests_of_their_own(cap):
    facts = step_of(cap=cap, batch_size=23, tokens=4)
    real = [70_000, 4096, 300]
    for fill, fill_tokens in (
        (1, 4),
        (0, 4),
        (0, 0),
        (1, 0),
    ):
        lens = np.array(real + [fill] * 20)
        q_lens = np.array([4] * 3 + [fill_tokens] * 20)
        assert_twins(facts, lens, q_lens)


def test_over_992_requests_nothing_is_split_and_992_are_sorted_among_themselves(monkeypatch):
    rng = np.random.default_rng(5)
    most = cases.requests_of_a_cta(monkeypatch, SCHEDULES)
    for batch_size in (most, most + 1, 2 * most + 9):
        facts = step_of(cap="upstream", batch_size=batch_size, tokens=2, columns=4096)
        lens = rng.integers(0, 4097, batch_size)
        lens[batch_size // 2] = 4096
        q_lens = rng.integers(0, 3, batch_size)
        schedules = assert_twins(facts, lens, q_lens)
        is_split = int(schedules["mla"].words[:batch_size].max()) > 1
        assert is_split == (batch_size == most)


@pytest.mark.parametrize("part", [8, 32, 64])
def test_requests_are_ordered_in_one_part_or_in_many(monkeypatch, part):
    monkeypatch.setattr(device, "MAX_PART", part)
    rng = np.random.default_rng(part)
    facts = step_of(cap="upstream", batch_size=45, tokens=2, columns=2**17)
    lens = rng.integers(0, 4097, 45)
    lens[44] = 2**17
    schedules = assert_twins(facts, lens, rng.integers(0, 3, 45))
    assert int(schedules["mla"].words[:45].max()) > 1


def test_a_program_that_orders_among_many_requests_has_more_warps():
    batch = 2048
    numbers = torch.zeros(batch, dtype=torch.int32)
    table = torch.zeros(batch, 16, dtype=torch.int32)
    tensors = DecodeTensors(
        seq_lens=numbers,
        req_pool_indices=numbers,
        req_to_token=table,
        cache_seqlens=numbers.clone(),
        cu_seqlens_k=torch.zeros(batch + 1, dtype=torch.int32),
        page_table=table.clone(),
    )
    warps = []
    for schedules in (
        NO_SCHEDULES,
        NO_SCHEDULES._replace(kinds=1, programs=256, span=span_width(batch)),
    ):
        grid, constants, of_a_program = launch_of(tensors, 16, schedules).cut(0, 16)
        warps.append(of_a_program)
    assert warps == [1, 4]


def test_query_tokens_decide_tiles_and_order_under_a_causal_mask():
    # 8 and 1 tokens of 64 heads: 512 rows and 64.
    facts = {
        "full": replace(
            step_of(tokens=8)["full"],
            num_kv_heads=1,
            batch_size=2,
        )
    }
    alike = np.array([4096, 4096])
    kind = assert_twins(facts, alike, np.array([8, 1]))["full"]
    tiles = kind.words[4:6].tolist()
    order = kind.words[8:10].tolist()
    assert tiles[0] < tiles[1]
    assert order == [1, 0]
    turned = assert_twins(facts, alike, np.array([1, 8]))["full"]
    assert turned.words[8:10].tolist() == [0, 1]


def test_heads_that_are_not_packed_and_multiprocessors_that_are_left_out_count_as_in_the_model():
    packed = SchedulerFacts(
        batch_size=4,
        num_qo_heads=256,
        num_kv_heads=1,
        head_dim=128,
        max_seqlen_q=1,
        max_seqlen_k=2**17,
        num_sms=SMS,
        page_size=256,
        causal=True,
        num_splits=1,
        pack_gqa=True,
    )
    facts = {
        "packed": packed,
        "unpacked": replace(packed, pack_gqa=False),
        "margin": replace(packed, num_splits=100, sm_margin=40),
    }
    lens = np.array([2**17, 9000, 130, 2**14])
    schedules = assert_twins(facts, lens)
    tiles = {name: int(kind.words[4]) for name, kind in schedules.kinds.items()}
    assert tiles == {"packed": 2, "unpacked": 1, "margin": 2}


def test_a_step_without_kv_or_without_queries_has_one_split_each():
    for lens, q_lens in (
        (np.zeros(6, int), np.ones(6, int)),
        (np.zeros(6, int), np.zeros(6, int)),
    ):
        schedules = written(step_of(), lens, q_lens)
        for kind in schedules.kinds.values():
            unsplit = schedule_words(replace(kind.facts, num_splits=1), lens, q_lens)
            assert kind.words.tolist() == unsplit.tolist()


@pytest.fixture
def step():
    """A call and its schedules."""
    call = SCHEDULES.arguments(SMALL)
    made = call["schedules"]
    return SimpleNamespace(call=call, made=made, facts=cases.kinds_of(call))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"batch_size": 5},
            "schedules must be for a decode step of batch_size 4, as page_table [4",
        ),
        ({"page_size": 8}, "schedules must be for a decode step of page_size 4"),
        ({"max_seqlen_k": 100}, "schedules must be for a decode step of max_seqlen_k 104"),
        ({"varlen_q": False}, "cu_seqlens_q must be given if facts.varlen_q, and only then"),
    ],
)
def test_schedules_of_another_step_are_refused_before_anything_is_written(step, changes, message):
    build_step_schedules(**step.call)
    cases.poison(step.call, SCHEDULES.outputs)
    facts = {name: replace(each, **changes) for name, each in step.facts.items()}
    other = StepSchedules.reserve(facts, torch.device(DEVICE))
    with pytest.raises(ValueError, match=re.escape(message)):
        build_step_schedules(**step.call | {"schedules": other})
    assert (step.call["cache_seqlens"] == POISON).all()
    assert not other.words.any()


def test_what_is_no_schedule_of_a_step_is_refused(step):
    made, table = step.made, step.made.table
    for wrong, message in (
        (
            replace(made, words=made.words.long()),
            f"schedules.words must be [{len(made.words)}] int32, got",
        ),
        (
            replace(made, words=made.words.to("meta")),
            "schedules.words must be on seq_lens's device",
        ),
        (
            replace(made, words=made.words[:-1]),
            f"schedules.words must be [{len(made.words)}] int32",
        ),
        (replace(made, table=table[:2]), "schedules.table must be [3, 12] int32, got [2, 12]"),
        (replace(made, table=table.long()), "schedules.table must be [3, 12] int32, got [3, 12] i"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            build_step_schedules(**step.call | {"schedules": wrong})
    with pytest.raises(TypeError, match="schedules must be StepSchedules, got SchedulerMetadata"):
        build_step_schedules(**step.call | {"schedules": made["full"]})
    assert (made.words == POISON).all()


@pytest.mark.parametrize(
    "sums",
    [
        [0, 4, 5, 6, 7],
        [0, 1, 2, 1, 2],
    ],
)
def test_query_tokens_out_of_range_are_refused_where_a_check_is_asked_for(step, sums):
    step.call["cu_seqlens_q"].copy_(torch.tensor(sums))
    message = "cu_seqlens_q must lie in 0..3 query tokens of a request, .* got "
    with pytest.raises(ValueError, match=message):
        build_step_schedules(**step.call, check=True)
    assert (step.made.words == POISON).all()
    step.call["cu_seqlens_q"].copy_(torch.tensor([0, 3, 3, 4, 5]))
    build_step_schedules(**step.call, check=True)


FULL = SchedulerFacts(4, 32, 8, 128, 1, 8192, SMS, page_size=16, causal=True)


@pytest.mark.parametrize(
    "facts, message",
    [
        ({}, "facts must name at least one kind of layer, got none"),
        ({"full": 3}, "facts of 'full' must be SchedulerFacts, got int"),
        (
            {"full": replace(FULL, build="vllm")},
            "facts of 'full': build must be upstream or sglang",
        ),
        ({"full": replace(FULL, pack_gqa=False)}, "facts of 'full': pack_gqa must be None or True"),
        (
            {"full": FULL, "window": replace(FULL, batch_size=5)},
            "batch_size must be the same for all kinds of layers of a step, got 4 of 'full' and 5",
        ),
        (
            {"full": FULL, "window": replace(FULL, max_seqlen_q=2)},
            "max_seqlen_q must be the same for all kinds of layers of a step, got 1 of 'full'",
        ),
        (
            {"full": FULL, "mla": replace(FULL, build="sglang")},
            "build must be the same for all kinds of layers of a step, got upstream of 'full' and",
        ),
    ],
)
def test_kinds_that_are_of_no_one_step_are_refused_by_name(facts, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        StepSchedules.reserve(facts, torch.device(DEVICE))


def test_each_kind_is_refused_until_written_and_where_another_kinds_call_takes_it(step):
    device = step.made.words.device
    made = StepSchedules.reserve(step.facts, device)
    for name, facts in step.facts.items():
        with pytest.raises(ValueError, match="words must be written before they are used"):
            made[name].require_fits(facts, device=device)
    build_step_schedules(**step.call | {"schedules": made})
    for name, facts in step.facts.items():
        made[name].require_fits(facts, device=device)
    with pytest.raises(ValueError, match=r"window \(-1, -1\); this call has .*\(20, 0\)"):
        made["full"].require_fits(step.facts["window"], device=device)
    with pytest.raises(ValueError, match="made for 16 query heads.*; this call has 32"):
        made["mla"].require_fits(step.facts["full"], device=device)


def test_an_attention_calls_write_to_its_own_words_takes_no_other_kinds(step):
    build_step_schedules(**step.call)
    device = step.made.words.device
    step.made["full"].words[-1] = 0
    step.made["window"].require_fits(step.facts["window"], device=device)
    with pytest.raises(ValueError, match="words must be those of this scheduler metadata"):
        step.made["full"].require_fits(step.facts["full"], device=device)
    step.made["full"].mark_used()
    step.made["full"].require_fits(step.facts["full"], device=device)


def test_the_guard_knows_the_facts_of_each_kind(step):
    for kind in step.made.kinds.values():
        known = _made[kind.words.data_ptr()]
        assert known.facts is kind.facts and not known.memory.expired()
    window = step.facts["window"]
    assert not _differing(_made[step.made["window"].words.data_ptr()].facts, window)
    told = _differing(_made[step.made["full"].words.data_ptr()].facts, window)
    assert "made for causal True, window (-1, -1); the attention call has causal False" in told


@pytest.mark.gpu
def test_the_words_of_each_kind_are_those_that_the_library_writes_now(on_hopper):
    steps = drawn_calls.draw_steps(12, num_sms=SMS, build=library.build())
    for step in itertools.islice(steps, 100):
        facts = {name: call.facts for name, call in step.items()}
        lens, q_lens = step["full"].lengths()
        lens = np.maximum(lens, 1)
        schedules = written(facts, lens, q_lens)
        queries = None
        if q_lens is not None:
            sums = np.append(0, np.cumsum(q_lens))
            queries = torch.tensor(sums, dtype=torch.int32, device=DEVICE)
        on_gpu = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        for kind in schedules.kinds.values():
            theirs = precompute(kind.facts, on_gpu, cu_seqlens_q=queries).words.cpu().numpy()
            plan = plan_splits(kind.facts, lens, q_lens)
            ours = kind.words.cpu().numpy()
            plans = candidates(plan)
            # The order of requests with equal keys is open, and so is the rounding of a share.
            assert any(not wrong_parts(each, theirs) for each in plans)
            assert any(not wrong_parts(each, ours) for each in plans)


@pytest.mark.gpu
def test_other_kinds_and_lengths_compile_nothing_once_the_structure_is_known():
    lens = np.array([131_072, 2048, 5, 1, 40_000, 129])
    written(step_of(), lens, np.full(6, 1))
    before = SCHEDULES.compiled()
    for build in BUILDS:
        for tokens in (1, 4):
            facts = step_of(build, "upstream", tokens=tokens)
            written(facts, lens, np.full(6, tokens))
            written(
                {"mla": facts["mla"]},
                lens // 2,
                np.full(6, tokens),
                2,
            )
    assert SCHEDULES.compiled() == before


def test_a_block_table_is_a_page_table_and_its_schedules_are_written_without_a_pool():
    facts = {"full": SchedulerFacts(4, 32, 8, 128, 1, 1024, SMS, page_size=16, causal=True)}
    lens = np.array([1000, 3, 500, 0])
    table = torch.arange(4 * 70, dtype=torch.int32, device=DEVICE).view(4, 70)[:, :64]
    before = table.clone()
    schedules = StepSchedules.reserve(facts, torch.device(DEVICE))
    sizes = {"cache_seqlens": 4, "cu_seqlens_k": 5, "req_pool_indices": 4}
    zeros = {n: torch.zeros(size, dtype=torch.int32, device=DEVICE) for n, size in sizes.items()}
    call = {"seq_lens": torch.from_numpy(lens).to(DEVICE), **zeros, "page_size": 16}
    call |= {"schedules": schedules, "max_pages": 0}
    pool = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    build_step_schedules(**call, page_table=table, req_to_token=pool)
    wanted = schedule_words(facts["full"], lens)
    assert schedules["full"].words.tolist() == wanted.tolist()
    assert call["cache_seqlens"].tolist() == lens.tolist() and table.equal(before)

    words = "block_table must be left out, slots are read here (req_to_token): it is FlashAtt"
    advice = "build_step_schedules with page_table=block_table, max_pages=0 and req_to_token [1, 1]"
    for builder in (build_step_schedules, build_decode_metadata):
        with pytest.raises(TypeError, match=f"^{re.escape(words)}.*{re.escape(advice)}$"):
            given = call if builder is build_step_schedules else {"page_size": 16, "max_pages": 0}
            builder(**given, block_table=table)
    with pytest.raises(TypeError, match=r"^block_table .*: Fa2Planner.plan and build_fa2_plan wr"):
        build_kv_indices(page_size=16, max_pages=0, block_table=table)
