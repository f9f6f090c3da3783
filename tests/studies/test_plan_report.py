"""Tables and pictures of plans of fa2: by the model, and on made-up records."""

import numpy as np
import pandas as pd
import pytest
from support.plans import CHAT, FOUR, LONG, chunk_frame, plan_frame

from attnlib.core.fa2.choice import PlanShape
from attnlib.core.fa2.library import LibraryCall, plan_fa2
from attnlib.core.gpu import FA2_RATES
from attnlib.kinds.lengths import sample_seq_lens
from attnlib.studies import fa2_chunks as chunks
from attnlib.studies import fa2_plan as plans
from attnlib.studies.fa2_plan.blocks import BY_LIBRARY, BY_US, both_schedules, small_example
from attnlib.studies.fa2_plan.study import (
    KINDS,
    OTHER_KINDS,
    OTHER_VERIFIES,
    OTHERS,
    REALISTIC,
    VERIFIES,
)
from attnlib.studies.fa2_plan.tables import BETTER, EVERY, FA3

SMS = 132


@pytest.fixture
def frame(make_record):
    return plan_frame(make_record)


@pytest.fixture
def swept(make_record):
    return chunk_frame(make_record)


def test_a_slot_does_one_block_at_a_time_and_starts_them_in_the_order_of_the_grid():
    lens, work = sample_seq_lens(LONG), both_schedules(LONG, SMS)[BY_US]
    assert work.start.is_monotonic_increasing and work.slot.between(0, 2 * SMS - 1).all()
    for _, own in work.groupby("slot"):
        assert (own.end.to_numpy()[:-1] <= own.start.to_numpy()[1:] + 1e-9).all()
    assert work.groupby("head").tokens.sum().tolist() == [lens.sum()] * LONG.spec.num_kv_heads


def test_a_block_alone_takes_the_models_time_of_its_tokens():
    lens = np.array([4 * 128])
    shape = PlanShape.of(FOUR.spec, lens, SMS)
    one = plans.schedule(shape, pd.DataFrame({"request": [0], "part": [0], "tokens": lens}))
    tokens = 4 * 128 + shape.rates.block_tokens
    in_flight = np.float32(shape.num_kv_heads)
    assert one.end.max() == pytest.approx(tokens * shape.us_per_token(in_flight), rel=1e-6)


def test_one_long_request_is_one_block_by_the_librarys_plan_and_many_by_ours():
    table = plans.plan_table(LONG, SMS).set_index("plan")
    parts, longest = table["parts of the long request"], table["longest block, tokens"]
    assert parts[BY_LIBRARY] == 1 and longest[BY_LIBRARY] == LONG.kv_len
    assert parts[BY_US] > 20 and longest[BY_US] == table["chunk, tokens"][BY_US]
    assert table["model, us"][BY_LIBRARY] > 10 * table["model, us"][BY_US]


def test_the_words_of_the_small_example_can_be_read():
    shape, lens = small_example()
    table = plans.word_table().set_index("word")
    assert table["how many"]["request_indices"] == shape.max_blocks
    assert len(table["values"]["o_indptr"].split()) == len(lens) + 1 == 6
    assert str(lens.argmin()) not in table["values"]["request_indices"].split()
    tokens = list(map(int, table["values"]["tokens of each block"].split()))
    assert tokens[0] == lens[0] and sum(tokens) == lens.sum()


def test_the_order_of_blocks_changes_the_end_by_the_model_and_never_much_for_the_worse():
    table = plans.order_table(0, SMS)
    assert table.batch.tolist() == [*KINDS]
    assert table.gain.max() > 1.02 and table.gain.min() > 0.98


def test_every_case_of_the_grids_has_a_kind_and_no_kind_is_empty():
    kinds = [plans.batch_of(case) for case in (*REALISTIC, *OTHERS)]
    assert set(kinds) == {*KINDS, *OTHER_KINDS}
    several = {plans.batch_of(case.cached) for case in VERIFIES + OTHER_VERIFIES}
    assert several == {"chat of 64", "uniform", "one long", "four"}


def test_gains_turn_the_ratio_and_tables_take_the_geometric_mean(frame):
    rows = plans.decode_rows(frame)
    table = plans.gain_table(plans.gains(rows)).set_index("batch")
    assert table["mean"].to_dict() == {"chat of 64": 1.5, "one long": 20, "four": 1, EVERY: 3.107}
    assert table.loc[EVERY, ["faster", "same", "slower"]].tolist() == [2, 1, 0]
    rivals = plans.rival_table(frame).set_index("batch")
    assert rivals[plans.RIVAL_NAMES[BETTER]].to_dict() == rivals[plans.RIVAL_NAMES[FA3]].to_dict()
    found = plans.gains(rows)
    assert plans.no_gain(found, rows)["batch"].tolist() == ["four"]
    assert (rivals[f"{plans.RIVAL_NAMES[FA3]}, cold"] == rivals[plans.RIVAL_NAMES[FA3]]).all()
    assert plans.layer_table(frame).cases.tolist() == [1, 1, 2]
    kinds = plans.kinds_table(pd.concat([found, found.assign(case=OTHERS[0], batch="a wave")]))
    assert kinds.batch.tolist()[-2:] == ["a wave", "all others"] and "all served" in set(
        kinds.batch
    )


