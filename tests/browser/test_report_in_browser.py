"""The report as its readers open it: a file, on a desk, on a phone, on paper, read aloud.

It is made of the outputs that are committed with the notebooks; nbval holds those to the records.
"""

import re

import nbformat
import pytest
from driving import NOTEBOOKS, severe_violations

from attnlib.report import build as html

pytestmark = pytest.mark.browser
STEMS = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
MOST_BYTES, MOST_WORDS = 2_500_000, 27_000
"""Words that are shown: folded code is not."""
OPEN_ALL = "document.querySelectorAll('details').forEach(each => each.open = true)"
DEAD_LINKS = """[...document.querySelectorAll('a[href^="#"]')]
    .map(link => decodeURIComponent(link.getAttribute('href').slice(1)))
    .filter(name => !document.getElementById(name))"""
KEEP_TWO_NOTEBOOKS = """[...[...document.querySelectorAll('section.notebook')].slice(2),
    ...document.querySelectorAll('tr:nth-child(n+4)')].forEach(each => each.remove())"""
"""Notebooks share their colours, and so do rows."""
REPEATED_IDS = """[...document.querySelectorAll('[id]')].map(each => each.id)
    .filter((name, place, all) => all.indexOf(name) !== place)"""


@pytest.fixture(scope="module")
def report(browser, tmp_path_factory):
    """The whole report; `browser` first, so that it is not built for a skip."""
    out = tmp_path_factory.mktemp("report") / "index.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATTNLIB_DATA", raising=False)
        patch.setenv("ATTNLIB_MODE", "replay")
        patch.setattr(html, "execute", lambda path, **_: nbformat.read(path, as_version=4))
        return html.build_report(out)


@pytest.fixture
def shown(page, report):
    """The report in a desktop's window, opened as a file."""
    page.goto(report.as_uri())
    return page


def test_the_file_opens_without_a_request_to_anywhere_else(page, report, asked):
    page.goto(report.as_uri())
    page.evaluate("Promise.all([...document.images].map(image => image.decode()))")
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    assert page.title().startswith("Attention backends")


def test_the_page_is_small_enough_to_send_and_to_read(shown, report):
    assert report.stat().st_size <= MOST_BYTES
    assert len(shown.locator("body").inner_text().split()) <= MOST_WORDS


def test_every_link_has_its_end_no_id_stands_twice_and_a_finding_leads_to_its_notebook(shown):
    assert (shown.evaluate(DEAD_LINKS), shown.evaluate(REPEATED_IDS)) == ([], [])
    assert shown.locator('a[href^="#"]').count() > 3 * len(STEMS)
    outside = shown.locator('a:not([href^="#"])').evaluate_all("all => all.map(a => a.href)")
    assert all(address.startswith("https://") for address in outside)
    leads, links = shown.locator(".leads h3 a"), shown.locator("ol.findings a")
    stems = [each.evaluate_all("all => all.map(a => a.hash.slice(1))") for each in (leads, links)]
    assert len(stems[0]) == 3 and sorted(stems[0] + stems[1]) == STEMS
    assert shown.locator(".leads img").count() == 3
    assert shown.locator(".leads p, ol.findings p").count() == len(STEMS)
    links.last.click()
    top = shown.locator(f"[id='{stems[1][-1]}']").evaluate("e => e.getBoundingClientRect().top")
    assert 0 <= top < 200


def test_a_search_goes_through_all_notebooks_and_opens_folded_code(shown):
    box, told = shown.get_by_label("Search all notebooks"), shown.locator("search output")
    numbers = set()
    box.fill("no such words")
    box.press("Enter")
    assert told.inner_text() == "none" and not shown.locator(".found").count()
    box.fill("What this does NOT show")
    for _ in STEMS:
        box.press("Enter")
        assert shown.locator(".found").inner_text().lower() == "what this does not show"
        numbers.add(told.inner_text()[-2:])
    assert numbers == {stem[:2] for stem in STEMS}
    box.fill("plt.show()")
    box.press("Enter")
    assert shown.locator("details[open] .found").is_visible()


def test_code_of_a_table_is_folded_and_opens_by_key(shown):
    assert shown.locator("details.code[open]").count() > 10
    first = shown.locator("details.code:not([open])").first
    first.evaluate("e => e.dataset.first = 1")
    first = shown.locator("details.code[data-first]")
    assert not first.locator("pre").is_visible()
    first.locator("summary").focus()
    shown.keyboard.press("Enter")
    assert first.locator("pre").is_visible()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_scrolls_in_one_direction(shown, width):
    shown.set_viewport_size({"width": width, "height": 844})
    shown.evaluate(OPEN_ALL)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    shown.evaluate("window.scrollTo(500, 0)")
    assert shown.evaluate("window.scrollX") == 0


def test_axe_finds_nothing_serious(shown):
    shown.evaluate(OPEN_ALL)
    assert severe_violations(shown, rules={"color-contrast": {"enabled": False}}) == []
    shown.evaluate(KEEP_TWO_NOTEBOOKS)
    assert severe_violations(shown, runOnly=["color-contrast"]) == []


def test_on_paper_nothing_is_wider_than_the_sheet_and_it_prints(shown):
    shown.set_viewport_size({"width": 695, "height": 1000})  # A4 less its margins, at 96 a inch
    shown.emulate_media(media="print")
    assert not shown.locator("nav.tabs").is_visible()
    wide = """[...document.querySelectorAll('table, img, pre')]
        .filter(e => e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1)
        .map(e => e.outerHTML.slice(0, 200))"""
    assert shown.evaluate(wide) == []
    printed = shown.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) > len(STEMS)
