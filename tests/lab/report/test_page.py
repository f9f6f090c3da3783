"""The page around the notebooks: claims, provenance, and what it escapes."""

import html
import json
import re
from dataclasses import replace

import pytest

from attnlib.lab import claims
from attnlib.lab.report import page
from attnlib.lab.report.fragment import Fragment
from attnlib.lab.report.page import live_run, render_page
from attnlib.run import store
from attnlib.select.known import PROBLEMS, sizes

EVIL = "<b onclick='x'>\"&"
ESCAPED = "&lt;b onclick=&#39;x&#39;&gt;&#34;&amp;"

pytestmark = pytest.mark.usefixtures("replayed")


@pytest.fixture
def evil():
    """A claim with markup in every text that is shown."""
    claim = replace(
        claims.load_claims()[0],
        id=EVIL,
        quote=EVIL,
        source=EVIL,
        figure={"value": 2.0, "unit": EVIL},
    )
    return claims.Judged(claim, "open", EVIL, EVIL)


def test_every_text_of_a_claim_is_escaped(evil):
    text = render_page([], [evil], [])
    assert "<b onclick" not in text
    assert text.count(ESCAPED) == 5  # id, quote, source, figure, measured


def test_a_verdict_is_a_word_and_not_a_colour_alone(evil):
    text = render_page([], [replace(evil, verdict="not measurable here")], [])
    assert '<b class="not-measurable-here">not measurable here</b>' in text


def test_a_notebooks_question_and_headings_are_escaped():
    fragment = Fragment("01_a", EVIL, "", "", (("x", EVIL),), "")
    text = render_page([fragment], [], [])
    assert "<b onclick" not in text
    assert text.count(ESCAPED) == 4  # title of the tab, finding, heading, contents


def test_the_page_says_whether_its_numbers_were_measured_for_it(monkeypatch):
    assert "no GPU was used" in render_page([], [], [])
    monkeypatch.setattr(page, "mode", lambda: "live")
    assert "Measured on the GPU that built this page" in render_page([], [], [])


def test_every_string_of_a_record_is_escaped(make_record):
    path = store.keep(
        make_record(
            study="bisect_demo",
            machine={"gpu": "<i>GPU", "gpu_id": "1", "cpu": "x"},
        )
    )
    studies = [("bisect_demo", path.parents[1].name)]
    text = render_page([], [], studies)
    assert "<i>GPU" not in text
    assert html.escape("<i>GPU") in text


def test_a_live_page_says_which_studies_this_gpu_has_not_measured(monkeypatch):
    monkeypatch.setattr(page, "mode", lambda: "live")
    text = render_page([], [], [("auto_resolution", "test-gpu-1")])
    row = text.partition('<tr id="study-auto_resolution">')[2].partition("</tr>")[0]
    assert '<td colspan="4">not measured on this GPU</td>' in row


def test_published_records_that_are_missing_are_an_error():
    with pytest.raises(FileNotFoundError, match="no records of study 'auto_resolution'"):
        render_page([], [], [("auto_resolution", "test-gpu-1")])


def test_every_known_problem_that_was_measured_is_a_row_with_its_anchor_size_and_fix():
    text = render_page([], [], [])
    assert '<a href="#known">Known problems</a>' in text
    table = text.partition('<section id="known">')[2].partition("</section>")[0]
    measured = {name for name, problem in PROBLEMS.items() if problem.record}
    assert table.count("<tr id=") == len(measured) > 20
    assert f"of the {len(PROBLEMS)} in" in table
    rows = dict(re.findall(r'<tr id="known-(.*?)">(.*?)</tr>', table, re.DOTALL))
    assert rows.keys() == measured
    for name in measured:
        assert html.unescape(rows[name]).count(PROBLEMS[name].do) >= 1
        assert " x on NVIDIA" in rows[name]
    slow = rows["flashinfer-fa3-decode-auto"]
    assert "<td>flashinfer since 0.6.0, ended in 0.6.4</td>" in slow
    first, *_ = sizes()["flashinfer-fa3-decode-auto"]["sizes"]
    assert f"{first['median']:.2f} x on {first['gpu']}" in slow


def test_a_text_of_a_known_problem_is_escaped(monkeypatch):
    problem = replace(PROBLEMS["flashinfer-fa3-decode-auto"], says=EVIL, do=EVIL)
    monkeypatch.setattr(page, "PROBLEMS", {problem.id: problem})
    text = render_page([], [], [])
    assert "<b onclick" not in text and text.count(ESCAPED) == 2


def test_the_last_gpu_run_is_summarised(tmp_path):
    path = tmp_path / "live_run.json"
    assert live_run(path) == {}
    part = {"part": "tests/a.py", "date": "2026-11-26", "passed": 3, "skipped": 1, "failed": 0}
    run = {
        "gpu": "NVIDIA H200",
        "versions": {"torch": "2.11"},
        "left": ["b"],
        "agrees": "2 of 3",
        "parts": [part],
    }
    path.write_text(json.dumps(run))
    assert live_run(path) == {
        "days and GPU": "2026-11-26 to 2026-11-26, NVIDIA H200",
        "tests and notebooks": "1 files: passed 3, skipped 1, failed 0",
        "not run": "b",
        "agrees with published verdicts": "2 of 3",
        "versions": "torch 2.11",
    }
