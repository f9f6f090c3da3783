"""Tables and checks of an engine's steps, on made-up records and on published predictions."""

import pytest
from support.frames import frame, ran, row

from attnlib.studies import engine_ranks
from attnlib.studies.engine_ranks.study import RANKS
from attnlib.studies.engine_step import checks, tables
from attnlib.studies.engine_step.study import (
    EAGER,
    FA2,
    FA3,
    GROUPS,
    GUARDED,
    KERNELS,
    LAYER,
    METADATA,
    NOW,
    ONE_LAUNCH,
    OURS_FUSED,
    PLANNED,
    SCHEDULE,
    SERVED,
    STUDY,
)
from attnlib.studies.evidence import MissingRecordsError

PREPARE = "prepare_varlen_num_blocks_kernel"


def rounds(case, arms, timer="host", **told):
    """Three rounds of three steps of each arm: these times, a drift of all of them, a late step."""
    return [
        row(case, arm, n, us + n, id=f"{arm} {n}", timer=timer)
        | {"steps_us": (us + n - 1, us + n, us + n + 50), "release": ""}
        | {"reported_backend": "said, outputs 1a2b"}
        | told
        for n in range(3)
        for arm, us in arms.items()
    ]


def both(cases, arm, over, saved, step=7000.0):
    """`arm` in place of `over` saves so much in each case, cases in turn."""
    pairs = zip(cases, saved, strict=True)
    return frame(*(r for case, us in pairs for r in rounds(case, {arm: step - us, over: step})))


def test_steps_of_one_process_are_paired_one_by_one_and_of_two_by_medians():
    own = rounds(METADATA[0], {NOW: 5000.0, EAGER: 5200.0})
    own[1] |= {"steps_us": (5201.0, 5203.0, 5205.0)}
    other = rounds(SCHEDULE[0], {NOW: 6500.0, LAYER: 6900.0})
    table = tables.measured(frame(*own, *other))
    assert table.arm.tolist() == [NOW, NOW] and table.over.tolist() == [EAGER, LAYER]
    beside, apart = table.itertuples()
    assert beside.saved == pytest.approx((202 - 0 + 200 + 200) / 3, abs=1.1)
    assert beside.low < beside.saved < beside.high and beside.verdict == "faster"
    assert (apart.saved, apart.low, apart.high, apart.rounds) == (400, 400, 400, 3)
    assert apart.gain == pytest.approx(100 * 400 / 6901)
    assert beside.itself == 2 and apart.itself != apart.itself  # steps that took turns alone


@pytest.mark.parametrize(("hop", "verdict"), [(199.0, "faster"), (201.0, "ambiguous")])
def test_a_saving_within_what_a_step_differs_by_from_itself_is_no_verdict(hop, verdict):
    own = rounds(METADATA[0], {NOW: 5000.0, EAGER: 5200.0})
    for told in own:
        first, *_ = told["steps_us"]
        told["steps_us"] = (first, first + hop) * 2
    (row,) = tables.measured(frame(*own)).itertuples()
    assert (row.saved, row.itself, row.verdict) == (200, hop, verdict)


def test_arms_of_graphs_are_paired_where_records_say_that_they_took_turns():
    ours, theirs = rounds(SCHEDULE[0], {NOW: 6500.0, LAYER: 6900.0})[:2]
    theirs["steps_us"] = (6000.0, 6901.0, 6902.0)
    apart, beside = {}, {"reported_backend": "said, in turns, outputs 1a2b"}
    saved = [
        tables.measured(frame(ours | said, theirs | said)).saved.item() for said in (apart, beside)
    ]
    assert saved == [6901 - 6500, 6902 - 6550]


def test_a_saving_whose_interval_holds_nothing_is_ambiguous_and_a_loss_is_slower():
    rows = rounds(METADATA[0], {NOW: 5000.0, EAGER: 5000.0})
    for n, each in enumerate(rows[1::2]):
        each |= {"steps_us": (5000.0 + 30 * (-1) ** n,) * 3}
    loses = both(METADATA[1:2], NOW, EAGER, [-20.0])
    table = tables.measured(frame(*rows, *loses.to_dict("records")))
    assert table.verdict.tolist() == ["ambiguous", "slower"]
    (one,) = tables.measured(frame(*rows[:2])).itertuples()
    assert one.verdict == "ambiguous" and one.low != one.low, "one round has no interval"


@pytest.fixture(scope="module")
def promised():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATTNLIB_DATA", raising=False)
        return tables.promised()


def test_kernel_records_predict_every_comparison_and_say_of_which_shape(promised):
    wanted = [tuple(each) for each in promised[[*tables.PAIR, "case"]].itertuples(index=False)]
    assert wanted == list(tables.COMPARED) and promised.by.all()
    us = promised.groupby(tables.PAIR).predicted.median()
    assert 10 < us[NOW, EAGER] < 40 and 0 < us[OURS_FUSED, NOW] < us[ONE_LAUNCH, NOW] < 20
    first = promised.set_index([*tables.PAIR, "case"]).predicted
    assert 2500 < first[FA2, FA3, KERNELS[0]] < 4000, "6.06 against 9.10 ms, once tried"
    assert first[PLANNED, FA2, SERVED[2]] > 10_000 > first[PLANNED, FA2, SERVED[0]] > 1000


