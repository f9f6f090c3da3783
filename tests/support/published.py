"""The published records and the prose about them, read once."""

from functools import cache
from pathlib import Path

import nbformat
import pytest

from attnlib.kinds.item import Item
from attnlib.run import store
from attnlib.studies import STUDIES

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@cache
def published(name):
    """The frame of a study's published records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ATTNLIB_DATA", raising=False)
        return store.load(name, STUDIES[name].reference_machine)


def live(name):
    """Of `published`, the records that a notebook on a GPU would measure."""
    jobs = STUDIES[name].jobs(headline=True)
    asked = {(job.round, item) for job in jobs for item in job.items}
    frame = published(name)
    kept = [
        (round_, Item(*item)) in asked
        for round_, *item in zip(
            frame["round"], frame.backend, frame.timer, frame.case, frame.release, strict=True
        )
    ]
    return frame[kept]


@cache
def prose(name):
    """The markdown of the notebook whose name begins so."""
    (path,) = NOTEBOOKS.glob(f"{name}*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def says(name, *sentences):
    """The notebook says all of it, word by word and number by number."""
    for sentence in sentences:
        assert sentence in prose(name), f"notebook {name} must say: {sentence}"


def span(values, digits=0):
    """The least and the most, as prose has them."""
    return f"{values.min():.{digits}f} to {values.max():.{digits}f}"


def pick(table, **wanted):
    """The rows that have these values."""
    for name, value in wanted.items():
        table = table[table[name] == value]
    return table
