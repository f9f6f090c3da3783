"""The schedules to play with: splits are the models', work is whole, no choice fails."""

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("ipywidgets", reason="needs ipywidgets: pip install ipywidgets")

from attnlib import play_schedule
from attnlib.core.fa2.choice import BLOCK_TOKENS, PlanShape
from attnlib.core.fa2.words import plan_words
from attnlib.lab import play_schedule as module
from attnlib.lab.schedules import BOUNDED, FA2, FA3, OUR_PLAN, OWN_PLAN, SGLANG, schedules
from attnlib.studies.splits import split_cap
from attnlib.studies.splits.list_schedule import START_BLOCKS
from attnlib.studies.splits.split_cap import MLA, MLA_VERIFY, Layout
from attnlib.studies.splits.traffic import batches

GQA = Layout(heads=8, kv_heads=1)
SKEWED = (131072, *[1024] * 127)


def by_name(shown):
    return {one.build.name: one for one in shown.each}


@pytest.mark.parametrize(
    "layout",
    [
        GQA,
        MLA,
        MLA_VERIFY,
        Layout(32, 8, q_len=4),
    ],
)
@pytest.mark.parametrize(
    "lens",
    [
        SKEWED,
        (4096,) * 16,
        batches()[40].tokens,
    ],
)
def test_the_splits_are_those_of_the_study_of_caps(layout, lens):
    case = layout.case(split_cap.lengths_text(lens))
    shown = by_name(schedules(layout, lens))
    for name, cap in {SGLANG: "default", BOUNDED: "bounded", "SGLang 0.5.15": "upstream"}.items():
        assert shown[name].splits.tolist() == split_cap.splits_of(case, cap).tolist()


def is_whole(work):
    """Whether no worker does two things at once, and each begins as soon as it may."""
    for worker in np.unique(work.worker):
        mine = work.worker == worker
        order = np.argsort(work.begin[mine])
        begins = work.begin[mine][order]
        ends = work.end[mine][order]
        if begins[0] != 0 or begins[1:].tolist() != ends[:-1].tolist():
            return False
    return True


@pytest.mark.parametrize("layout", [GQA, MLA, Layout(32, 8)])
def test_an_sm_reads_one_tile_at_a_time_and_all_tiles_are_read(layout):
    for one in schedules(layout, SKEWED).each:
        case = layout.case(split_cap.lengths_text(SKEWED))
        facts = replace(split_cap.facts_of(case), build=one.build.library)
        facts = replace(facts, num_splits=int(one.cap))
        m_blocks, (_, block_n) = -(-layout.group // facts.tile[0]), facts.tile
        tokens = -(-np.array(SKEWED) // block_n) * block_n + START_BLOCKS * block_n * one.splits
        read = (one.work.end - one.work.begin).sum()
        assert read == tokens.sum() * m_blocks * max(layout.kv_heads, 1)
        assert is_whole(one.work)


def test_the_blocks_of_fa2_are_those_of_the_plans_words():
    layout = Layout(heads=16, kv_heads=2)
    one = by_name(schedules(layout, SKEWED, kernel=FA2))[OUR_PLAN]
    spec = layout.case(split_cap.lengths_text(SKEWED)).spec
    words = plan_words(
        PlanShape.of(
            spec,
            np.array(SKEWED),
            num_sms=132,
        ),
        np.array(SKEWED),
    )
    assert one.cap == f"{words.kv_chunk_size:,}"
    used = words.request_indices[words.block_valid_mask[: len(words.request_indices)]]
    assert one.work.request.tolist() == [*used, *used], "head by head"
    starts = BLOCK_TOKENS * len(one.work.request)
    assert (one.work.end - one.work.begin).sum() == 2 * sum(SKEWED) + starts
    assert is_whole(one.work) and one.work.workers == 264


def test_idle_time_is_what_is_left_of_all_sms_until_the_last_ends():
    shown = by_name(schedules(MLA, (64, 64)))[SGLANG]
    # Two tiles of 64 query rows for each request, each of a block and two of start.
    assert shown.work.last == 192 and shown.without_work == 128
    assert shown.work.idle == pytest.approx(128 / 132)


def test_the_known_problem_is_said_where_it_holds_and_nowhere_else():
    for lens, name in ((SKEWED, "split-cap-gqa"), ((4096,) * 8, "")):
        shown = by_name(schedules(GQA, lens))
        said = " ".join(shown[SGLANG].problems)
        assert bool(said) == bool(name) and name in said
        assert not shown["SGLang 0.5.15"].problems and not shown[BOUNDED].problems
    unsplit = by_name(schedules(Layout(32, 8), SKEWED, kernel=FA2))
    assert "fa2-unsplit" in unsplit[OWN_PLAN].problems[0]
    assert not unsplit[OUR_PLAN].problems


def test_the_picture_has_a_rectangle_for_each_part_and_says_itself_in_words():
    shown = schedules(GQA, SKEWED)
    pair = [by_name(shown)[name] for name in (SGLANG, BOUNDED)]
    rectangles = re.findall(r"M[\d.]+ [\d.]+h", shown.picture())
    assert len(rectangles) == sum(len(one.work.request) for one in pair)
    assert "aria-label='SGLang 0.5.23: longest request in 8 splits, SMs 87% idle" in shown.picture()


def test_every_choice_is_shown_or_says_why_it_cannot_be():
    player = play_schedule()
    assert player.shown.kernel == FA3
    for control in player.controls.values():
        for number in range(len(control.options)):
            control.index = number
            assert player.words and (player.shown or "must be query/KV heads" in player.words)


def test_sliders_and_traffic_give_the_lengths():
    player = play_schedule("32/8", "65536+2048x31")
    controls = player.controls
    controls["long"].value = 32 * 1024
    controls["short_count"].value = 3
    assert player.shown.lens == (32768, 2048, 2048, 2048)
    controls["source"].value = module.FROM_TRAFFIC
    controls["trace"].value, controls["in_flight"].value = "azure-code", 32
    controls["step"].value = 5
    (step,) = [
        each
        for each in batches()
        if (each.trace, each.in_flight, each.step) == ("azure-code", 32, 5)
    ]
    assert player.shown.lens == step.tokens


def test_other_lengths_layouts_and_builds_are_shown_as_given():
    player = play_schedule("24/2", "700+30+5000x2", q_tokens=3, builds=(BOUNDED, "vLLM 0.33.0"))
    assert player.shown.lens == (700, 30, 5000, 5000)
    assert player.shown.layout == Layout(24, 2, q_len=3)
    assert player.shown.shown == (BOUNDED, "vLLM 0.33.0")
    player.controls["kernel"].value = FA2
    assert player.shown.shown == (OWN_PLAN, OUR_PLAN)
    bundle = player._repr_mimebundle_()
    assert "FlashInfer's fa2: 24/2" in bundle["text/plain"] and "<svg" in bundle["text/html"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layout": "llama"}, "layout must be such as 32/8, .*, got 'llama'"),
        ({"lens": "many"}, "lens must be TOKENS or TOKENSxCOUNT"),
        ({"kernel": "fa4"}, "kernel must be one of FlashAttention-3"),
        ({"builds": ("SGLang",)}, "builds must be one of SGLang 0.5.15"),
        ({"builds": (SGLANG,)}, "builds must be two names, got 1"),
        ({"q_tokens": 9}, "q_tokens must be"),
        ({"layout": "MLA 128 heads", "kernel": FA2}, "layout must be query/KV heads"),
    ],
)
def test_what_there_is_not_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        play_schedule(**arguments)
