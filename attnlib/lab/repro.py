"""Scripts that show a regression without the workbench: what `python -m attnlib repro` prints.

A script is a file beside this one, `repro_NAME.py.txt`: read, never imported, and with no import of
ours. Whoever maintains the library at fault can read and run it with nothing else installed.
"""

from pathlib import Path

from ..core.spec import require_word

HERE = Path(__file__).parent
PREFIX, SUFFIX = "repro_", ".py.txt"


def names() -> list[str]:
    """Of all scripts, sorted."""
    files = (path.name for path in HERE.glob(f"{PREFIX}*{SUFFIX}"))
    return sorted(name.removeprefix(PREFIX).removesuffix(SUFFIX) for name in files)


def script(name: str) -> str:
    """The text of a script; ValueError listing all names for another."""
    require_word("NAME", name, names())
    return (HERE / f"{PREFIX}{name}{SUFFIX}").read_text("utf-8")
