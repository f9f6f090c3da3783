"""Text for a terminal: lines and tables that fit into `WIDTH` columns."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

WIDTH = 100
NARROWEST = 12
"""Columns that are left to a cell, however wide the others are."""
GAP = "  "
NO_VALUE = "-"
NOT_ON_RECORD = "not on record"
DETAILS = "--details"
"""The option that shows what a short answer leaves out."""
COMMAND_END = " \\"
"""How a line of a command ends that goes on in the next one."""


def fitted(lines: Iterable[str]) -> str:
    """Lines as a text: long ones are cut, an indented line's rest further in."""
    fitting: list[str] = []
    for line in lines:
        fitting += folded(line)
    return "\n".join(fitting)


def folded(line: str, hang: int = 2) -> list[str]:
    """A line, cut at blanks if it is long; its rest stands `hang` blanks further in."""
    if len(line) <= WIDTH:
        return [line]
    indent = len(line) - len(line.lstrip())
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )


def fact_rows(facts: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each label and value, the values under each other."""
    width = max((len(label) for label, _ in facts), default=0)
    lines = []
    for label, value in facts:
        lines += folded(f"  {label:<{width}}  {value}".rstrip(), hang=width + 2)
    return lines


def command_lines(command: str) -> list[str]:
    """A shell command, long ones cut before an option so that they can be pasted as they are."""
    lines = [""]
    for word in re.split(r" (?=--)", command):
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and len(longer) + len(COMMAND_END) > WIDTH:
            lines[-1] += COMMAND_END
            lines.append(f"{GAP}{word}")
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of words, the heads first, in columns; the widest cells go on in a second line."""
    columns = list(zip(*rows, strict=True))
    widths = _widths(columns)
    are_numbers = [_are_numbers(column[1:]) for column in columns]
    lines = []
    for row in rows:
        cells = [
            textwrap.wrap(cell, width, break_on_hyphens=False)
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            words = []
            for part, width, is_number in zip(parts, widths, are_numbers, strict=True):
                words.append(part.rjust(width) if is_number else part.ljust(width))
            lines.append(GAP.join(words).rstrip())
    return lines


def _widths(columns: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column: its widest cell's; where that is too much, first heads are cut,
    then what has blanks, then words."""
    widths = []
    for column in columns:
        widths.append(max(1, *map(len, column)))
    heads = []
    for head, *cells in columns:
        heads.append(max(_longest_word([head]), *map(len, cells)))
    words = [_longest_word(column) for column in columns]
    room = WIDTH - len(GAP) * (len(widths) - 1)
    for least in (heads, words, [NARROWEST] * len(widths)):
        while sum(widths) > room:
            slack = []
            for place, width in enumerate(widths):
                if width > least[place]:
                    slack.append(place)
            if not slack:
                break
            widths[max(slack, key=widths.__getitem__)] -= 1
    return widths


def _longest_word(cells: Sequence[str]) -> int:
    """The letters of the longest word, at least 1."""
    return max(map(len, " ".join(cells).split()), default=1)


def _are_numbers(cells: Sequence[str]) -> bool:
    """Whether a column stands right: a number in it, no word but `NO_VALUE`."""
    words = [cell for cell in cells if cell not in ("", NO_VALUE)]
    return bool(words) and all(word.lstrip("+-")[:1].isdigit() for word in words)
