"""What the report leaves to the notebook, so that a reader gets through it.

Long code, the end of a long table, further tables of a card, what a card folds, and outputs that
the page has already shown. Each cut in an output is said in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag

MOST_CODE_LINES = 5
MOST_ROWS = 6
MOST_FACTS = 4
MOST_NOTES = 2
MOST_LINES = 8
LEAST_REPEATED_WORDS = 30
"""A shorter output is shown again: a link to it would not be read sooner."""
INLINE = ("a", "abbr", "b", "code", "em", "i", "q", "span", "strong")
"""Elements that do not end a word."""
REST = "more in the notebook"


def count_words(soup: Tag) -> int:
    """Words of all text of a page or a part, as a browser shows them; numbers in tables count."""
    shown = []
    block = None
    for text in soup.find_all(string=True):
        around = text.find_parent(lambda tag: tag.name not in INLINE)
        if around is None or around.name in ("style", "script", "title"):
            continue
        if around is not block:
            shown.append(" ")
            block = around
        shown.append(text)
    return len("".join(shown).split())


def point_to_repeats(soup: BeautifulSoup, anchor: str, seen: dict[str, str]) -> None:
    """Put a link in place of an output that a notebook of the page has already shown.

    `seen` is output -> the notebook that showed it, and gets those of this notebook, `anchor`.
    """
    for output in soup.select(".output_area"):
        shown = output.decode()
        first = seen.setdefault(shown, anchor)
        if first == anchor or count_words(output) < LEAST_REPEATED_WORDS:
            continue
        output.clear()
        link = soup.new_tag("a", href=f"{first}.ipynb", string=f"notebook {first.split('_')[0]}")
        output.extend(["The same output as in ", link, "."])


def shorten_outputs(soup: BeautifulSoup) -> None:
    """Cut cards, tables and printed text, and say where something was cut."""
    for output in soup.select(".output_area"):
        cut = [_drop(output.select("details"))]
        for card in output.select(".attnlib-card"):
            cut.append(_shorten_card(card))
        for table in output.select("table"):
            cut.append(_drop(table.select("tbody tr")[MOST_ROWS:]))
        for text in output.select("pre"):
            cut.append(_shorten_text(text))
        if any(cut):
            output.append(soup.new_tag("p", attrs={"class": "rest"}, string=REST))


def _shorten_card(card: Tag) -> bool:
    """Keep the first table, facts and notes of a card; returns whether something went."""
    cut = [
        _drop(card.select("div.scroll")[1:]),
        _drop(card.select("dt")[MOST_FACTS:]),
        _drop(card.select("p.note")[MOST_NOTES:]),
    ]
    _drop(card.select("dd")[MOST_FACTS:])
    for code in card.select("pre"):
        caption = code.find_previous_sibling("p")
        cut.append(_drop([code, caption] if caption else [code]))
    return any(cut)


def _shorten_text(text: Tag) -> bool:
    """Keep the first lines of a printed text; returns whether some went."""
    lines = text.get_text().strip("\n").splitlines()
    if len(lines) <= MOST_LINES:
        return False
    text.string = "\n".join(lines[:MOST_LINES])
    return True


def leave_out_long_code(soup: BeautifulSoup) -> None:
    """Only short code stays, and no imports: the call that an output is of."""
    for area in soup.select(".code_cell div.input"):
        code = area.get_text().strip()
        lines = [line for line in code.splitlines() if line]
        if len(lines) > MOST_CODE_LINES or code.startswith(("import ", "from ")):
            area.decompose()


def _drop(elements: Iterable[Tag]) -> bool:
    """Take the elements out; returns whether there were any."""
    dropped = False
    for element in elements:
        element.decompose()
        dropped = True
    return dropped
