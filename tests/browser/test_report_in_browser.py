"""The report as its readers open it: a file, on a desk, on a phone, on paper, read aloud.

It is made of the outputs that are committed with the notebooks; nbval holds those to the records.
"""

import re

import nbformat
import pytest
from driving import NOTEBOOKS, severe_violations

from attnlib.lab.report import build
from attnlib.lab.report.page import LEADS

pytestmark = pytest.mark.browser
STEMS = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
OPEN_ALL = "document.querySelectorAll('details').forEach(each => each.open = true)"
DEAD_LINKS = """[...document.querySelectorAll('a[href^="#"]')]
    .map(link => decodeURIComponent(link.getAttribute('href').slice(1)))
    .filter(name => !document.getElementById(name))"""
REPEATED_IDS = """[...document.querySelectorAll('[id]')].map(each => each.id)
    .filter((name, place, all) => all.indexOf(name) !== place)"""
WIDER_THAN_THE_SHEET = """[...document.querySelectorAll('table, img, pre')]
    .filter(e => e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.outerHTML.slice(0, 200))"""


@pytest.fixture(scope="module")
def report(browser, tmp_path_factory):
    """The whole report; `browser` first, so that it is not built for a skip."""
    out = tmp_path_factory.mktemp("report") / "index.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATTNLIB_DATA", raising=False)
        patch.setenv("ATTNLIB_MODE", "replay")
        patch.setattr(build, "execute", lambda path: nbformat.read(path, as_version=4))
        return build.build_report(out)


@pytest.fixture
def shown(page, report):
    """The report in a desktop's window, opened as a file."""
    page.goto(report.as_uri())
    return page


def test_the_file_opens_without_a_request_to_anywhere_else(page, report, asked):
    page.goto(report.as_uri())
    page.evaluate("Promise.all([...document.images].map(image => image.decode()))")
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]


def test_every_link_has_its_end_no_id_stands_twice_and_a_finding_leads_to_its_notebook(shown):
    assert shown.evaluate(DEAD_LINKS) == []
    assert shown.evaluate(REPEATED_IDS) == []
    titles = shown.locator("#findings h3 a, #findings li > a")
    links = titles.evaluate_all("all => all.map(a => a.hash.slice(1))")
    leads = [stem for number in LEADS for stem in STEMS if stem.startswith(number)]
    assert links == leads + [stem for stem in STEMS if stem not in leads]
    assert shown.locator(".leads img").count() == len(leads)
    assert shown.locator("#findings p").count() == len(STEMS)
    titles.last.click()
    top = shown.locator(f"[id='{links[-1]}']").evaluate("e => e.getBoundingClientRect().top")
    assert 0 <= top < 200


def test_code_of_a_table_is_folded_and_opens_by_key(shown):
    assert shown.locator("details.code[open]").count() > 10
    first = shown.locator("details.code:not([open])").first
    first.evaluate("e => e.dataset.first = 1")
    first = shown.locator("details.code[data-first]")
    assert not first.locator("pre").is_visible()
    first.locator("summary").focus()
    shown.keyboard.press("Enter")
    assert first.locator("pre").is_visible()


def test_the_content_policy_lets_no_script_of_an_output_run(shown):
    hurt = "<img src='data:,' onerror='document.title = \"ran\"'>"
    shown.evaluate(
        "html => document.querySelector('main').insertAdjacentHTML('beforeend', html)", hurt
    )
    shown.wait_for_timeout(200)
    assert shown.title().startswith("Attention backends")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_scrolls_in_one_direction(shown, width):
    shown.set_viewport_size({"width": width, "height": 844})
    shown.evaluate(OPEN_ALL)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width


def test_axe_finds_nothing_serious(shown):
    shown.evaluate(OPEN_ALL)
    assert severe_violations(shown, rules={"color-contrast": {"enabled": False}}) == []


def test_on_paper_nothing_is_wider_than_the_sheet_and_it_prints(shown):
    shown.set_viewport_size({"width": 695, "height": 1000})  # A4 less its margins, at 96 a inch
    shown.emulate_media(media="print")
    assert not shown.locator("nav.tabs").is_visible()
    assert shown.evaluate(WIDER_THAN_THE_SHEET) == []
    printed = shown.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) > len(STEMS)
