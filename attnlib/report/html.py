"""The report: every notebook executed, in one HTML file that loads nothing from anywhere.

`build_report` runs the notebooks (live on a CUDA GPU, replayed elsewhere), converts each to an
HTML fragment with its figures inline, puts the table of published claims before them, and adds for
every study a provenance block: machine, versions, days, record file and sha256. Nothing in the file
depends on when or where it was built, so two builds from the same records, with the same pinned
packages, are byte-identical.
"""

from __future__ import annotations

import html
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import claims, store
from ..bisect import PREFIX
from ..studies import STUDIES
from ..study import mode, record_machine, record_name

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
STYLE = Path(__file__).with_name("page.css")
CELL_TIMEOUT_S = 1800
MACHINE_TAG = "nbval-ignore-output"
LEFT_OUT = "(depends on the machine, so it is left out of a replayed report: run the notebook)"
WIDGET = "application/vnd.jupyter.widget-view+json"
CLAIM_COLUMNS = ("claim and source", "claimed", "measured", "verdict", "why")
TITLE = "Attention backends: regressions reproduced, explained, fixed"


@dataclass(frozen=True)
class Page:
    """One notebook in the report: anchor, title and HTML body."""

    anchor: str
    title: str
    body: str


def build_report(out: Path, notebooks: Path = ROOT / "notebooks") -> Path:
    """Execute `notebooks`/*.ipynb and write the report to `out`; returns its absolute path.

    Raises RuntimeError naming the notebook and the cell that failed; `out` is then left as it was.
    """
    paths = sorted(notebooks.glob("*.ipynb"))
    if not paths:
        raise ValueError(f"notebooks must be a folder with .ipynb files, got {notebooks}")
    pages = [render_notebook(path) for path in paths]
    checked = claims.verdicts()
    provenance = [provenance_block(*study) for study in published()]
    text = render_page(pages, checked, provenance)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, out)
    return out.resolve()


