"""The report as its readers open it: a file, on a desk, on a phone, on paper, read aloud.

It is made of the outputs that are committed with the notebooks; nbval holds those to the records.
"""

import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from driving import NOTEBOOKS, severe_violations

from attnlib.lab.report import build
from attnlib.lab.report.page import LEADS
from attnlib.lab.report.shorten import count_words

pytestmark = pytest.mark.browser
STEMS = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
MOST_WORDS = 20_000
HASH = re.compile(r"\b[0-9a-f]{12,}\b")
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
    heading = shown.locator(f"[id='{links[-1]}'] h2").bounding_box()
    tabs = shown.locator("nav.tabs").bounding_box()
    assert tabs["y"] + tabs["height"] <= heading["y"] < 200


def test_a_reader_sees_at_most_20_000_words_and_the_count_is_the_browsers(shown, report):
    seen = len(shown.evaluate("document.body.innerText").split())
    counted = count_words(BeautifulSoup(report.read_text(), "html.parser"))
    assert shown.locator("details").count() == 0, "folded words would not be seen"
    assert 10_000 < seen <= MOST_WORDS
    assert abs(counted - seen) < 50


@pytest.mark.parametrize("width", [1280, 390])
def test_the_first_screen_has_a_finding_with_its_figure_and_no_hash(shown, width):
    shown.set_viewport_size({"width": width, "height": 844})
    figure = shown.locator(".leads img").first
    box = figure.bounding_box()
    assert box["y"] + box["height"] < 844 and box["width"] > 0.5 * 0.9 * min(width, 1056)
    findings = shown.locator("#findings").inner_text()
    assert not HASH.search(findings)
    assert len(figure.get_attribute("alt").split()) > 5


def test_cards_stand_inside_the_text_column(shown):
    column = shown.locator("main").bounding_box()
    boxes = shown.locator(".attnlib-card").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().right)"
    )
    assert len(boxes) > 10 and max(boxes) <= column["x"] + column["width"] + 1


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
