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
OPEN_ALL = "document.querySelectorAll('details').forEach(each => each.open = true)"
DEAD_LINKS = """[...document.querySelectorAll('a[href^="#"]')]
    .map(link => decodeURIComponent(link.getAttribute('href').slice(1)))
    .filter(name => !document.getElementById(name))"""
REPEATED_IDS = """[...document.querySelectorAll('[id]')].map(each => each.id)
    .filter((name, place, all) => all.indexOf(name) !== place)"""


@pytest.fixture(scope="module")
def report(browser, tmp_path_factory):
    """The whole report; `browser` first, so that it is not built for a skip."""
    out = tmp_path_factory.mktemp("report") / "index.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATTNLIB_DATA", raising=False)
        patch.setenv("ATTNLIB_MODE", "replay")
        patch.setattr(html, "execute", lambda path: nbformat.read(path, as_version=4))
        return html.build_report(out)


@pytest.fixture
def shown(page, report):
    """The report in a desktop's window, opened as a file, and all that it asked the net for."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    return page, asked


def test_the_file_opens_without_a_request_to_anywhere_else(shown, report):
    page, asked = shown
    page.evaluate("Promise.all([...document.images].map(image => image.decode()))")
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    assert page.title().startswith("Attention backends")


def test_every_link_into_the_page_has_its_end_and_no_id_stands_twice(shown):
    page, _ = shown
    assert page.evaluate(DEAD_LINKS) == []
    assert page.evaluate(REPEATED_IDS) == []
    assert page.locator('a[href^="#"]').count() > 3 * len(STEMS)
    outside = page.locator('a:not([href^="#"])').evaluate_all("all => all.map(a => a.href)")
    assert all(re.match(r"https://", address) for address in outside)


def test_a_finding_leads_to_its_notebook(shown):
    page, _ = shown
    links = page.locator("ol.findings a")
    assert links.evaluate_all("all => all.map(a => a.hash.slice(1))") == STEMS
    assert page.locator("ol.findings p").count() == len(STEMS)
    links.last.click()
    top = page.locator(f"[id='{STEMS[-1]}']").evaluate("e => e.getBoundingClientRect().top")
    assert 0 <= top < 200


def test_code_is_folded_and_opens_by_key(shown):
    page, _ = shown
    first = page.locator("details.code").first
    assert not first.locator("pre").is_visible()
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    assert first.locator("pre").is_visible()


@pytest.mark.parametrize(("width", "opened"), [(1280, False), (390, False), (390, True)])
def test_axe_finds_nothing_serious_and_a_page_scrolls_in_one_direction(shown, width, opened):
    page, _ = shown
    page.set_viewport_size({"width": width, "height": 844})
    if opened:
        page.evaluate(OPEN_ALL)
    assert severe_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("window.scrollTo(500, 0)")
    assert page.evaluate("window.scrollX") == 0


def test_on_paper_nothing_is_wider_than_the_sheet_and_it_prints(shown, tmp_path):
    page, _ = shown
    page.set_viewport_size({"width": 695, "height": 1000})  # A4 less its margins, at 96 a inch
    page.emulate_media(media="print")
    assert not page.locator("nav.tabs").is_visible()
    wide = """[...document.querySelectorAll('table, img, pre')]
        .filter(e => e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1)
        .map(e => e.outerHTML.slice(0, 200))"""
    assert page.evaluate(wide) == []
    page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) > len(STEMS)


def test_a_page_with_a_fault_is_noticed(page):
    page.set_content("<main><h1>Fault</h1><img src='data:,'><a href='#gone'>gone</a></main>")
    assert "image-alt (critical)" in " ".join(severe_violations(page))
    assert page.evaluate(DEAD_LINKS) == ["gone"]
