"""How a notebook shows what `attnlib.explain` returns, after `%load_ext attnlib`."""

import pandas as pd
from IPython.core.interactiveshell import InteractiveShell

from ..select.explain import Choice
from .cards import Card, as_html, as_text, fact_lines

SHOWN = 6
"""Rules: those that chose, and the first of the others."""
OF_OTHER_GPUS = "needs gpu "
"""How the reason of a rule begins that holds on other GPUs only; those are counted, not shown."""
FIRST = 2
"""Backends of an order that are named."""
PLAIN, HTML = "text/plain", "text/html"


def register(shell: InteractiveShell) -> None:
    """Let a shell show a choice as a card."""
    formatters = shell.display_formatter.formatters
    formatters[HTML].for_type(Choice, lambda choice: as_html(card_of(choice)))
    formatters[PLAIN].for_type(Choice, _print_card)


def _print_card(choice: Choice, printer: object, cycle: bool) -> None:
    printer.text(as_text(card_of(choice)))  # type: ignore[attr-defined]


def card_of(choice: Choice) -> Card:
    """What was picked, what decided it, and the rules that did not choose."""
    rules = rules_of(choice)
    here = rules[~rules["why, or why not"].str.startswith(OF_OTHER_GPUS)]
    footer = f"Rules are read in the source of the release; {len(rules)} in all"
    if left_out := len(rules) - len(here):
        footer += f", {left_out} of them for other GPUs"
    facts = {
        "it can choose": ", ".join(choice.order) or "none",
        "decided by": choice.decided_by.why,
        "problem": choice.problem,
    }
    return Card(
        title=f"{choice.library} on {choice.gpu}, {choice.mode}: {choice.picked}",
        notes=[],
        facts=fact_lines([facts]),
        table=here.head(SHOWN),
        caption="rules that were considered",
        footer=f"{footer}.",
    )


def rules_of(choice: Choice) -> pd.DataFrame:
    """A row per rule, those that chose first."""
    rows = [
        {
            "rule for": _short(reason.subject),
            "chosen": "yes" if reason.matched and reason.kind != "limit" else "no",
            "why, or why not": reason.why,
            "source": reason.source,
        }
        for reason in choice.reasons
        if not reason.of_other_model
    ]
    names = ["rule for", "chosen", "why, or why not", "source"]
    rules = pd.DataFrame(rows, columns=names).drop_duplicates()
    return rules.sort_values(
        "chosen",
        ascending=False,
        kind="stable",
        ignore_index=True,
    )


def _short(order: str) -> str:
    """The first backends of an order, and how many follow."""
    names = order.split(" > ")
    more = len(names) - FIRST
    if more <= 1:
        return order
    return " > ".join([*names[:FIRST], f"{more} more"])
