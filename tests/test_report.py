"""The report: one file, nothing loaded from elsewhere, the same bytes every time."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from attnlib import claims
from attnlib.report import html, refresh

GOOD = "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nplt.show()"


pytestmark = pytest.mark.usefixtures("published_records")


def write_notebook(folder, name, *sources):
    cells = [new_markdown_cell(f"# Is {name} <b>bold</b> & right?")]
    notebook = new_notebook(cells=[*cells, *(new_code_cell(source) for source in sources)])
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_notebook(folder, "01_first", GOOD, "'<script>alert(1)</script>'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNLIB_MODE", "replay")
        first, second = (
            html.build_report(folder / name, folder).read_bytes() for name in ("a.html", "b.html")
        )
    return first, second


def test_two_builds_from_the_same_records_are_the_same_bytes(built):
    assert built[0] == built[1]


def test_the_report_loads_nothing_from_anywhere(built):
    text = built[0].decode()
    assert not re.findall(r"<(?:script|link|iframe)\b[^>]*(?:src|href)\s*=", text)
    assert not re.findall(r'src\s*=\s*["\'](?!data:)', text)
    assert "@import" not in text and "url(http" not in text


def test_figures_stand_in_the_file_itself(built):
    assert b'src="data:image/png;base64,' in built[0]
    assert b"No description has been provided" not in built[0]


def test_what_data_says_is_escaped(built):
    text = built[0].decode()
    assert "<script>alert(1)</script>" not in text
    assert "Is 01_first &lt;b&gt;bold&lt;/b&gt; &amp; right?</a>" in text


def test_every_study_has_its_provenance(built):
    text = built[0].decode()
    names = [*html.STUDIES, "bisect_fa3_decode_regression"]
    for name in names:
        assert f"<h3>{name}</h3>" in text
    assert len(re.findall(r"<td>[0-9a-f]{64}</td>", text)) == len(names)
    assert "NVIDIA H200" in text


def test_every_claim_stands_between_the_notebooks_and_the_provenance(built):
    text = built[0].decode()
    marks = ('id="01_first"', '<section id="claims">', 'id="provenance"')
    place = [text.index(mark) for mark in marks]
    assert place == sorted(place)
    for claim in claims.load_claims():
        assert text.count(f"<tr id='claim-{claim.id}'>") == 1


def test_a_failing_cell_names_the_notebook_and_leaves_the_old_report(tmp_path):
    write_notebook(tmp_path, "02_bad", "1 / 0")
    out = tmp_path / "index.html"
    out.write_text("the old one")
    with pytest.raises(RuntimeError, match="02_bad.ipynb failed: ZeroDivisionError"):
        html.build_report(out, tmp_path)
    assert out.read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["02_bad.ipynb", "index.html"]


def test_a_folder_without_notebooks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="notebooks must be a folder with .ipynb files"):
        html.build_report(tmp_path / "index.html", tmp_path)


def test_refresh_refuses_to_write_live_outputs(monkeypatch, tmp_path):
    monkeypatch.setattr(refresh, "mode", lambda: "live")
    with pytest.raises(RuntimeError, match="ATTNLIB_MODE=replay"):
        refresh.refresh(tmp_path)


def test_the_readme_figure_is_drawn_from_the_committed_records(tmp_path):
    refresh.draw_readme_figure(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes() == refresh.README_FIGURE.read_bytes()


def test_a_widget_leaves_what_it_shows_without_its_kernel(tmp_path):
    class_ = "class W:\n    def _repr_mimebundle_(self, **k):\n        return "
    bundle = f"{{{html.WIDGET!r}: {{'model_id': 'f00'}}, 'text/html': '<b>shown</b>'}}"
    path = write_notebook(tmp_path, "01_widget", f"{class_}{bundle}\nW()")
    (output,) = html.execute(path).cells[1].outputs
    assert set(output.data) == {"text/html", "text/plain"}
