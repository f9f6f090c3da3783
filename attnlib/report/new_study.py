"""`python -m attnlib new-study NAME`: a study to start from, that runs at once.

The study asks for a few items of a published one and replays its records (`Study.borrows`) until it
is measured itself; module and notebook say so, and mark with TODO what is the author's to change.
"""

from __future__ import annotations

import keyword
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..draw.cards import render
from ..measure.files import write_whole
from ..run import store
from ..studies import STUDIES
from ..studies.fa3_decode_regression.study import REGRESSED
from . import build
from .page import TEMPLATES

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
LENDER = "fa3_decode_regression"
"""The published study that lends its records; its headline cases are the module's."""
MODULES = {"__init__.py": "init.py.txt", "study.py": "study.py.txt"}
"""File of a study's folder -> its template."""
MAX_NAME = 40
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
SETTINGS = ("ATTNLIB_MODE", "ATTNLIB_DATA", "ATTNLIB_MACHINE")


def new_study(name: str, root: Path = ROOT) -> list[Path]:
    """Write the folder and the executed notebook of a study; returns module and notebook.

    ValueError for a name that is not a slug or is taken, RuntimeError if the notebook fails.
    Whatever is raised, nothing is left behind.
    """
    _require_name(name)
    folder = root / "notebooks"
    home = root / "attnlib" / "studies" / name
    if not folder.is_dir():
        raise ValueError(f"new-study must run in a checkout, {folder} is not a folder")
    _require_unused(name, home, folder)
    numbers = [int(path.name[:2]) for path in folder.glob("[0-9][0-9]_*.ipynb")]
    path = folder / f"{max(numbers, default=0) + 1:02d}_{name}.ipynb"
    try:
        home.mkdir()
        for file, template in MODULES.items():
            write_whole(home / file, module_text(name, template).encode())
        with _replaying():
            executed = build.execute(path, notebook_of(name, number=path.name[:2]))
        build.write_notebook(path, executed)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        path.unlink(missing_ok=True)
        raise
    return [home / "study.py", path]


def module_text(name: str, template: str) -> str:
    """A module of the folder `studies/<name>`."""
    machine = STUDIES[LENDER].reference_machine
    return render(
        TEMPLATES / template, name=name, lender=LENDER, machine=machine, release=REGRESSED
    )


def notebook_of(name: str, *, number: str) -> NotebookNode:
    """The notebook, not executed: the fenced blocks of its template become code cells."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    found = store.provenance(LENDER, STUDIES[LENDER].reference_machine)
    known = {"name": name, "lender": LENDER, "release": REGRESSED}
    known |= {"gpu": found["machine"]["gpu"], "measured": found["measured"]}
    text = render(TEMPLATES / "notebook.md", **known)
    cells = []
    for place, part in enumerate(re.split(r"```(?:python)?\n", text)):
        make = new_code_cell if place % 2 else new_markdown_cell
        cells.append(make(part.strip(), id=f"{number}-{place:02d}"))
    return new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def _require_name(name: str) -> None:
    slug = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
    if not slug or len(name) > MAX_NAME or keyword.iskeyword(name) or name.startswith("bisect_"):
        raise ValueError(
            f"NAME must be lower-case words joined by _, at most {MAX_NAME} characters, no word of "
            f"Python and not bisect_*, got {name!r}"
        )


def _require_unused(name: str, home: Path, folder: Path) -> None:
    taken = [f"study {name!r}"] if name in STUDIES else []
    taken += [str(path) for path in (home, *folder.glob(f"*_{name}.ipynb")) if path.exists()]
    taken += [f"records on {machine}" for machine in store.machines(name)]
    if taken:
        raise ValueError(f"NAME must be new, there is already {taken[0]}")


@contextmanager
def _replaying() -> Iterator[None]:
    """Committed outputs come from committed records, whatever this shell has set."""
    before = dict(os.environ)
    for name in SETTINGS:
        os.environ.pop(name, None)
    os.environ["ATTNLIB_MODE"] = "replay"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