def test_without_fa3_no_better_of_both_is_shown(frame):
    some = frame[frame.backend != FA3]
    assert not {plans.RIVAL_NAMES[FA3], plans.RIVAL_NAMES[BETTER]} & set(plans.rival_table(some))


def test_several_queries_are_compared_under_either_plan_of_the_library(frame):
    table = plans.many_table(frame).set_index(["planned for", "q_len"])
    for word, gain in (("graph", 4), ("eager", 2)):
        own = table.loc[word]
        assert (own.drop(columns=["cases", *plans.VERDICTS, "margin, %"]) == gain).all(axis=None)
        assert own.cases.to_dict() == {2: 2, 8: 2, EVERY: 4}
        assert (own[[*plans.VERDICTS]].sum(axis=1) == own.cases).all()


def test_the_chosen_chunk_is_held_against_the_best_of_its_sweep(swept):
    table = chunks.regret(chunks.sweeps(swept), FA2_RATES)
    assert {case.decode for case in table.case} == {LONG, CHAT, FOUR} and (table.ratio == 1).all()
    before = chunks.sweep_summary(swept).set_index("kernels")["mean, %"][EVERY]
    own = swept.case.map(lambda case: case.chunk == 0)
    swept = swept.assign(run_us=swept.run_us.where(~own, 1.03 * swept.run_us))
    summary = chunks.sweep_summary(swept).set_index("kernels")
    assert summary.sweeps.to_dict() == {"16 query rows": 3, EVERY: 3}
    assert summary["mean, %"][EVERY] == pytest.approx(1.03 * before + 3, abs=0.02)
    assert summary["worst, %"][EVERY] >= summary["mean, %"][EVERY]
    assert "crossed mean, %" not in summary


def test_frames_of_two_gpus_are_refused(swept):
    with pytest.raises(ValueError, match=r"gpu_id must be the same"):
        chunks.sweeps(pd.concat([swept, swept.assign(gpu_id="0badcafe")]))


def test_planning_and_steps_are_told_apart(frame):
    planning = plans.planning_table(frame)
    assert planning["all arrays"].tolist() == [2.02, 4.04, 8.08]
    assert planning["no graph"].dropna().tolist() == [12.12]
    assert plans.host_table(frame).records.sum() == 15
    (step,) = plans.step_table(frame).to_dict("records")
    assert (step["copied"], step["planned"]) == (3030, 1717)
    assert step["host / planned"].startswith("1.53")
    (share,) = plans.planning_share(frame).to_dict("records")
    assert (share["copied, us"], share["planned, us"]) == (900, 4)
    assert share["planned, %"] == pytest.approx(100 * 4 / 1717, abs=0.1)


def test_the_picture_of_the_model_says_so():
    figure = plans.slots_chart(LONG, SMS)
    titles = [axis.get_title(loc="left") for axis in figure.axes[:2]]
    assert [title.split(":")[0] for title in titles] == [BY_LIBRARY, BY_US]
    assert "model, not a measurement" in figure.texts[-1].get_text()
    told = [text.get_text() for text in figure.axes[0].texts]
    assert f"{LONG.spec.num_kv_heads} of {2 * SMS} slots work, the others are idle" in told


def test_the_pictures_of_records_have_a_dot_per_case_and_a_panel_per_sweep(frame, swept):
    (axis,) = plans.gain_chart(frame).axes
    assert [word.get_text() for word in axis.get_yticklabels()][0] == "one long  (20.00)"
    assert sum(len(dots.get_offsets()) for dots in axis.collections if len(dots.get_offsets())) >= 3
    panels = chunks.choice_chart(swept, [LONG, CHAT]).axes[:2]
    assert [axis.get_title(loc="left") for axis in panels] == ["16/2, one long", "16/2, chat of 64"]
    own = swept[swept.case.map(lambda case: case.chunk == 0 and case.decode == LONG)].run_us
    assert panels[0].lines[-1].get_ydata() == pytest.approx([own.median()])
    with pytest.raises(ValueError, match=r"cases must be of sweeps on record"):
        chunks.choice_chart(swept[swept.batch_size == FOUR.batch_size], [LONG])


@pytest.mark.parametrize("heads", [(32, 8), (16, 2), (8, 1), (32, 32)])
def test_from_two_blocks_an_sm_on_the_library_cuts_no_request_in_a_graph(heads):
    wave = 2 * SMS // heads[1]
    for batch, cut in ((wave - 1, True), (wave, False), (wave + 1, False)):
        lens = np.full(batch, 300)
        lens[0] = 100_000
        call = LibraryCall(*heads, 128, 16, True, SMS, "0.6.4")
        parts = plans.blocks_of(plan_fa2(call, lens), lens).groupby("request").size()
        assert (parts.max() > 1) == cut


def test_the_short_requests_are_done_before_our_plan_is_and_then_a_block_a_head_works():
    lens, (theirs, ours) = sample_seq_lens(LONG), both_schedules(LONG, SMS).values()
    late = theirs[theirs.end > ours.end.max()]
    assert set(late.request) == {lens.argmax()} and len(late) == LONG.spec.num_kv_heads
