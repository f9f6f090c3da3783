"""The report: every notebook executed, in one HTML file that loads nothing from elsewhere.

Notebooks run live on a CUDA GPU and replay elsewhere. Two builds from the same records with the
same pinned packages are byte-identical: nothing in the file depends on time or place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...measure.files import require_writable, write_whole
from ...run.figures import style
from ...run.study import load_or_measure, mode
from ...studies import STUDIES
from .. import claims, gains, known_sizes
from .fragment import Fragment, notebook_fragment
from .page import published, render_page

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[3]
CELL_TIMEOUT_S = 1800
SIDE_BY_SIDE = 3
"""Notebooks that replay at the same time, since each waits in between; on a GPU one by one."""
FIGURES = ROOT / "data" / "figures"
FEW_COLLECTIONS = "--IPKernelApp.exec_lines=__import__('gc').set_threshold(100_000)"
MACHINE_TAG = "nbval-ignore-output"
SAVED = "(saved: another machine gives other values)"
WIDGET = "application/vnd.jupyter.widget-view+json"


def build_report(
    out: Path,
    notebooks: Path = ROOT / "notebooks",
    *,
    on_notebook: Callable[[str], object] | None = None,
) -> Path:
    """Execute `notebooks`/*.ipynb and write the report to `out`; returns its absolute path.

    `on_notebook` is called with the name of each notebook that has run.
    Raises ValueError, before anything runs, for an `out` that cannot be written, and RuntimeError
    for a cell that fails. `out` is then unchanged.
    """
    paths = notebooks_of(notebooks)
    require_writable(out)
    names = [path.stem for path in paths]
    pages: list[Fragment] = []
    seen: dict[str, str] = {}
    workers = SIDE_BY_SIDE if mode() == "replay" else 1
    with ThreadPoolExecutor(workers) as pool:
        executed = pool.map(execute, paths)
        for path, notebook in zip(paths, executed, strict=True):
            pages.append(render_notebook(path, notebook, names, seen))
            if on_notebook:
                on_notebook(path.stem)
    page = render_page(pages, claims.verdicts(), published())
    write_whole(out, page.encode())
    return out.resolve()


def render_notebook(
    path: Path,
    notebook: NotebookNode,
    names: Sequence[str],
    seen: dict[str, str],
) -> Fragment:
    """Convert an executed notebook to a part of the page; `names` are all its notebooks.

    What depends on the machine is as it was saved, or two machines would build two reports. `seen`
    are the outputs that the page already has.
    """
    import nbformat
    from nbformat.v4 import new_output

    note: Any = new_output("stream", name="stdout", text=SAVED)
    if mode() == "replay":
        saved = nbformat.read(path, as_version=4)
        for cell, before in zip(notebook.cells, saved.cells, strict=True):
            if MACHINE_TAG in cell.metadata.get("tags", ()):
                cell.outputs = [note, *before.outputs]
    return notebook_fragment(notebook, path.stem, shown=names, seen=seen)


def refresh(notebooks: Path = ROOT / "notebooks") -> list[Path]:
    """Execute every notebook in place and redraw README's figures; returns the files written.

    Raises RuntimeError unless in replay mode: committed outputs come from committed records.
    """
    if mode() != "replay":
        raise RuntimeError("refresh must run with ATTNLIB_MODE=replay, this is live mode")
    paths = notebooks_of(notebooks)
    written = [gains.write(), known_sizes.write()]  # first: notebooks show them
    for path in paths:
        write_notebook(path, execute(path))
    return [*written, *paths, *draw_readme_figures(FIGURES)]


def draw_readme_figures(folder: Path) -> list[Path]:
    """README's pictures of records, as PNG files in `folder`: what the cap of splits costs, the
    slowdown of fa3 with pages of 16, and the speedup by our plan of fa2."""
    import matplotlib

    from ...studies import fa3_decode_regression, plan_rivals, random_batches
    from ...studies.splits import split_cap

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    cost = split_cap.cost_chart(split_cap.load_all("h100"))
    frame = load_or_measure(STUDIES["fa3_decode_regression"])
    slowdown = fa3_decode_regression.slowdown_chart(
        frame[frame.case.isin(fa3_decode_regression.WIDE)],
        fa3_decode_regression.REGRESSED,
        page_size=16,
    )
    batches = random_batches.load_all(plan_rivals.STUDY.name)
    speedup = plan_rivals.speedup_chart(batches[batches.gpu == "NVIDIA H200"])
    return [
        style.save(cost, folder / "split_cap.png"),
        style.save(slowdown, folder / "fa3_decode_slowdown.png"),
        style.save(speedup, folder / "plan_speedup.png"),
    ]


def write_notebook(path: Path, notebook: NotebookNode) -> None:
    """Write an executed notebook, whole or not at all, without metadata of this machine."""
    import nbformat

    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    write_whole(path, f"{nbformat.writes(notebook)}\n".encode())


def notebooks_of(folder: Path) -> list[Path]:
    """The notebooks of a folder in their order; ValueError for one without."""
    paths = sorted(folder.glob("*.ipynb"))
    if not paths:
        raise ValueError(f"notebooks must be a folder with .ipynb files, got {folder}")
    return paths


def execute(path: Path) -> NotebookNode:
    """The notebook at `path`, executed in a kernel of its own of this Python.

    The result has no timestamps and no widgets, only what a widget shows without a kernel.
    Raises RuntimeError with the notebook's name and the error of the cell that failed.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,  # or a line that was printed in two halves is two outputs
        shutdown_kernel="immediate",
        # 40: no warning that TCP is not encrypted. The other is as in `__main__`.
        extra_arguments=["--IPKernelApp.log_level=40", FEW_COLLECTIONS],
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise RuntimeError(f"{path.name} failed: {error.ename}: {error.evalue}") from error
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = filter(_is_shown, cell.outputs)
            cell.outputs = [_without_widget(output) for output in shown]
    return notebook


def _is_shown(output: NotebookNode) -> bool:
    """Whether there is more than a widget: a progress bar without its kernel is of no use."""
    return set(output.get("data", {})) != {WIDGET, "text/plain"}


def _without_widget(output: NotebookNode) -> NotebookNode:
    """The output without its widget, and without folders in the traceback of an error."""
    output.get("data", {}).pop(WIDGET, None)
    if output.output_type == "error":  # of a cell that shows a refusal
        output.traceback = [f"{output.ename}: {output.evalue}"]
    return output
