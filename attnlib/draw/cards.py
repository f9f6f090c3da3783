"""A card: title, notes, facts and tables, as HTML for JupyterLab and as text for a terminal.

The template escapes every string, and its colours are those of JupyterLab's theme.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

MAX_ROWS, NO_BAR, NOTHING = 20, -1.0, "-"
TEMPLATES = Path(__file__).with_name("templates")
STYLE = (TEMPLATES / "card.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Card:
    """What is shown: `table` holds ready words, its first column names the row.

    `bars` are fractions 0..1, one per row of the table, or none at all. `more` are further tables,
    each after its caption; empty ones are left out. `code` is what to run, after its caption.
    """

    title: str
    notes: Sequence[str]
    facts: Sequence[tuple[str, str]]
    table: pd.DataFrame
    caption: str
    footer: str
    bars: Sequence[float] = ()
    more: Sequence[tuple[str, pd.DataFrame]] = ()
    code: str = ""
    code_caption: str = "This view again:"

    @property
    def tables(self) -> list[tuple[str, pd.DataFrame, Sequence[float]]]:
        """Caption, table and bars of the tables that have rows."""
        more = [(caption, table, ()) for caption, table in self.more]
        return [each for each in ((self.caption, self.table, self.bars), *more) if len(each[1])]


class Shown:
    """Something with a card: shown as HTML in JupyterLab, as text elsewhere."""

    def card(self) -> Card:
        """What is shown."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return as_html(self.card())

    def __repr__(self) -> str:
        return as_text(self.card())


def as_html(card: Card) -> str:
    """The card as an HTML fragment that carries its own style and loads nothing."""
    from markupsafe import Markup

    tables = [_shown(*table) for table in card.tables]
    page = render(TEMPLATES / "card.html", card=card, tables=tables, style=Markup(STYLE))
    return page.removesuffix("\n")


def render(template: Path, **values: Any) -> str:
    """A template, filled in: escaped in `.html`; a value that is missing raises."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=template.suffix == ".html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template.name).render(values)


def as_text(card: Card) -> str:
    """The card as aligned lines."""
    width = max((len(label) for label, _ in card.facts), default=0)
    facts = [f"  {label:<{width}}  {value}" for label, value in card.facts]
    body = []
    for caption, table, _ in card.tables:
        rows = table.head(MAX_ROWS).to_string(index=False)
        body += ["", *([f"{caption}:"] if caption != card.caption else []), rows, *_left_out(table)]
    code = [card.code_caption, card.code, ""] if card.code else []
    text = "\n".join([card.title, *card.notes, *facts, *body, "", *code, card.footer])
    return "\n".join(line.rstrip() for line in text.splitlines())


def in_words(table: pd.DataFrame, forms: Mapping[str, str]) -> pd.DataFrame:
    """The table with each column in its form (`,.1f`), else as it is; `NOTHING` for NaN."""
    words = {
        name: [NOTHING if pd.isna(value) else format(value, forms[name]) for value in table[name]]
        for name in forms
        if name in table
    }
    return table.assign(**words).where(table.notna(), NOTHING)


def _shown(caption: str, table: pd.DataFrame, bars: Sequence[float]) -> tuple[object, ...]:
    """Caption, names and kinds of columns, rows each with its bar, and what is left out."""
    head = table.head(MAX_ROWS)
    kinds = [_kind([str(word) for word in head[name]]) for name in table]
    widths = [min(1.0, max(0.0, bar)) for bar in bars[: len(head)]] or [NO_BAR] * len(head)
    rows = list(zip(head.to_numpy().tolist(), widths, strict=True))
    names = [*table, ""] if len(bars) else [*table]
    return caption, names, [*kinds, ""], rows, _left_out(table)


def _kind(column: Sequence[str]) -> str:
    # Numbers stand right, under each other; words, which begin with no digit, stand left.
    is_words = not any(word.lstrip("+-")[:1].isdigit() for word in column)
    return "words" if is_words and any(word != "-" for word in column) else ""


def _left_out(table: pd.DataFrame) -> list[str]:
    more = len(table) - MAX_ROWS
    return [f"and {more} more rows: .table() or --json has them all"] if more > 0 else []
