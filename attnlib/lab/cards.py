"""A card: title, notes, facts and tables, as HTML for JupyterLab and as text for a terminal.

The template escapes every string, and its colours are those of JupyterLab's theme.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..measure.printable import printable
from ..select.lines import NO_VALUE, WIDTH, command_lines, fact_rows, fitted, folded, table_lines

MAX_ROWS = 20
NO_BAR = -1.0
DIGITS = 3
SHORT = "short"
"""The form of a number that is said with `DIGITS` digits."""
TEMPLATES = Path(__file__).with_name("templates")
STYLE = (TEMPLATES / "card.css").read_text(encoding="utf-8")

Captioned = tuple[str, pd.DataFrame, Sequence[float]]
"""Caption, table and bars."""


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
    def tables(self) -> list[Captioned]:
        """Caption, table and bars of the tables that have rows."""
        found: list[Captioned] = [(self.caption, self.table, self.bars)]
        for caption, table in self.more:
            found.append((caption, table, ()))
        return [each for each in found if not each[1].empty]


class Shown:
    """Something with a card: shown as HTML in JupyterLab, as text elsewhere."""

    def card(self) -> Card:
        """What is shown."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return as_html(self.card())

    def __repr__(self) -> str:
        return as_text(self.card())


class Brief(Shown):
    """Something with a card whose text is short; `details` has what the card has."""

    def brief(self) -> list[str]:
        """The lines of the short text."""
        raise NotImplementedError

    @property
    def details(self) -> str:
        """All that is known, as text."""
        return as_text(self.card())

    def __repr__(self) -> str:
        return _as_printed(fitted(self.brief()))


BLANK = ("", "")
"""A fact that is an empty line."""


def fact_lines(groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The facts that have a value, an empty line between two groups."""
    facts: list[tuple[str, str]] = []
    for group in groups:
        if facts and group:
            facts.append(BLANK)
        for name, value in group.items():
            if value != "":
                facts.append((name, str(value)))
    return facts


def as_html(card: Card) -> str:
    """The card as an HTML fragment that carries its own style and loads nothing."""
    from markupsafe import Markup

    page = fill_template(
        TEMPLATES / "card.html",
        card=card,
        tables=[_shown(*table) for table in card.tables],
        style=Markup(STYLE),
    )
    return page.removesuffix("\n")


def folded_html(short: Card, whole: Card, summary: str) -> str:
    """A short card, and below it the whole one, which a click on `summary` unfolds."""
    below = as_html(replace(whole, title=""))
    fold = f"<details>\n<summary>{escape(summary)}</summary>\n{below}\n</details>"
    return f"{as_html(short)}\n{fold}"


def fill_template(template: Path, **values: Any) -> str:
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
    lines = [fitted([card.title, *card.notes]), *fact_rows(card.facts)]
    for caption, table, _ in card.tables:
        lines.append("")
        if caption != card.caption:
            lines.append(f"{caption}:")
        lines += _table_text(table.head(MAX_ROWS))
        lines += _left_out(table)
    lines.append("")
    if card.code:
        lines += [card.code_caption, *command_lines(card.code), ""]
    lines += folded(card.footer)
    return _as_printed("\n".join(lines))


def _as_printed(text: str) -> str:
    """A text without what steers a terminal, and without blanks at the ends of lines."""
    lines = printable(text).strip("\n").splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _table_text(table: pd.DataFrame) -> list[str]:
    """The lines of a table; one that is too wide has its widest cells in several lines."""
    lines = table.to_string(index=False).splitlines()
    if max(map(len, lines)) <= WIDTH:
        return lines
    return in_columns(table)


def in_columns(table: pd.DataFrame) -> list[str]:
    """The lines of a table of words: words stand left, numbers right."""
    if table.empty:
        return []
    heads = [str(name) for name in table]
    rows = table.astype(str).to_numpy().tolist()
    return table_lines([heads, *rows])


def in_words(table: pd.DataFrame, forms: Mapping[str, str]) -> pd.DataFrame:
    """The table with each column in its form, if any (`,.1f`, `SHORT`); `NO_VALUE` for NaN."""
    words = {}
    for name, form in forms.items():
        if name in table:
            words[name] = [_formatted(value, form) for value in table[name]]
    return table.assign(**words).where(table.notna(), NO_VALUE)


def _formatted(value: Any, form: str) -> str:
    if pd.isna(value):
        return NO_VALUE
    if form == SHORT:
        return in_digits(value)
    return format(value, form)


def in_digits(value: Any, digits: int = DIGITS) -> str:
    """A cell in words: a fraction with its digits, a leading 0 among them; `NO_VALUE` for NaN."""
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return NO_VALUE
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if not isinstance(value, float | np.floating):
        return str(value)
    if not np.isfinite(value):
        return str(value)
    before_the_point = len(f"{abs(value):.0f}")
    return f"{value:,.{max(0, digits - before_the_point)}f}"


def _shown(
    caption: str,
    table: pd.DataFrame,
    bars: Sequence[float],
) -> tuple[object, ...]:
    """Caption, names and kinds of columns, rows each with its bar, and what is left out."""
    head = table.head(MAX_ROWS)
    names = list(table)
    kinds = []
    for name in table:
        kinds.append(_kind(head[name].astype(str)))
    widths = [NO_BAR] * len(head)
    if len(bars):
        names.append("")
        widths = np.clip(bars[: len(head)], 0.0, 1.0).tolist()
    cells = head.to_numpy().tolist()
    rows = list(zip(cells, widths, strict=True))
    return caption, names, [*kinds, ""], rows, _left_out(table)


def _kind(column: Iterable[str]) -> str:
    """`words`, which stand left, or nothing: numbers stand right, under each other."""
    words = [word for word in column if word != NO_VALUE]
    has_number = any(word.lstrip("+-")[:1].isdigit() for word in words)
    return "words" if words and not has_number else ""


def _left_out(table: pd.DataFrame) -> list[str]:
    more = len(table) - MAX_ROWS
    if more <= 0:
        return []
    return [f"and {more} more rows: .table() or --json has them all"]