def test_the_core_table_says_where_the_rest_went(promised):
    case = KERNELS[1]
    traced = rounds(case, {FA2: 9000.0, FA3: 19_000.0}, "profiler")[:2]
    rows = [*rounds(case, {FA2: 9500.0, FA3: 21_800.0}), *traced]
    rows += rounds(METADATA[0], {NOW: 5000.0, EAGER: 5200.0})
    table = tables.core_table(frame(*rows), promised)
    metadata, kernel = table.to_dict("records")
    assert (kernel["traced"], kernel["saved"], kernel["rest"]) == (10_000.0, 12_300.0, 2300.0)
    assert kernel["interval"] == "12300 to 12300" and kernel["predicted"] > 9000
    assert metadata["traced"] != metadata["traced"]
    assert metadata["rest"] == pytest.approx(200 - metadata["predicted"], abs=0.1)
    more = tables.core_table(both(METADATA[:2], NOW, EAGER, [200.0, -20.0]), promised)
    (short,) = tables.summary_table(more).to_dict("records")
    assert (short["shapes"], short["verdict"]) == (2, "faster, slower")
    assert (short["saved"], short["gain, %"]) == ("-20 to 200", "-0.29 to 2.86")


def test_users_see_steps_the_slowest_of_them_and_tokens_a_second():
    (user,) = tables.users_table(frame(*rounds(SERVED[0], {FA2: 6400.0}))).to_dict("records")
    assert (user["step, ms"], user["tokens/s"]) == (6.401, round(64e6 / 6401))
    assert user["slowest, ms"] == pytest.approx(6.450, abs=0.002)


def test_launches_that_prepare_a_schedule_are_counted():
    kernels = ran(*[PREPARE] * 64, "attention")
    table = tables.launches_table(
        frame(*rounds(SCHEDULE[0], {LAYER: 9.0}, "profiler", kernels=kernels)[:1])
    )
    assert table[["launches", "prepare"]].to_numpy().tolist() == [[65, 64]]


@pytest.mark.parametrize(
    ("check", "saved", "verdict"),
    [
        (checks.metadata_saves_a_step, [200.0] * 7, "confirmed"),
        (checks.metadata_saves_a_step, [200.0] * 6 + [-5.0], "partly"),
        (checks.metadata_saves_a_step, [-5.0] * 7, "refuted"),
        (checks.metadata_row, [200.0] * 6 + [-5.0], "not measurable here"),
    ],
)
def test_the_sign_of_each_shape_decides(check, saved, verdict):
    finding = check(both(METADATA, NOW, EAGER, saved))
    assert (finding.verdict, len(finding.records)) == (verdict, 42)


def test_a_row_of_the_sources_table_is_told_beside_our_steps():
    finding = checks.metadata_row(both(METADATA, NOW, EAGER, [10.0] * 6 + [-125.0]))
    assert "faster in 6 and slower in 1 of 7 shapes" in finding.reason
    assert finding.low < 0 < finding.high


def test_a_schedules_gain_is_of_throughput_and_of_a_batch_of_one_where_that_is_claimed():
    rows = both(RANKS, NOW, LAYER, [180.0, 700.0])
    alone, all_ = checks.schedule_gain_alone(rows, 2.6), checks.schedule_gain(rows, 2.0)
    assert all_.reason.endswith("700 (700 to 700) at 16 x 1024 us a step over two GPUs.")
    assert alone.value == pytest.approx(100 * 180 / 6821)
    assert (alone.verdict, all_.verdict) == ("confirmed", "refuted")
    wide = rows[rows.batch_size == 1].copy()
    layer, moves = wide.backend == LAYER, {0: -60.0, 1: 60.0, 2: 0.0}
    wide["run_us"] += layer * wide["round"].map(moves)
    steps = zip(wide.steps_us, wide.run_us, strict=True)
    wide["steps_us"] = [tuple(us + at for at in (-1, 0, 50)) for _, us in steps]
    untold = checks.schedule_gain_alone(wide, 2.6)
    assert untold.value == pytest.approx(alone.value, rel=0.02) and untold.verdict == "open"
    assert untold.low < 2.6 < untold.high and "to" in untold.measured
    with pytest.raises(MissingRecordsError, match="1 of 2 shapes"):
        checks.schedule_gain(rows[rows.batch_size == 1], 2.0)


@pytest.mark.parametrize(("once", "verdict"), [(1, "confirmed"), (2, "refuted")])
def test_prepares_of_a_profile_are_counted_from_traced_steps(once, verdict):
    counts = {LAYER: ran(*[PREPARE] * 64), NOW: ran(*[PREPARE] * once)}
    traced = [
        rounds(SCHEDULE[0], {arm: 9.0}, "profiler", kernels=kernels)[0]
        for arm, kernels in counts.items()
    ]
    finding = checks.profiled_prepares(frame(*traced), 72)
    assert (finding.verdict, finding.measured.split(",")[0]) == (verdict, "576")
    with pytest.raises(MissingRecordsError, match="a shape lacks one by the timer profiler"):
        checks.profiled_prepares(frame(*traced[:1]), 72)


