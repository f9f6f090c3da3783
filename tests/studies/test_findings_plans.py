"""What notebook 11 says in words that no table of its shows: the records do."""

import pytest
from support.published import pick, published

from attnlib.run import frame as rows
from attnlib.studies import fa2_chunks as chunks
from attnlib.studies import fa2_plan as plans
from attnlib.studies import fixed_splits as fixed
from attnlib.studies.fa2_plan.tables import FA2_MANY, OURS, OURS_MANY

pytestmark = pytest.mark.usefixtures("published_records")


@pytest.fixture
def studied():
    return published("fa2_plan")


@pytest.fixture
def swept():
    return published("fa2_chunks")


def test_both_plans_are_run_by_the_same_kernels_and_planning_is_in_neither_time(studied):
    for pair in ((rows.FA2, OURS), (FA2_MANY, OURS_MANY)):
        ran = rows.good_rows(studied[studied.backend.isin(pair)])
        names = ran.kernels.map(lambda kernels: {kernel.name for kernel in kernels})
        attend = names.map(lambda found: {name for name in found if "Prefill" in name})
        assert attend.map(len).eq(1).all() and len(set().union(*attend)) == 1
        assert not names.map(lambda found: any("plan" in name for name in found)).any()


def test_one_long_request_gains_most_and_no_kind_of_batch_that_people_serve_loses(studied):
    gain = plans.gain_table(plans.realistic(plans.gains(plans.decode_rows(studied))))
    mean = gain.set_index("batch")["mean"].drop("all")
    assert mean.idxmax() == "one long" and mean.min() > 0.99


def test_cuda_cores_ran_the_groups_that_are_named_and_no_other(studied):
    ran = pick(studied, backend=rows.CUDA_CORES, status="ok")
    assert {case.spec.group_size for case in ran.case} == {1, 4, 8}


@pytest.mark.parametrize("name", ["fa2_plan", "fa2_chunks"])
def test_every_record_passed_its_oracle_or_says_why_it_was_not_run(name):
    records = published(name)
    ok = records[(records.status == "ok") & records.case.notna()]
    assert (ok.oracle_error <= ok.oracle_budget).all()
    assert set(records.status) <= {"ok", "refused"} and set(records.gpu) == {"NVIDIA H200"}


def test_the_chosen_chunk_loses_little_and_every_kernel_is_judged_by_the_other_half(swept):
    table = chunks.sweep_summary(swept).set_index("kernels")
    assert table.loc["all", "mean, %"] < 3
    assert table["crossed mean, %"].drop("all").notna().all()


def test_the_host_waits_longest_with_the_most_requests_and_our_launch_a_tenth_of_that(studied):
    host = plans.host_table(studied)["median"]
    assert host.iloc[-1] == host.max() > host.iloc[0]
    ours = pick(plans.planning_table(studied), page_size=16)["all arrays"]
    assert ours.max() < host.min() / 10


def test_tables_and_figures_stand_with_the_rows_that_a_gpu_measures_live():
    from support.published import live

    frame, few = live("fa2_plan"), live("fa2_chunks")
    found = plans.gains(plans.decode_rows(frame))
    assert len(plans.rival_table(frame)) > 1 and len(plans.kinds_table(found)) > 1
    assert len(plans.many_table(frame)) and len(plans.layer_table(frame))
    cases = chunks.swept_cases(("one long", "chat of 64", "past a wave"))
    assert len(chunks.sweep_summary(few)) and chunks.choice_chart(few, cases).axes
    assert len(plans.planning_table(frame)) and len(plans.step_table(frame))
    assert plans.gain_chart(frame).axes


def test_no_splits_cost_both_kernels_in_the_same_shapes_and_the_cap_where_two_kv_heads_share_one():
    table = fixed.price(published("fixed_splits"))
    slow = table[table.verdict == "slower"].groupby("kernel")[["heads", "batch_size", "kv_len"]]
    slow = {name: {*own.apply(tuple, axis=1)} for name, own in slow}
    fa2, cap, fa3 = (slow[name] for name in table.kernel.unique())
    assert len(fa2) == 9 and fa2 == fa3
    assert cap == {("16/2", 1, 65536), ("16/2", 32, 65536)}
