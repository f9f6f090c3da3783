"""Which studies a notebook shows, and that a page says no more of them than there is."""

import html

import pytest

from attnlib.report import provenance
from attnlib.report.fragment import Fragment
from attnlib.report.page import Page, render_page
from attnlib.report.provenance import Shown, studies_of
from attnlib.run import store
from attnlib.studies import STUDIES


def test_a_study_is_shown_where_code_names_it_and_a_search_shows_its_records_too():
    code = ["load_or_measure(STUDIES['auto_resolution'])", 'store.read("decode_metadata")']
    assert studies_of(code) == ["auto_resolution", "decode_metadata"]
    assert studies_of(["auto_resolution = 1", "%load_ext attnlib"]) == []
    named, both = 'study = STUDIES["fa3_decode_regression"]', "bisect_fa3_decode_regression"
    assert studies_of([named]) == ["fa3_decode_regression"]
    assert studies_of([named, "bisect(study, case)"]) == ["fa3_decode_regression", both]


def test_all_published_studies_and_searches_are_listed(published_records):
    names = [shown.study for shown in provenance.published()]
    there = [name for name, study in STUDIES.items() if study.reference_machine or study.borrows]
    assert [name for name in names if name in STUDIES] == there
    assert "bisect_fa3_decode_regression" in names


@pytest.mark.parametrize(
    ("study", "samples", "again"),
    [
        ("xqa_rivals", "graph-cold after 201 ms (median)", 36),
        ("auto_resolution", "graph at once", 0),
        ("metadata_mismatch", "eager at once", 0),
        ("engine_modes", "profiler at once, graph after 202 ms (median)", 128),
        ("layer_policy", "graph-cold after 13 ms (median), graph after 7 ms (median)", 0),
    ],
)
def test_a_study_says_how_long_its_samples_waited_and_how_many_are_a_a_items(
    published_records, study, samples, again
):
    (shown,) = (each for each in provenance.published() if each.study == study)
    assert shown.facts["samples"] == samples and shown.facts["A/A"] == f"{again} records"


def test_records_of_other_machines_that_a_notebook_loads_have_their_files_too(published_records):
    beside = {
        each.study: each.facts.get("on other machines", "") for each in provenance.published()
    }
    assert "624 in data/records/nvidia-h200-84993e41/xqa_rivals.parquet" in beside["xqa_rivals"]
    assert "nvidia-h200-9ab23648" in beside["engine_step"] and not beside["fa2_plan"]


def shown_by(study):
    """The page of one notebook that shows `study`."""
    return render_page([Page("07_x", Fragment("?", "", ""), (study,))], [], [study], part="")


def test_every_string_of_a_record_is_escaped(make_record, monkeypatch):
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    machine = {"gpu": "Test GPU", "gpu_id": "1", "cpu": "<i>cpu</i>"}
    command, versions = "python -m attnlib <b>x</b> && y", {"<u>v</u>": "<s>1</s>"}
    store.append(record := make_record(command=command, machine=machine, versions=versions))
    text = shown_by(Shown("demo", record.machine_slug, "is <em>it</em>?"))
    for tag in ("<b>x", "<i>cpu", "<u>v", "<s>1", "<em>it"):
        assert tag not in text and html.escape(tag) in text
    assert text.count("python -m attnlib &lt;b&gt;x&lt;/b&gt; &amp;&amp; y") == 2


def test_a_live_page_says_which_studies_this_gpu_has_not_measured(monkeypatch):
    monkeypatch.setattr(provenance, "mode", lambda: "live")
    text = shown_by(Shown("auto_resolution", "test-gpu-1", "?"))
    assert "auto_resolution: not measured on this GPU.</p>" in text and "<aside" not in text


def test_published_records_that_are_gone_are_an_error(monkeypatch):
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    with pytest.raises(FileNotFoundError, match="no records of study 'auto_resolution'"):
        shown_by(Shown("auto_resolution", "test-gpu-1", "?"))
