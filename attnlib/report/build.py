"""The report: every notebook executed, in one HTML file that loads nothing from anywhere.

Notebooks run live on a CUDA GPU and replay elsewhere. Nothing in the file depends on when or where
it was built: two builds from the same records, with the same pinned packages, are byte-identical.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..draw import style
from ..measure.files import require_writable, write_whole
from ..run import store
from ..run.study import mode, record_machine
from ..studies import STUDIES, claims
from ..studies.fa3_decode_regression.figures import slowdown_heatmap
from ..studies.fa3_decode_regression.study import REGRESSED, WIDE
from .fragment import notebook_fragment
from .page import Page, render_page
from .provenance import published, studies_of

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
CELL_TIMEOUT_S = 1800
SIDE_BY_SIDE = 2
"""Notebooks that replay at once: a kernel each, and they take no GPU."""
README_FIGURE = ROOT / "data" / "figures" / "fa3_decode_slowdown.png"
KEPT_METADATA = ("kernelspec",)
MACHINE_TAG = "nbval-ignore-output"
LEFT_OUT = "(depends on the machine, so it is left out of a replayed report: run the notebook)"
AFRESH = "get_ipython().reset(new_session=True); import pandas; pandas.reset_option('^display')"
"""Before each notebook of a kernel that others share: pandas' options are all that they set."""
WIDGET = "application/vnd.jupyter.widget-view+json"


def build_report(
    out: Path, notebooks: Path = ROOT / "notebooks", *, only: Sequence[str] = ()
) -> Path:
    """Execute `notebooks`/*.ipynb and write the report to `out`; returns its absolute path.

    Of those numbered `only` it has the same, with the claims that their studies judge. ValueError,
    before anything is run, for a number that no notebook has and an `out` that cannot be written;
    RuntimeError for a cell that failed. `out` is then left as it was, and nothing beside it.
    """
    paths = choose_notebooks(notebooks, only)
    require_writable(out)
    names = [path.stem for path in paths]
    with _kernels() as kernel:
        jobs: list[Callable[[], Any]] = [
            claims.verdicts,
            *(partial(render_notebook, path, names, kernel) for path in paths),
        ]
        checked, *pages = side_by_side(jobs)
    part = f"notebooks {', '.join(page.number for page in pages)}" if only else ""
    studies = published()
    if only:
        studies = [study for study in studies if any(study in page.shown for page in pages)]
        names_of = {study.study for study in studies}
        checked = [each for each in checked if names_of & {*claims.studies_of(each.claim)}]
    told = claims.verdicts(claims.PUBLISHED) if mode() == "live" else checked
    other = {each.claim.id: each.finding.verdict for each in told}
    write_whole(out, render_page(pages, checked, studies, part=part, published=other).encode())
    return out.resolve()


def refresh(notebooks: Path = ROOT / "notebooks") -> list[Path]:
    """Execute every notebook in place and redraw the figure; returns the files written.

    RuntimeError unless in replay mode: committed outputs come from committed records.
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
    wide = frame[frame.case.isin(WIDE)]
    style.save(slowdown_heatmap(wide, REGRESSED, page_size=16), path)


def write_notebook(path: Path, notebook: NotebookNode) -> None:
    """Write an executed notebook, whole or not at all, without the metadata of this machine."""
    import nbformat

    notebook.metadata = {name: notebook.metadata[name] for name in KEPT_METADATA}
    write_whole(path, f"{nbformat.writes(notebook)}\n".encode())


def choose_notebooks(folder: Path, only: Sequence[str] = ()) -> list[Path]:
    """The notebooks of a folder in their order, or those of these numbers (`2` is `02`).

    ValueError for a folder without any, and for a number that none has: it lists those there are.
    """
    paths = sorted(folder.glob("*.ipynb"))
    if not paths:
        raise ValueError(f"notebooks must be a folder with .ipynb files, got {folder}")
    numbers = {path.stem.split("_")[0]: path for path in paths}
    wanted = [number.strip().zfill(2) for number in only]
    for number, given in zip(wanted, only, strict=True):
        if number not in numbers or not given.strip():
            raise ValueError(f"only must be of {', '.join(numbers)}, got {given!r}")
    return [path for number, path in numbers.items() if number in wanted] if only else paths


def execute(path: Path, notebook: NotebookNode | None = None, kernel: Any = None) -> NotebookNode:
    """The notebook at `path`, or a new one for it, executed in a fresh kernel of this Python.

    Given the manager of a `kernel`, in that one, started if need be: with no name of a notebook
    before, and cells from 1 on.
    It has no timestamps and no widgets, only what these show to who cannot show widgets.
    RuntimeError names the notebook and the error of the cell that failed.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = notebook or nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        shutdown_kernel="immediate",
        resources={"metadata": {"path": str(path.parent)}},
    )
    if kernel:
        client.on_notebook_start = lambda **_: client.kc.execute(AFRESH, silent=True)
    try:
        client.execute()
    except CellExecutionError as error:
        raise RuntimeError(f"{path.name} failed: {error.ename}: {error.evalue}") from error
    finally:
        if kernel and client.kc:
            client.kc.stop_channels()
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        # Without the kernel that made it a widget is an error message.
        output.get("data", {}).pop(WIDGET, None)
    return notebook


def side_by_side(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the jobs return: in replay so many run at once, on a GPU one after the other."""
    with ThreadPoolExecutor(SIDE_BY_SIDE if mode() == "replay" else 1) as pool:
        running = [pool.submit(job) for job in jobs]
        try:
            return [job.result() for job in running]
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _kernels() -> Iterator[Callable[[], Any]]:
    """What gives each thread that asks a manager of a kernel, which ends with this; on a GPU None.

    Kernels that start, import pandas and read records were two fifths of a report. That a notebook
    stands by itself is not checked here: nbval gives each a kernel of its own.
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_core.utils import run_sync

    own, started = threading.local(), []

    def kernel() -> Any:
        if not hasattr(own, "kernel") and mode() == "replay":
            own.kernel = AsyncKernelManager(kernel_name="python3")
            started.append(own.kernel)
        return getattr(own, "kernel", None)

    try:
        yield kernel
    finally:
        for manager in started:
            run_sync(manager.shutdown_kernel)(now=True)


def render_notebook(
    path: Path, names: Sequence[str] = (), kernel: Callable[[], Any] = lambda: None
) -> Page:
    """Execute a notebook and convert it to a part of the page; `names` are all its notebooks."""
    notebook = execute(path, kernel=kernel())
    if mode() == "replay":
        _leave_out_machine(notebook)
    named = studies_of(cell.source for cell in notebook.cells if cell.cell_type == "code")
    shown = tuple(study for study in published() if study.study in named)
    return Page(path.stem, notebook_fragment(notebook, path.stem, shown=names), shown)


def _leave_out_machine(notebook: NotebookNode) -> None:
    """Replace outputs that depend on the machine, or two machines would build two reports."""
    from nbformat.v4 import new_output

    note = new_output("stream", name="stdout", text=LEFT_OUT)
    for cell in notebook.cells:
        if MACHINE_TAG in cell.metadata.get("tags", ()):
            cell.outputs = [note]