def test_outputs_of_both_schedules_are_compared_shape_by_shape():
    arms = {NOW: 7000.0, ONE_LAUNCH: 6900.0, LAYER: 7200.0}
    rows = frame(*(r for case in SCHEDULE for r in rounds(case, arms)))
    same = checks.schedule_keeps_outputs(rows)
    assert (same.verdict, len(same.records)) == ("confirmed", 18)
    other = rows.assign(reported_backend="said, outputs 3c4d")
    late = rows.where((rows.backend != LAYER) | (rows["round"] == 1), other)
    assert checks.schedule_keeps_outputs(late).verdict == "confirmed", "one round is enough"
    mixed = rows.where((rows.backend == NOW) & (rows.batch_size == 1), other)
    untold = checks.schedule_keeps_outputs(mixed)
    assert untold.verdict == "open" and "in 1 of 2 shapes, of sglang-one" in untold.reason
    with pytest.raises(MissingRecordsError, match="lacks one by the timer host"):
        checks.schedule_keeps_outputs(rows[rows.backend != ONE_LAUNCH])


def test_two_gpus_keep_tokens_or_not():
    rows = frame(*(r for case in RANKS for r in rounds(case, {NOW: 7400.0, LAYER: 7500.0})))
    assert checks.ranks_keep_outputs(rows).verdict == "confirmed"
    late = (rows.backend == LAYER) & (rows["round"] == 2)
    other = rows.where(~late, rows.assign(reported_backend="said, outputs 3c4d"))
    found = checks.ranks_keep_outputs(other)
    assert (found.verdict, found.reason[:22]) == ("partly", "Equal tokens in 4 of 6")
    with pytest.raises(MissingRecordsError, match="lacks one by the timer host"):
        checks.ranks_keep_outputs(rows[rows.batch_size == 1])
    once = checks.schedule_gain_alone(both(RANKS, NOW, LAYER, [180.0] * 2).query("round == 0"), 2.6)
    assert (once.verdict, once.low, once.measured[-9:]) == ("open", None, "one round")


def test_groups_that_attend_apart_are_told_heads_get_tokens_and_are_guarded():
    def said(arm, tokens, **told):
        words = f"said, told 8/4 heads of 16/8, outputs {tokens}" if tokens else ""
        return rounds(GROUPS, {arm: 3000.0}, reported_backend=words, reason="", **told)[0]

    guarded = said(GUARDED, "", status="error") | {"reason": "num_qo_heads must be 8, got 16"}
    table = tables.groups_table(frame(said(NOW, "aa-bb-cc"), said(LAYER, "dd-bb-cc"), guarded))
    assert table.backend.tolist() == [NOW, LAYER, GUARDED]
    assert table["other tokens"].tolist()[:2] == [1, 0]
    assert table.heads.tolist() == ["8/4 heads of 16/8"] * 2 + [""]
    assert (table.status[2], table.reason[2]) == ("error", "num_qo_heads must be 8, got 16")
    found = checks.groups_need_layers(frame(said(NOW, "aa-bb-cc"), said(LAYER, "dd-bb-cc")))
    assert (found.verdict, found.reason[-35:]) == (
        "confirmed",
        "; 1 of 8 requests get other tokens.",
    )
    same = checks.groups_need_layers(frame(said(NOW, "aa-bb-cc"), said(LAYER, "aa-bb-cc")))
    assert same.verdict == "partly"
    alone = frame(*rounds(METADATA[0], {NOW: 7400.0}, reason=""))  # all that live notebooks have
    assert tables.groups_table(alone).empty
    for rows in (alone, frame(said(NOW, "aa-bb-cc"), guarded)):
        with pytest.raises(MissingRecordsError, match="lacks one"):
            checks.groups_need_layers(rows)


def starts(study):
    """The keys of each round's processes, in their order."""
    seen = []
    for job in study.jobs(headline=False):
        keys = []
        for item in job.items:
            ranks = item.case.model, item.case.driver, item.case.tp, item.case.dp
            keys.append((*ranks, item.case.in_turns(item.backend)[0]))
        seen.append(list(dict.fromkeys(keys)))
        assert len(seen[-1]) == sum(a != b for a, b in zip([None, *keys], keys, strict=False))
    return seen


def test_engines_start_once_a_round_and_odd_rounds_run_backwards():
    seen = starts(STUDY)
    assert [len(keys) for keys in seen] == [10, 6, 3]
    assert seen[1] == [key for key in seen[0] if key in seen[1]][::-1]
    assert seen[2] == seen[0][:3]
    ranks, back = starts(engine_ranks.STUDY)
    assert len(ranks) == 2 and back == ranks[::-1], "A B B A"
