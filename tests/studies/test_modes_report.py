"""Rows, tables and figures of all modes: right where all is there, whole where only some are."""

import numpy as np
import pandas as pd
import pytest
from support.frames import row
from support.published import live, published

from attnlib.kinds.cost import Ceilings, extend_cost, predict_fa3
from attnlib.run import frame as rows
from attnlib.studies import engine_modes as modes
from attnlib.studies.engine_modes.study import STUDY
from attnlib.studies.engine_modes.tables import EAGER, FA2, FA3, FEW, GRAPH, GROUPS, MANY, PREFIX

LIMIT = Ceilings(copy_gbps=4000.0, matmul_tflops=800.0, num_sms=132)
DECODE, VERIFY, DRAFT = modes.DECODES[0], modes.VERIFIES[4], modes.DRAFTS[3]
NEW, TAIL = modes.PREFILLS[0], modes.PREFILLS[2]
CHAIN, TREE, CAUSAL = modes.MASKED[-2], modes.MASKED[1], modes.VERIFIES[-2]


def made(times, *, rounds=(0, 1)):
    """Records of (case, backend, timer), each round its time and exactly so; traced, twice that."""
    return pd.DataFrame(
        row(case, backend, round_, us, timer=timer, release="", kernel_us=2 * us)
        for (case, backend, timer), us in times.items()
        for round_ in rounds
    )


def of(release, times):
    return made(times).assign(release=release)


def prefill(name):
    return f"flashinfer-prefill-{name}"


@pytest.fixture(params=[published, live])
def frame(request):
    return request.param("engine_modes")


def test_every_table_and_figure_stands_on_what_a_live_notebook_measures(frame):
    limit = rows.ceilings(frame)
    for table in (
        modes.headline(frame, modes.VERIFIES[3:6], limit),
        modes.summary(frame),
        modes.costs(frame),
        modes.one_tile(frame, limit),
        modes.shares(frame, limit),
    ):
        assert len(table) and not table.isna().all().any()
    for name in ("exceptions", "resolved", "plans", "masks", "library"):
        assert len(getattr(modes, name)(frame)) or frame is not published("engine_modes")
    assert modes.ratio_chart(frame).axes and modes.roof_chart(frame, limit).axes


def test_every_case_of_the_study_is_a_row_and_every_mode_is_in_the_tables():
    frame = published("engine_modes")
    assert modes.summary(frame).group.tolist() == list(GROUPS)
    assert modes.costs(frame).index.tolist() == [*GROUPS, "worst"]
    assert set(modes.mode_rows(frame).case) == {*STUDY.cases}
    pairs = {case for grid in STUDY.grids if len(grid.backends) > 1 for case in grid.cases}
    plain = [case for case in pairs if getattr(case, "mask", "causal") in ("causal", "full")]
    assert modes.summary(frame).shapes.sum() == len(plain)


def test_modes_are_shown_the_way_engines_call_them_prefill_split_by_whether_it_had_a_prefix():
    cases = (VERIFY, NEW, TAIL)
    every = {(case, prefill("fa2"), t): 1.0 for case in cases for t in (GRAPH, EAGER)}
    found = modes.mode_rows(made(every | {(DECODE, "flashinfer-fa3", GRAPH): 1.0}))
    shown = found[["group", "timer", "q_len", "mask", "backend"]].drop_duplicates()
    assert shown.to_numpy().tolist() == [
        ["target_verify", GRAPH, 4, "causal", FA2],
        ["decode", GRAPH, 1, "causal", FA3],
        ["prefill_paged", EAGER, 128, "causal", FA2],
        [PREFIX, EAGER, 128, "causal", FA2],
    ]
    assert set(modes.mode_rows(made(every), EAGER)["mode"]) == {"target_verify", "prefill_paged"}
    assert set(FEW) | set(MANY) == set(GROUPS) and not set(FEW) & set(MANY)


def test_two_timers_are_never_divided():
    frame = made({(VERIFY, prefill("fa2"), GRAPH): 3.0, (VERIFY, prefill("fa3"), EAGER): 1.0})
    both = pd.concat([modes.mode_rows(frame, timer) for timer in (GRAPH, EAGER)])
    assert modes.over(both, FA2, FA3).empty
    with pytest.raises(ValueError, match="timer must be the same"):
        rows.over(both, FA2, FA3)


def test_a_summary_counts_the_verdicts_of_a_mode():
    slow, fast = modes.VERIFIES[3:5]
    times = {(slow, prefill("fa2"), GRAPH): 2.0, (fast, prefill("fa2"), GRAPH): 0.5}
    times |= {(case, prefill("fa3"), GRAPH): 1.0 for case in (slow, fast)}
    (row,) = modes.summary(made(times)).to_dict("records")
    assert (row["shapes"], row["fa2 slower"], row["fa2 faster"], row["fa2 same"]) == (2, 1, 1, 0)
    assert (row["least"], row["median"], row["most"]) == (0.5, 1.25, 2.0)
    assert modes.exceptions(made(times)).kv_len.tolist() == [slow.cached.kv_len]


