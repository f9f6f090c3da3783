"""A card: title, notes, facts and tables, as HTML for JupyterLab and as text for a terminal.

Every string on it is escaped: kernel names hold `<`, and a function's name is the user's. Colours
are those of the theme, so that a card is readable in the dark one too.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

MAX_ROWS = 20
STYLE = """
.attnlib-card { font-size: 13px; line-height: 1.45; max-width: 62rem; }
.attnlib-card h4 { margin: .2em 0 .4em; font-size: 1.05em; overflow-wrap: anywhere; }
.attnlib-card p { margin: .3em 0; }
.attnlib-card p.note { border-left: 3px solid currentColor; padding-left: .6em; }
.attnlib-card dl { display: grid; grid-template-columns: max-content 1fr; gap: .1em 1em;
  margin: .5em 0; }
.attnlib-card dt { opacity: .75; width: auto; font-weight: normal; white-space: nowrap; }
.attnlib-card dd { margin: 0; font-variant-numeric: tabular-nums; }
.attnlib-card .scroll { overflow-x: auto; }
.attnlib-card table { border-collapse: collapse; font-size: inherit; margin: .5em 0; }
.attnlib-card caption { text-align: left; opacity: .75; padding-bottom: .2em; }
.attnlib-card th, .attnlib-card td { padding: .15em .7em; text-align: right; white-space: nowrap;
  border-bottom: 1px solid rgba(128, 128, 128, .35); font-variant-numeric: tabular-nums; }
.attnlib-card th:first-child { text-align: left; font-weight: normal; max-width: 32rem;
  overflow: hidden; text-overflow: ellipsis; }
.attnlib-card .words { text-align: left; }
.attnlib-card thead th, .attnlib-card thead th:first-child { font-weight: bold; }
.attnlib-card .bar { display: inline-block; width: 6rem; height: .7em; text-align: left;
  border: 1px solid rgba(128, 128, 128, .5); }
.attnlib-card .bar span { display: block; height: 100%; background: #0072B2; }
.attnlib-card pre { margin: .3em 0; padding: .5em .7em; white-space: pre-wrap;
  border: 1px solid rgba(128, 128, 128, .35); }
.attnlib-card footer { opacity: .75; font-size: .92em; }
"""


@dataclass(frozen=True)
class Card:
    """What is shown: `table` holds ready words, its first column names the row.

    `bars` are fractions 0..1, one a row of the table, or none at all. `more` are further tables,
    each after its caption; empty ones are left out. `code` is what repeats it.
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

    @property
    def tables(self) -> list[tuple[str, pd.DataFrame, Sequence[float]]]:
        """Caption, table and bars of what is shown: the first table, and others that have rows."""
        more = [(caption, table, ()) for caption, table in self.more if len(table)]
        return [(self.caption, self.table, self.bars), *more]


def as_html(card: Card) -> str:
    """The card as an HTML fragment that carries its own style and loads nothing."""
    notes = "".join(f"<p class='note'>{html.escape(note)}</p>\n" for note in card.notes)
    facts = "".join(
        f"<dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd>\n"
        for label, value in card.facts
    )
    tables = "".join(f"<div class='scroll'>{_table(*shown)}</div>\n" for shown in card.tables)
    return (
        f"<style>{STYLE}</style>\n<div class='attnlib-card'>\n<h4>{html.escape(card.title)}</h4>\n"
        f"{notes}<dl>\n{facts}</dl>\n{tables}{_code(card)}"
        f"<footer>{html.escape(card.footer)}</footer>\n</div>"
    )


def as_text(card: Card) -> str:
    """The card as aligned lines."""
    width = max((len(label) for label, _ in card.facts), default=0)
    facts = [f"  {label:<{width}}  {value}" for label, value in card.facts]
    first, *more = card.tables
    body = [_text_table(first[1]), *_left_out(first[1])]
    for caption, table, _ in more:
        body += ["", f"{caption}:", _text_table(table), *_left_out(table)]
    code = [card.code, ""] if card.code else []
    return "\n".join([card.title, *card.notes, *facts, "", *body, "", *code, card.footer])


def _text_table(table: pd.DataFrame) -> str:
    return table.head(MAX_ROWS).to_string(index=False) if len(table) else "  (nothing)"


def _code(card: Card) -> str:
    if not card.code:
        return ""
    return f"<p>This view again:</p>\n<pre><code>{html.escape(card.code)}</code></pre>\n"


def _table(caption: str, table: pd.DataFrame, shares: Sequence[float]) -> str:
    bars = [*shares][: len(table)]
    names = [*table.columns, *([""] if bars else [])]
    shown = table.head(MAX_ROWS).to_numpy().tolist()
    kinds = [_kind(column) for column in zip(*shown, strict=True)] or [""] * len(names)
    kinds += [""] * (len(names) - len(kinds))
    head = "".join(
        f"<th scope='col'{kind}>{html.escape(str(name))}</th>"
        for name, kind in zip(names, kinds, strict=True)
    )
    rows = "\n".join(_row(words, kinds, bars[i] if bars else None) for i, words in enumerate(shown))
    rest = "".join(f"<p>{html.escape(line)}</p>" for line in _left_out(table))
    return (
        f"<table>\n<caption>{html.escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody>\n</table>{rest}"
    )


def _kind(column: Sequence[object]) -> str:
    # Numbers stand right, under each other; words, which begin with no digit, stand left.
    is_words = not any(str(word)[:1].isdigit() for word in column)
    return " class='words'" if is_words and any(str(word) != "-" for word in column) else ""


def _row(words: Sequence[object], kinds: Sequence[str], bar: float | None) -> str:
    first, *rest = (html.escape(str(word), quote=True) for word in words)
    cells = "".join(f"<td{kind}>{word}</td>" for word, kind in zip(rest, kinds[1:], strict=False))
    if bar is not None:
        width = 100 * min(1.0, max(0.0, bar))
        cells += f"<td><div class='bar'><span style='width:{width:.1f}%'></span></div></td>"
    return f"<tr><th scope='row' title='{first}'>{first}</th>{cells}</tr>"


def _left_out(table: pd.DataFrame) -> list[str]:
    more = len(table) - MAX_ROWS
    return [f"and {more} more rows: .table() has them all"] if more > 0 else []
