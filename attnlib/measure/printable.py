"""Text from files and arguments, made safe to print on a terminal."""

import re

CONTROL = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tab and newline
    "\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the direction of writing
    "\u2028\u2029"  # other ends of a line
    "\ud800-\udfff"  # halves of a surrogate pair, which no encoding takes
    "]"
)


def printable(text: str) -> str:
    r"""`text` with each character that would steer a terminal as Python writes it: `\x1b`."""
    return CONTROL.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
