"""The studies: what they promise to cover, and that what is published is there and whole."""

from collections import Counter

import pytest

from attnlib.run import store
from attnlib.run.frame import item_of
from attnlib.run.rows import rows_of
from attnlib.studies import STUDIES, fa2_plan
from attnlib.studies.fa3_decode_regression import STUDY as REGRESSION

ODD = ("fa2_plan", "xqa_rivals")
"""Three rounds on record where four were asked for."""

pytestmark = pytest.mark.usefixtures("published_records")


def test_plans_of_fa2_are_measured_for_every_layout_and_every_kind_of_batch_and_fit_the_memory():
    assert len(fa2_plan.REALISTIC) == len(fa2_plan.HEADS) * len(fa2_plan.KINDS) == 80
    verifies = fa2_plan.VERIFIES + fa2_plan.OTHER_VERIFIES
    assert (len(fa2_plan.VERIFIES), len(set(verifies))) == (48, 64)
    for cases in (fa2_plan.REALISTIC, fa2_plan.OTHERS, verifies):
        assert len({case.spec.heads for case in cases}) == 10
        assert {case.spec.page_size for case in cases} == {1, 16, 64}
    decodes = [*fa2_plan.REALISTIC, *fa2_plan.OTHERS]
    decodes += [case.cached for case in verifies]
    assert max(case.cost.kv_bytes for case in decodes) <= fa2_plan.MOST_KV_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_every_item_of_a_study_is_on_record_and_live_ones_are_a_part(study):
    asked = {(job.round, item) for job in study.jobs(headline=False) for item in job.items}
    if study.name in ODD:  # of its last round the ceilings, which come last, are lost
        asked -= {(round_, item) for round_, item in asked if round_ == 3 and item.case is None}
    machines = store.machines(study.name)  # grids of one study may be on several
    found = set()
    for machine in machines:
        for row in store.load(study.name, machine).itertuples():
            found.add((row.round, item_of(row)))
    rounds = Counter(item for _, item in asked)
    assert rounds <= Counter(item for _, item in found)
    live = {item for job in study.jobs(headline=True) for item in job.items}
    assert live < {item for _, item in asked}


def test_every_decode_record_lists_kernels_samples_and_clocks():
    for row in rows_of(store.read(REGRESSION.name, REGRESSION.reference_machine)):
        if row["status"] == "ok":
            assert row["kernels"] and len(row["run_us"]) >= 7
            assert row["state_before.sm_clock_mhz"] and row["state_after.sm_clock_mhz"]
            assert row["versions.torch"] and row["machine.driver"]


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_no_two_cases_of_a_study_share_a_key_or_a_label(study):
    assert len({case.key for case in study.cases}) == len(study.cases)
    assert len({case.label for case in study.cases}) == len(study.cases)
