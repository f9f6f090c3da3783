"""One executed notebook as a piece of the report: HTML that any browser and screen reader takes.

nbconvert does the converting; what it leaves to a page is done here, on the parsed tree.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag
    from nbconvert import HTMLExporter
    from nbformat import NotebookNode

ACTIVE = ("script", "style", "iframe", "object", "embed", "link", "form", "base", "meta")
"""Elements that load, run or restyle: a cell's output may hold them, a page to share may not."""
LINKS = re.compile(r"(?:https?:|mailto:|#)", re.IGNORECASE)
USES = re.compile(r"attnlib\.(?:advise|compare|diagnose)\(")
NOTEBOOK = re.compile(r"(?:\./)?([^/#]+)\.ipynb(?:#.*)?")


@dataclass(frozen=True)
class Fragment:
    """A notebook's question as text; its finding, its first figure (or nothing), its body as HTML.

    `contents` are the id and the text of its headings.
    """

    question: str
    finding: str
    figure: str
    contents: tuple[tuple[str, str], ...]
    body: str


def notebook_fragment(
    notebook: NotebookNode, anchor: str, *, shown: Collection[str] = ()
) -> Fragment:
    """Convert an executed notebook. `anchor` goes before its ids, `shown` are all on the page.

    The question is the first heading and leaves the body; the finding is the first bold sentence
    (empty if there is none) and stays.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(_exporter().from_notebook_node(notebook)[0], "html.parser")
    for element in [*soup.find_all(ACTIVE), *soup.select("a.anchor-link")]:
        element.decompose()
    for element in soup.find_all(True):
        for name in [name for name in element.attrs if name.lower().startswith("on")]:
            del element[name]
    _fold_code(soup)
    _name_headings(soup, anchor)
    _describe_figures(soup, anchor)
    _box_wide_things(soup)
    _point_links(soup, anchor, shown)
    return _split(soup, anchor)


@cache
def _exporter() -> HTMLExporter:
    """One for all notebooks, since it compiles its templates; what it makes is cleaned later."""
    from nbconvert import HTMLExporter

    without = {"exclude_input_prompt": True, "exclude_output_prompt": True}
    return HTMLExporter(template_name="basic", filters={"clean_html": lambda html: html}, **without)


def _fold_code(soup: BeautifulSoup) -> None:
    """Each cell's code under its last line: folded for tables and set-up, open for `USES`."""
    for area in soup.select("div.code_cell > div.input"):
        lines = [line for line in area.get_text().splitlines() if line.strip()]
        calls = [line.strip() for line in lines if not line.startswith(("plt.show", " ", ")"))]
        details, summary = soup.new_tag("details", attrs={"class": "code"}), soup.new_tag("summary")
        summary.extend(["code: ", soup.new_tag("code", string=calls[-1] if calls else "")])
        table = area.parent and area.parent.select_one(".output table")
        is_setup = lines and lines[0].startswith(("import ", "from "))
        if USES.search("\n".join(lines)) or not (table or is_setup):
            details["open"] = ""
        area.wrap(details).insert(0, summary)


def _name_headings(soup: BeautifulSoup, anchor: str) -> None:
    """One level down, since the page has the only h1; ids that no other notebook has."""
    for heading in soup.find_all(re.compile(r"h[1-5]$")):
        if heading.find_parent(class_="attnlib-card"):
            continue  # a card's level is right wherever it is shown
        heading.name = f"h{int(heading.name[1]) + 1}"
    for number, element in enumerate(soup.find_all(id=True)):
        is_heading = element.name.startswith("h")
        element["id"] = f"{anchor}-{element['id'] if is_heading else number}"


def _describe_figures(soup: BeautifulSoup, anchor: str) -> None:
    """What drew the figure and under which heading; the text after it says what it shows."""
    for number, image in enumerate(soup.find_all("img"), 1):
        heading = image.find_previous(re.compile(r"h[2-6]$"))
        cell = image.find_parent("div", class_="code_cell")
        call = cell.select_one("summary code") if cell else None
        drawn = re.search(r"[\w.]+(?=\()", call.get_text()) if call else None
        by = f", drawn by {drawn[0]}" if drawn else ""
        under = f": {heading.get_text()}" if heading else ""
        image["alt"] = f"Figure {number} of notebook {anchor[:2]}{by}{under}"


def _box_wide_things(soup: BeautifulSoup) -> None:
    """What may be wider than a phone goes into a box that scrolls, also from the keyboard."""
    for element in soup.find_all(["table", "img", "pre"]):
        heading = element.find_previous(re.compile(r"h[2-6]$"))
        kind = {"table": "table", "img": "figure", "pre": "text"}[element.name]
        if element.name == "table":
            _mark_heads(element)
        where = f": {heading.get_text()}" if heading else ""
        named = {"tabindex": "0", "role": "group", "aria-label": f"{kind}{where}"}
        element.wrap(soup.new_tag("div", attrs={"class": f"scroll {kind}", **named}))


def _mark_heads(table: Tag) -> None:
    """Say which cells are heads of what; an empty one is no head."""
    del table["border"]
    for row in table.find_all("tr"):
        del row["style"]
    for cell in table.find_all("th"):
        if not cell.get_text(strip=True):
            cell.name = "td"
            del cell["scope"]
        else:
            cell["scope"] = "col" if cell.find_parent("thead") else "row"


def _point_links(soup: BeautifulSoup, anchor: str, shown: Collection[str]) -> None:
    """To a notebook's part of the page; what is neither there nor on the net is no link."""
    for link in soup.find_all("a"):
        target = str(link.get("href", ""))
        notebook = NOTEBOOK.fullmatch(target)
        if target.startswith("#"):
            link["href"] = f"#{quote(f'{anchor}-{unquote(target[1:])}')}"
        elif notebook and notebook[1] in shown:
            link["href"] = f"#{notebook[1]}"
        elif not LINKS.match(target):
            link.attrs = {"title": "not in this file"}
            link.name = "span"


def _split(soup: BeautifulSoup, anchor: str) -> Fragment:
    heading = soup.find("h2")
    question = heading.get_text().strip() if heading else anchor
    if heading:
        heading.decompose()
    bold = soup.select_one("p > strong")
    if bold and bold.parent:
        bold.parent["class"] = "finding"
    finding = bold.decode_contents() if bold else ""
    image, headings = soup.find("img"), soup.select("h3[id]")
    figure = f'<img src="{image["src"]}" alt="{escape(str(image["alt"]))}">' if image else ""
    contents = tuple((str(heading["id"]), heading.get_text()) for heading in headings)
    return Fragment(question, finding, figure, contents, str(soup))
