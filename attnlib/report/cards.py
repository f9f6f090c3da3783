"""A card: title, notes, facts and one table, as HTML for JupyterLab and as text for a terminal.

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
.attnlib-card dt { opacity: .75; }
.attnlib-card dd { margin: 0; font-variant-numeric: tabular-nums; }
.attnlib-card .scroll { overflow-x: auto; }
.attnlib-card table { border-collapse: collapse; font-size: inherit; margin: .5em 0; }
.attnlib-card caption { text-align: left; opacity: .75; padding-bottom: .2em; }
.attnlib-card th, .attnlib-card td { padding: .15em .7em; text-align: right; white-space: nowrap;
  border-bottom: 1px solid rgba(128, 128, 128, .35); font-variant-numeric: tabular-nums; }
.attnlib-card th:first-child { text-align: left; font-weight: normal; max-width: 32rem;
  overflow: hidden; text-overflow: ellipsis; }
.attnlib-card thead th, .attnlib-card thead th:first-child { font-weight: bold; }
.attnlib-card .bar { display: inline-block; width: 6rem; height: .7em; text-align: left;
  border: 1px solid rgba(128, 128, 128, .5); }
.attnlib-card .bar span { display: block; height: 100%; background: #0072B2; }
.attnlib-card footer { opacity: .75; font-size: .92em; }
"""


@dataclass(frozen=True)
class Card:
    """What is shown: `table` holds ready words, its first column names the row.

    `bars` are fractions 0..1, one a row of the table, or none at all.
    """

    title: str
    notes: Sequence[str]
    facts: Sequence[tuple[str, str]]
    table: pd.DataFrame
    caption: str
    footer: str
    bars: Sequence[float] = ()


def as_html(card: Card) -> str:
    """The card as an HTML fragment that carries its own style and loads nothing."""
    notes = "".join(f"<p class='note'>{html.escape(note)}</p>\n" for note in card.notes)
    facts = "".join(
        f"<dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd>\n"
        for label, value in card.facts
    )
    return (
        f"<style>{STYLE}</style>\n<div class='attnlib-card'>\n<h4>{html.escape(card.title)}</h4>\n"
        f"{notes}<dl>\n{facts}</dl>\n<div class='scroll'>{_table(card)}</div>\n"
        f"<footer>{html.escape(card.footer)}</footer>\n</div>"
    )


def as_text(card: Card) -> str:
    """The card as aligned lines."""
    width = max((len(label) for label, _ in card.facts), default=0)
    facts = [f"  {label:<{width}}  {value}" for label, value in card.facts]
    table = card.table.head(MAX_ROWS)
    body = table.to_string(index=False) if len(table) else "  (nothing)"
    parts = [card.title, *card.notes, *facts, "", body, *_left_out(card), "", card.footer]
    return "\n".join(parts)


def _table(card: Card) -> str:
    bars = [*card.bars][: len(card.table)]
    names = [*card.table.columns, *([""] if bars else [])]
    head = "".join(f"<th scope='col'>{html.escape(str(name))}</th>" for name in names)
    shown = card.table.head(MAX_ROWS).to_numpy().tolist()
    rows = "\n".join(_row(words, bars[i] if bars else None) for i, words in enumerate(shown))
    rest = "".join(f"<p>{html.escape(line)}</p>" for line in _left_out(card))
    return (
        f"<table>\n<caption>{html.escape(card.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody>\n</table>{rest}"
    )


def _row(words: Sequence[object], bar: float | None) -> str:
    first, *rest = (html.escape(str(word), quote=True) for word in words)
    cells = "".join(f"<td>{word}</td>" for word in rest)
    if bar is not None:
        width = 100 * min(1.0, max(0.0, bar))
        cells += f"<td><div class='bar'><span style='width:{width:.1f}%'></span></div></td>"
    return f"<tr><th scope='row' title='{first}'>{first}</th>{cells}</tr>"


def _left_out(card: Card) -> list[str]:
    more = len(card.table) - MAX_ROWS
    return [f"and {more} more rows: .table() has them all"] if more > 0 else []
