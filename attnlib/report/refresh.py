"""Bring the committed outputs up to date: notebooks executed in place, README's figure redrawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..draw import style
from ..measure.files import write_whole
from ..run import store
from ..run.study import mode, record_machine
from ..studies import STUDIES
from ..studies.fa3_decode_regression.figures import slowdown_heatmap
from ..studies.fa3_decode_regression.study import REGRESSED
from .build import ROOT, execute

if TYPE_CHECKING:
    from nbformat import NotebookNode

README_FIGURE = ROOT / "data" / "figures" / "fa3_decode_slowdown.png"
KEPT_METADATA = ("kernelspec",)


def refresh(notebooks: Path = ROOT / "notebooks") -> list[Path]:
    """Execute every notebook in place and redraw the figure; returns the files written.

    Raises RuntimeError unless in replay mode: committed outputs come from committed records.
    """
    if mode() != "replay":
        raise RuntimeError("refresh must run with ATTNLIB_MODE=replay, this is live mode")
    paths = sorted(notebooks.glob("*.ipynb"))
    for path in paths:
        write_notebook(path, execute(path))
    draw_readme_figure(README_FIGURE)
    return [*paths, README_FIGURE]


def draw_readme_figure(path: Path) -> None:
    """The slowdown heat map of the published study, page size 16, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    study = STUDIES["fa3_decode_regression"]
    frame = store.load(study.name, record_machine(study))
    path.parent.mkdir(parents=True, exist_ok=True)
    style.save(slowdown_heatmap(frame, REGRESSED, page_size=16), path)


def write_notebook(path: Path, notebook: NotebookNode) -> None:
    """Write an executed notebook, whole or not at all, without the metadata of this machine."""
    import nbformat

    # What names the interpreter of the day would make a diff on every machine.
    notebook.metadata = {name: notebook.metadata[name] for name in KEPT_METADATA}
    write_whole(path, f"{nbformat.writes(notebook)}\n".encode())
