"""The page around the notebooks: its table of claims, its ways, and what it escapes."""

import re
from dataclasses import replace

import pytest
from jinja2 import UndefinedError

from attnlib.draw import cards
from attnlib.report import page
from attnlib.report.fragment import Fragment
from attnlib.studies import claims
from attnlib.studies.evidence import Finding

EVIL = "<b onclick='x'>\"&"
ESCAPED = "&lt;b onclick=&#39;x&#39;&gt;&#34;&amp;"


@pytest.fixture(autouse=True)
def replay(monkeypatch):
    monkeypatch.setenv("ATTNLIB_MODE", "replay")


@pytest.fixture
def evil():
    """A claim with markup in each text that is shown."""
    claim = claims.load_claims()[0]
    source, figure = replace(claim.source, repo=EVIL), claims.Figure(2.0, EVIL)
    claim = replace(claim, id=EVIL, quote=EVIL, source=source, figure=figure)
    return claims.CheckedClaim(claim, Finding("open", EVIL, measured=EVIL))


def test_every_text_of_a_claim_is_escaped(evil):
    text = page.render_page([], [evil], [], part="")
    assert EVIL not in text and "<b onclick" not in text
    assert text.count(ESCAPED) == 7  # id, quote, figure, reason, measured, and the source twice


@pytest.mark.parametrize("word", ["confirmed", "not measurable here"])
def test_a_verdict_is_a_word_and_not_a_colour_alone(evil, word):
    text = page.render_page([], [replace(evil, finding=Finding(word, "so"))], [], part="")
    assert f"<b class='{word.replace(' ', '-')}'>{word}</b>" in text


@pytest.mark.parametrize(
    ("here", "there", "shown"),
    [
        ("refuted", "confirmed", True),
        ("refuted", "refuted", False),
        ("open", "confirmed", False),
        ("refuted", "open", False),
    ],
)
def test_a_live_run_names_the_verdicts_that_are_others_than_the_published(evil, here, there, shown):
    checked = [replace(evil, finding=Finding(here, "so"))]
    text = page.render_page([], checked, [], part="", published={evil.claim.id: there})
    assert (f"published: {there}" in text) is shown


def test_claims_stand_under_the_pull_request_that_made_them():
    finding = Finding("open", "not yet")
    checked = [claims.CheckedClaim(claim, finding) for claim in claims.load_claims()]
    text = page.render_page([], checked, [], part="")
    sources = dict.fromkeys(each.claim.source for each in checked)
    pulls = [f"https://github.com/{s.repo}/pull/{s.pull}" for s in sources]
    assert re.findall(r"<tbody.*?href='(\S+)'", text, re.S) == pulls
    assert f"say of it: {len(checked)} open." in text


def test_a_notebooks_question_is_escaped_wherever_it_is_named():
    pages = [page.Page(name, Fragment(EVIL, "", ""), ()) for name in ("01_a", "02_b")]
    text = page.render_page(pages, [], [], part="")
    assert "<b onclick" not in text
    # A tab's two names, its finding, its head, a neighbour's way.
    assert text.count(ESCAPED) == 2 * 5


def test_the_page_says_whether_its_numbers_were_measured_for_it(monkeypatch):
    assert "no GPU was used" in page.render_page([], [], [], part="")
    monkeypatch.setattr(page, "mode", lambda: "live")
    live = page.render_page([], [], [], part="")
    assert "Measured on the GPU that built this page" in live and "no GPU was used" not in live


def test_a_template_that_lacks_a_value_raises_instead_of_leaving_a_gap():
    with pytest.raises(UndefinedError, match="'release' is undefined"):
        cards.render(page.TEMPLATES / "study.py.txt", name="x", lender="y", machine="z")