def execute(path: Path) -> NotebookNode:
    """The notebook at `path`, executed in a fresh kernel of this Python, without timestamps.

    Of widgets what remains is what they show to whoever cannot show widgets.
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
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise RuntimeError(f"{path.name} failed: {error.ename}: {error.evalue}") from error
    _drop_widgets(notebook)
    return notebook


def _drop_widgets(notebook: NotebookNode) -> None:
    # Without the kernel that made it a widget is an error message.
    outputs = (o for cell in notebook.cells for o in cell.get("outputs", ()) if "data" in o)
    for output in outputs:
        output.data.pop(WIDGET, None)


def render_notebook(path: Path) -> Page:
    """Execute a notebook and convert it to a page of the report."""
    from nbconvert import HTMLExporter

    notebook = execute(path)
    if mode() == "replay":
        _leave_out_machine(notebook)
    title = notebook.cells[0].source.splitlines()[0].lstrip("# ")
    exporter = HTMLExporter(template_name="basic")
    body, _ = exporter.from_notebook_node(notebook)
    return Page(path.stem, title, _describe_images(body, title))


def _leave_out_machine(notebook: NotebookNode) -> None:
    """Replace outputs that depend on the machine, or two machines would build two reports."""
    from nbformat.v4 import output_from_msg

    content = {"name": "stdout", "text": LEFT_OUT}
    note = output_from_msg({"header": {"msg_type": "stream"}, "content": content})
    for cell in notebook.cells:
        if MACHINE_TAG in cell.metadata.get("tags", ()):
            cell.outputs = [note]


def render_page(
    pages: list[Page], checked: list[claims.CheckedClaim], provenance: list[str]
) -> str:
    """The whole HTML document."""
    contents = "\n".join(
        f'<li><a href="#{page.anchor}">{html.escape(page.title)}</a></li>' for page in pages
    )
    sections = "\n".join(
        f'<section id="{page.anchor}" class="notebook">{page.body}</section>' for page in pages
    )
    return PAGE.format(
        title=html.escape(TITLE),
        style=f"{STYLE.read_text()}\n{_highlighting()}",
        mode=html.escape(mode()),
        contents=contents,
        claims=claims_table(checked),
        tally=html.escape(claims_tally(checked)),
        sections=sections,
        provenance="\n".join(provenance),
    )


def published() -> list[tuple[str, str, str]]:
    """(study, machine, question) of all whose records the notebooks show, searches included."""
    shown = []
    for study in STUDIES.values():
        shown.append((study.name, record_machine(study), study.question))
        if study.bisect_machine:
            name = PREFIX + study.name
            machine = record_machine(replace(study, reference_machine=study.bisect_machine))
            shown.append((name, machine, "Which release changed the speed?"))
    return shown


def claims_tally(checked: list[claims.CheckedClaim]) -> str:
    """How many claims got which verdict, most first: `40 open, 10 confirmed, ...`."""
    counted = Counter(claim.finding.verdict for claim in checked).most_common()
    return ", ".join(f"{count} {verdict}" for verdict, count in counted)


def claims_table(checked: list[claims.CheckedClaim]) -> str:
    """HTML table of claims and verdicts, a row each; every value escaped."""
    head = "".join(f"<th scope='col'>{name}</th>" for name in CLAIM_COLUMNS)
    rows = "\n".join(_claim_row(claim) for claim in checked)
    return f"<table class='claims'>\n<tr>{head}</tr>\n{rows}\n</table>"


def _claim_row(checked: claims.CheckedClaim) -> str:
    claim, finding = checked.claim, checked.finding
    quote, source, claimed, measured, verdict, reason = (
        html.escape(text)
        for text in (
            claim.quote,
            claim.source.label,
            claim.claimed,
            finding.measured or "-",
            finding.verdict,
            finding.reason,
        )
    )
    return (
        f"<tr id='claim-{html.escape(claim.id)}'><td><q>{quote}</q><br>{source}</td>"
        f"<td>{claimed}</td><td>{measured}</td>"
        f"<td><b class='{verdict.replace(' ', '-')}'>{verdict}</b></td><td>{reason}</td></tr>"
    )


def provenance_block(study: str, machine: str, question: str) -> str:
    """HTML table of where a study's numbers come from; every value escaped."""
    known = STUDIES.get(study)
    found = store.provenance(record_name(known) if known else study, machine)
    rows = {
        "question": question,
        "records": f"{found['records']} in {found['file']}",
        "sha256": found["sha256"],
        "measured": found["measured"],
        "machine": _pairs(found["machine"]),
        "versions": _pairs({name: ", ".join(seen) for name, seen in found["versions"].items()}),
        "repeat with": "; ".join(found["commands"]),
    }
    body = "\n".join(
        f"<tr><th scope='row'>{name}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<h3>{html.escape(study)}</h3>\n<table class='provenance'>\n{body}\n</table>"


def _pairs(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _describe_images(body: str, title: str) -> str:
    # nbconvert says "No description has been provided for this image" to screen readers.
    alt = html.escape(f"Figure of the notebook: {title}", quote=True)
    return re.sub(r'alt="No description has been provided for this image"', f'alt="{alt}"', body)


def _highlighting() -> str:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(style="default").get_style_defs(".highlight")


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>Executed notebooks and the records behind them. Mode of this build: <b>{mode}</b>.</p>
<nav aria-label="Contents"><ol>
{contents}
<li><a href="#claims">Published claims, checked: {tally}</a></li>
<li><a href="#provenance">Provenance of every study</a></li>
</ol></nav>
</header>
<main>
{sections}
<section id="claims"><h2>Published claims, checked</h2>
<p>What pull requests say, and what the records say of it: {tally}.</p>
{claims}
</section>
<section id="provenance"><h2>Provenance</h2>
<p>Every figure and table above is computed from these files.</p>
{provenance}
</section>
</main>
</body>
</html>
"""