def test_a_policy_costs_its_backends_time_over_the_better_one():
    backends = {FA2: 4.0, FA3: 1.0}
    times = {(NEW, prefill(name), EAGER): time for name, time in backends.items()}
    times |= {(VERIFY, prefill(name), GRAPH): 1.0 / time for name, time in backends.items()}
    lost = modes.costs(made(times))
    assert lost.loc["prefill_paged", "fa2 everywhere"] == 4
    assert lost.loc["target_verify", "fa2 everywhere"] == 1
    assert lost.loc["target_verify", "auto"] == 4
    assert lost["fa3 for prefill"].tolist() == [1, 1, 1]
    assert lost.loc["worst"].tolist() == [4, 4, 4, 4, 1]


def test_auto_of_the_policies_is_what_auto_ran():
    parts = pd.concat(modes.mode_rows(published("engine_modes"), timer) for timer in (GRAPH, EAGER))
    ran = modes.plain(parts[parts.backend == "auto"])
    to_fa3 = ran.group.isin(modes.POLICIES["auto"])
    assert (ran.kernel_family == np.where(to_fa3, "fa3", "fa2")).all()
    assert set(ran.group) >= {*FEW, "prefill_paged", "prefill_ragged"}


def test_counts_come_from_lengths_and_predictions_only_for_one_tile():
    table = modes.counted((DECODE, VERIFY, modes.PREFILLS[-1]), LIMIT)
    assert table.bound.tolist() == ["memory", "memory", "matmul"]
    assert table["fa3 predicted"].isna().tolist() == [False, False, True]
    assert table["fa3 predicted"][1] == round(predict_fa3(VERIFY.cached, LIMIT).run_us, 1)
    assert table.roof[2] == round(extend_cost(modes.PREFILLS[-1]).flops / 800e6, 1)


def test_plans_are_compared_by_what_the_profiler_saw_of_both():
    times = {(VERIFY, prefill("fa2"), GRAPH): 3.0, (VERIFY, prefill("fa2"), EAGER): 2.0}
    times |= {(DRAFT, prefill("fa3"), timer): 5.0 for timer in (GRAPH, EAGER)}
    fa2, fa3 = modes.plans(made(times)).to_dict("records")
    assert (fa2["tile for a graph"], fa2["tile for eager"]) == (128, 16)
    assert (fa2["for a graph"], fa2["for eager"], fa2["ratio"]) == (6.0, 4.0, 1.5)
    assert (fa3["tile for a graph"], fa3["tile for eager"], fa3["ratio"]) == (128, 128, 1.0)


def test_a_release_is_held_to_the_one_before_kernel_by_kernel_at_shapes_of_both():
    fa2, fa3 = ((VERIFY, prefill(name), GRAPH) for name in (FA2, FA3))
    before = of(modes.PINNED, {fa2: 2.0, fa3: 4.0, (TAIL, prefill(FA2), EAGER): 1.0})
    both = pd.concat([before, of(modes.NOW, {fa2: 1.0, fa3: 4.0})])
    shown = modes.releases(both)[["kernel", "group", "shapes", "faster", "same", "median"]]
    assert shown.to_numpy().tolist() == [
        [FA2, "target_verify", 1, 1, 0, 0.5],
        [FA3, "target_verify", 1, 0, 1, 1.0],
    ]
    assert modes.summary(both)["median"].tolist() == [0.25] and modes.releases(before).empty


def test_masks_are_compared_case_by_case():
    times = {(CAUSAL, prefill("fa2"), GRAPH): 2.0, (CHAIN, prefill("fa2"), GRAPH): 5.0}
    (row,) = modes.masks(made(times | {(TREE, prefill("fa2"), GRAPH): 6.0})).to_dict("records")
    assert (row["causal"], row["chain"], row["tree"], row["chain / causal"]) == (2, 5, 6, 2.5)


def test_the_library_is_held_to_the_better_of_the_two():
    times = {(VERIFY, prefill("fa2"), GRAPH): 3.0, (VERIFY, prefill("fa3"), GRAPH): 9.0}
    table = modes.library(made(times | {(VERIFY, "flash-attn-3-extend", GRAPH): 2.0}))
    assert table[["shapes", "faster", "most"]].to_numpy().tolist() == [[1, 1, 0.67]]
    assert "library" not in modes.headline(made(times), [VERIFY], LIMIT)
