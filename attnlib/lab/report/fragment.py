"""One executed notebook as a piece of the report, by nbconvert's own template.

What nbconvert leaves to a page is done here on the parsed HTML: names that no other notebook has,
descriptions of figures, and links that lead to another notebook of the page. `shorten` cuts it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import TYPE_CHECKING

from .shorten import leave_out_long_code, point_to_repeats, shorten_outputs

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag
    from nbconvert import HTMLExporter
    from nbformat import NotebookNode

ACTIVE = (
    "script",
    "style",
    "iframe",
    "object",
    "embed",
    "link",
    "form",
    "base",
    "meta",
)
"""Elements that load, run or restyle. The page's content policy stops other ways to run."""
OUTSIDE = ("https://", "http://", "mailto:")
SPELLING = {"flashinfer": "FlashInfer", "sglang": "SGLang", "mla": "MLA"}
"""Words of the files' names that are no plain ones."""
NOTEBOOK = re.compile(r"([^/#]+)\.ipynb(?:#.*)?")


@dataclass(frozen=True)
class Fragment:
    """A notebook's question as text; its finding, its first figure (or nothing), its body as HTML.

    `anchor` is its file's stem, `contents` are the id and the text of its sections.
    """

    anchor: str
    question: str
    finding: str
    figure: str
    contents: tuple[tuple[str, str], ...]
    body: str

    @property
    def number(self) -> str:
        """`02` of `02_slug`."""
        return self.anchor.split("_")[0]

    @property
    def tab(self) -> str:
        """`Choose a backend` of `06_choose_a_backend`."""
        _, first, *words = self.anchor.split("_")
        spelled = [SPELLING.get(word, word) for word in words]
        return " ".join([SPELLING.get(first, first.capitalize()), *spelled])


def notebook_fragment(
    notebook: NotebookNode,
    anchor: str,
    *,
    shown: Collection[str] = (),
    seen: dict[str, str] | None = None,
) -> Fragment:
    """Convert an executed notebook. `anchor` goes before its ids, `shown` are all on the page.

    `seen` are the outputs of the notebooks before it, as `point_to_repeats` keeps them.

    The question is the first heading and leaves the body; the finding is the first bold sentence
    (empty if there is none) and stays.
    """
    from bs4 import BeautifulSoup
    from bs4.element import PreformattedString

    html, _ = _exporter().from_notebook_node(notebook)
    soup = BeautifulSoup(html, "html.parser")
    for element in soup.find_all(ACTIVE):
        element.decompose()
    # Comments and declarations: browsers end them elsewhere, and would run what is inside.
    for text in soup.find_all(string=lambda text: isinstance(text, PreformattedString)):
        text.extract()
    for link in soup.select("a.anchor-link"):
        link.decompose()
    leave_out_long_code(soup)
    shorten_outputs(soup)
    point_to_repeats(soup, anchor, {} if seen is None else seen)
    for output in soup.select("div.output_area"):
        # Wider than a phone, it scrolls, from the keyboard too.
        output.attrs |= {"tabindex": "0", "role": "group", "aria-label": "output"}
    _name_parts(soup, anchor)
    _point_links(soup, shown)
    return _split(soup, anchor)


@cache
def _exporter() -> HTMLExporter:
    """One for all notebooks, since it compiles its templates."""
    from nbconvert import HTMLExporter

    return HTMLExporter(
        template_name="basic",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        filters={"clean_html": lambda html: html},  # cleaned here, the whole notebook at once
    )


def _name_parts(soup: BeautifulSoup, anchor: str) -> None:
    """Ids that no other notebook has; headings one level down, as the page has the only h1."""
    for element in soup.find_all(id=True):
        element["id"] = f"{anchor}-{element['id']}"
    for heading in soup.select(".text_cell :is(h1, h2, h3, h4, h5)"):
        heading.name = f"h{int(heading.name[1]) + 1}"
    for image in soup.select(".output img"):
        image["alt"] = _what_is_shown(image)


def _what_is_shown(image: Tag) -> str:
    """The heading above a figure, and the paragraph that leads to it."""
    words = []
    for name in (re.compile("h[2-6]"), "p"):
        above = image.find_previous(name)
        if above:
            words.append(" ".join(above.get_text().split()))
    return ": ".join(words) or "figure"


def _point_links(soup: BeautifulSoup, shown: Collection[str]) -> None:
    """To a notebook's part of the page; what is neither there nor on the net is no link."""
    for link in soup.find_all("a"):
        target = str(link.get("href", ""))
        notebook = NOTEBOOK.fullmatch(target)
        if notebook and notebook[1] in shown:
            link["href"] = f"#{notebook[1]}"
        elif not target.startswith(OUTSIDE):
            link.name = "span"
            link.attrs = {"title": "not in this file"}


def _split(soup: BeautifulSoup, anchor: str) -> Fragment:
    question = anchor
    finding = ""
    figure = ""
    heading = soup.find("h2")
    if heading:
        question = heading.extract().get_text().strip()
    bold = soup.select_one("p > strong")
    if bold and bold.parent:
        bold.parent["class"] = "finding"
        finding = bold.decode_contents()
    image = soup.find("img", src=True)
    if image:
        words = escape(str(image["alt"]))
        figure = f'<img src="{image["src"]}" alt="{words}">'
    contents = []
    for section in soup.select("h3[id]"):
        contents.append((str(section["id"]), section.get_text()))
    return Fragment(
        anchor=anchor,
        question=question,
        finding=finding,
        figure=figure,
        contents=tuple(contents),
        body=str(soup),
    )
