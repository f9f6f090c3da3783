"""A table as a reader wants it: no index, no NaN, three digits."""

import pandas as pd

from ..core.spec import require_int
from .cards import DIGITS, Card, Shown, in_digits

MOST_DIGITS = 9


class Table(Shown):
    """A table of ready words, its caption above it and its source below."""

    def __init__(self, words: pd.DataFrame, caption: str, source: str) -> None:
        self.words = words
        self.caption = caption
        self.source = source

    def card(self) -> Card:
        """The table alone."""
        return Card(
            title="",
            notes=[],
            facts=[],
            table=self.words,
            caption=self.caption,
            footer=self.source,
        )


def show(
    table: pd.DataFrame,
    caption: str = "",
    source: str = "",
    *,
    digits: int = DIGITS,
) -> Table:
    """Show a table without index and NaN, its numbers with three digits.

    Parameters
    ----------
    table : DataFrame
        Rows in the order in which they are shown. An index with a name is a column, another is
        left out.
    caption : str, optional
        What a row is and in which units.
    source : str, optional
        Where the numbers come from.
    digits : int, default 3
        Digits of a fraction, 1 to 9, its leading 0 among them; integers are whole.

    Returns
    -------
    Table
        Shown as HTML by a notebook and as text by a terminal.

    Raises
    ------
    TypeError
        For what is no DataFrame.
    ValueError
        For digits outside of 1 to 9.

    Examples
    --------
    >>> import attnlib, pandas
    >>> attnlib.show(pandas.DataFrame({"backend": ["fa2", "fa3"], "us": [131.02, float("nan")]}))
    backend  us
        fa2 131
        fa3   -
    """
    if not isinstance(table, pd.DataFrame):
        raise TypeError(f"table must be a DataFrame, got {type(table).__name__}")
    require_int("digits", digits, most=MOST_DIGITS)
    flat = table.copy()
    if isinstance(flat.columns, pd.MultiIndex):
        flat.columns = flat.columns.map(_one_name)
    if any(flat.index.names):
        flat = flat.reset_index()
    words = flat.map(in_digits, digits=digits).rename(columns=str)
    return Table(words, caption, source)


def _one_name(parts: tuple[object, ...]) -> str:
    """The name of a column that has several parts."""
    return " ".join(map(str, parts)).strip()
