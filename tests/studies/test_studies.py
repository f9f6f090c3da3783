"""The studies: what they promise to cover, and that what is published is there and whole."""

from collections import Counter
from pathlib import Path

import pytest

from attnlib import studies
from attnlib.run import store
from attnlib.run.frame import item_of
from attnlib.run.rows import rows_of
from attnlib.studies import STUDIES
from attnlib.studies.fa3_decode_regression import STUDY as REGRESSION
from attnlib.studies.metadata import decode_metadata

pytestmark = pytest.mark.usefixtures("published_records")


def test_a_file_with_a_study_is_listed_wherever_it_stands():
    (folder,) = studies.__path__
    files = Path(folder).rglob("*.py")
    with_a_study = [path.stem for path in files if "\nSTUDY = " in path.read_text()]
    assert sorted(with_a_study) == sorted(STUDIES)
    assert all(study.name == name for name, study in STUDIES.items())
    others = ["STUDIES", "captured", "judged_splits", "vllm_steps"]
    assert sorted(dir(studies)) == sorted([*others, *STUDIES])


def test_a_name_that_no_study_has_lists_those_there_are():
    with pytest.raises(AttributeError, match=r"attnlib\.studies has no 'case'; it has auto_res"):
        studies.case  # noqa: B018 - the attribute is asked for


MEASURABLE = [study for study in STUDIES.values() if not study.retired]


@pytest.mark.slow
@pytest.mark.parametrize("study", MEASURABLE, ids=lambda study: study.name)
def test_every_item_of_a_study_is_on_record_and_live_ones_are_a_part(study):
    asked = set()
    for job in study.jobs(headline=False):
        for item in job.items:
            asked.add((job.round, item))
    found = set()
    for machine in store.machines(study.name):  # grids of one study may be on several
        for row in store.load(study.name, machine).itertuples():
            found.add((row.round, item_of(row)))
    recorded = Counter(item for _, item in asked) <= Counter(item for _, item in found)
    where = " on a GPU" if study.device == "cuda" else ""
    publish = f"python -m attnlib measure {study.name}{where}, then publish {study.name}"
    assert recorded, f"items of {study.name} are on no record: {publish}"

    live = {item for job in study.jobs(headline=True) for item in job.items}
    assert live < {item for _, item in asked}


def test_records_of_a_rival_that_is_measured_no_more_are_read_and_not_shown():
    machine = STUDIES["page_arrays"].reference_machine
    frame = store.load("page_arrays", machine)
    assert (frame.backend == "vllm-metadata").any()
    rows = decode_metadata.metadata_rows(frame, builder="kv_indices")
    table = decode_metadata.design_times(rows)
    assert len(table) == 10
    designs = {"SGLang 0.5.14", "SGLang 0.5.23", "attnlib, no overlap", "attnlib"}
    assert designs <= {*table.columns}
    assert not [name for name in table.columns if "vLLM" in name]


def test_every_decode_record_lists_kernels_samples_and_clocks():
    for row in rows_of(store.read(REGRESSION.name, REGRESSION.reference_machine)):
        if row["status"] == "ok":
            assert row["kernels"]
            assert len(row["run_us"]) >= 7
            assert row["state_before.sm_clock_mhz"]
            assert row["state_after.sm_clock_mhz"]
            assert row["versions.torch"]
            assert row["machine.driver"]


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_no_two_cases_of_a_study_share_a_key_or_a_label(study):
    assert len({case.key for case in study.cases}) == len(study.cases)
    assert len({case.label for case in study.cases}) == len(study.cases)
