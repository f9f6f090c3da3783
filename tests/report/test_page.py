"""The page around the notebooks: claims, provenance, and what it escapes."""

import html
import json
import re
from dataclasses import replace

import pytest

from attnlib.report import page
from attnlib.report.fragment import Fragment
from attnlib.report.page import Page, Shown, live_run, render_page, studies_in
from attnlib.run import store
from attnlib.studies import claims

EVIL = "<b onclick='x'>\"&"
ESCAPED = "&lt;b onclick=&#39;x&#39;&gt;&#34;&amp;"

pytestmark = pytest.mark.usefixtures("replayed")


@pytest.fixture
def evil():
    """A claim with markup in every text that is shown."""
    texts = {"id": EVIL, "quote": EVIL, "source": EVIL, "figure": 2.0, "unit": EVIL}
    claim = replace(claims.load_claims()[0], **texts)
    return claims.Judged(claim, "open", EVIL, EVIL)


def shown_by(study):
    """The page of one notebook that shows `study`."""
    return render_page([Page("07_x", Fragment("?", "", "", (), ""), (study,))], [], [study])


def test_every_text_of_a_claim_is_escaped(evil):
    text = render_page([], [evil], [])
    assert EVIL not in text and "<b onclick" not in text
    assert text.count(ESCAPED) == 6  # id, quote, source, figure, measured, reason


@pytest.mark.parametrize("word", ["confirmed", "not measurable here"])
def test_a_verdict_is_a_word_and_not_a_colour_alone(evil, word):
    text = render_page([], [replace(evil, verdict=word)], [])
    assert f"<b class='{word.replace(' ', '-')}'>{word}</b>" in text


def test_a_notebooks_question_is_escaped_everywhere():
    pages = [
        Page(name, Fragment(EVIL, "", "", (("x", EVIL),), ""), ()) for name in ("01_a", "02_b")
    ]
    text = render_page(pages, [], [])
    assert "<b onclick" not in text and ESCAPED in text


def test_the_page_says_whether_its_numbers_were_measured_for_it(monkeypatch):
    assert "no GPU was used" in render_page([], [], [])
    monkeypatch.setattr(page, "mode", lambda: "live")
    assert "Measured on the GPU that built this page" in render_page([], [], [])


def test_a_notebook_shows_the_studies_that_its_code_names(published_records):
    names = [shown.study for shown in studies_in('load_or_measure(STUDIES["auto_resolution"])')]
    assert names == ["auto_resolution"] and studies_in("%load_ext attnlib") == []
    names = [shown.study for shown in studies_in("bisect(fa3_decode_regression)")]
    assert names == ["fa3_decode_regression", "bisect_fa3_decode_regression"]


def test_every_string_of_a_record_is_escaped(make_record):
    machine = {"gpu": "Test GPU", "gpu_id": "1", "cpu": "<i>cpu</i>"}
    command, versions = "python -m attnlib <b>x</b> && y", {"torch": "<s>1</s>"}
    told = {"command": command, "machine": machine, "versions": versions}
    path = store.keep(make_record(study="bisect_demo", **told))
    text = shown_by(Shown("bisect_demo", path.parents[1].name))
    for tag in ("<b>x", "<i>cpu", "<s>1"):
        assert tag not in text and html.escape(tag) in text


def test_a_live_page_says_which_studies_this_gpu_has_not_measured(monkeypatch):
    monkeypatch.setattr(page, "mode", lambda: "live")
    text = shown_by(Shown("auto_resolution", "test-gpu-1"))
    assert "auto_resolution: not measured on this GPU.</p>" in text and "Records shown" not in text


def test_published_records_that_are_missing_are_an_error():
    with pytest.raises(FileNotFoundError, match="no records of study 'auto_resolution'"):
        shown_by(Shown("auto_resolution", "test-gpu-1"))


def test_the_last_gpu_run_is_summarised(tmp_path):
    path = tmp_path / "live_run.json"
    assert live_run(path) == {}
    part = {"part": "tests/a.py", "passed": 3, "skipped": 1, "failed": 0, "skips": ["no x"]}
    run = {"gpu": "NVIDIA H200", "versions": {"torch": "2.11"}, "left": ["b"], "agrees": "2 of 3"}
    path.write_text(json.dumps(run | {"parts": [part | {"date": "2026-11-26"}]}))
    facts = live_run(path)
    assert facts["day and GPU"] == "2026-11-26, NVIDIA H200" and facts["not run"] == "b"
    assert facts["agrees with published verdicts"] == "2 of 3"
    assert re.fullmatch("1 files: passed 3, skipped 1, failed 0", facts["tests and notebooks"])
