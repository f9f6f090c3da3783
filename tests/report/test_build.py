"""The report: one file, nothing loaded from elsewhere, the same bytes every time."""

import re
from unittest.mock import Mock

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from attnlib.report import build as html
from attnlib.report import page
from attnlib.studies import claims

GOOD = "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nplt.show()"
ANSWER = "**On an H200, 1 & 2 are `less` than 3.** More is said here."

pytestmark = pytest.mark.usefixtures("published_records")


def write_notebook(folder, name, *sources):
    cells = [new_markdown_cell(f"# Is {name} <b>bold</b> & right?\n\n{ANSWER}")]
    notebook = new_notebook(cells=[*cells, *(new_code_cell(source) for source in sources)])
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_notebook(folder, "01_first", GOOD, "'<script>alert(1)</script>'")
    write_notebook(folder, "02_second", 'names = "auto_resolution"')
    return folder


def build(folder, name, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNLIB_MODE", "replay")
        patch.delenv("ATTNLIB_DATA", raising=False)
        return html.build_report(folder / name, folder, **options).read_bytes()


@pytest.fixture(scope="module")
def text(folder):
    """The report of two notebooks."""
    return build(folder, "a.html").decode()


@pytest.mark.kernel
def test_two_builds_are_byte_identical_and_load_nothing(folder, text):
    assert build(folder, "b.html") == text.encode()
    assert re.findall(r"<(?:script|link|iframe)\b", text) == ["<script"]  # the search
    assert not re.findall(r'src\s*=\s*["\'](?!data:)', text)
    assert "@import" not in text and "url(http" not in text
    allowed = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-"
    assert f'content="{allowed}' in text
    assert 'src="data:image/png;base64,' in text
    assert "No description has been provided" not in text


@pytest.mark.kernel
def test_findings_come_first_and_are_escaped(text):
    assert "<script>alert(1)</script>" not in text
    finding = "<p>On an H200, 1 &amp; 2 are <code>less</code> than 3.</p>"
    assert text.count(finding) == 2
    assert text.rindex(finding) < text.index('<section id="claims"')
    assert '<a href="#02_second">Next: 02 second</a>' in text
    assert '<a href="#01_first">Previous: 01 first</a>' in text


@pytest.mark.kernel
def test_every_study_has_provenance_and_a_notebook_has_commands(text):
    shown = page.published()
    for each in shown:
        assert f"<section class='study' id='study-{each.study}'><h3>{each.study}</h3>" in text
    assert len(re.findall(r"<td>[0-9a-f]{64}</td>", text)) == len(shown)
    assert text.count("<a href='#study-auto_resolution'>") == 1 and "NVIDIA H200" in text
    assert (
        "<code>python -m attnlib measure STUDY</code>" in text
        and "<pre>python -m attnlib bisect" in text
    )


@pytest.mark.kernel
def test_claims_stand_between_findings_and_notebooks(text):
    sections = re.findall('<section id="([a-z0-9_]+)"', text)
    assert sections == ["findings", "claims", "01_first", "02_second", "provenance"]
    for claim in claims.load_claims():
        assert text.count(f"id='claim-{claim.id}'") == 1


@pytest.mark.parametrize("name", ["gone/a.html", "file/a.html", "."])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path, folder, monkeypatch, name
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(html, "execute", lambda path: pytest.fail("was run"))
    words = "a file to write" if name == "." else "in a folder to write to"
    with pytest.raises(ValueError, match=f"out must be {words}"):
        html.build_report(tmp_path / name, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    refuse = Mock(side_effect=PermissionError("Permission denied"))
    monkeypatch.setattr("attnlib.measure.files.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"out must be in a folder to write to, .*Permission"):
        html.build_report(tmp_path / "a.html", folder)


@pytest.mark.kernel
def test_a_failing_cell_names_the_notebook_and_leaves_the_old_report(tmp_path):
    write_notebook(tmp_path, "02_bad", "1 / 0")
    (out := tmp_path / "index.html").write_text("the old one")
    with pytest.raises(RuntimeError, match="02_bad.ipynb failed: ZeroDivisionError"):
        html.build_report(out, tmp_path)
    assert out.read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["02_bad.ipynb", "index.html"]
    with pytest.raises(ValueError, match="notebooks must be a folder with .ipynb files"):
        html.build_report(out, tmp_path / "gone")


def test_refresh_refuses_to_write_live_outputs(monkeypatch, tmp_path):
    monkeypatch.setattr(html, "mode", lambda: "live")
    with pytest.raises(RuntimeError, match="ATTNLIB_MODE=replay"):
        html.refresh(tmp_path)


@pytest.mark.slow
def test_readmes_figures_are_drawn_from_the_committed_records(tmp_path):
    drawn = html.draw_readme_figures(tmp_path)
    assert [path.name for path in drawn] == ["split_cap.png", "fa3_decode_slowdown.png"]
    for path in drawn:
        assert path.read_bytes() == (html.FIGURES / path.name).read_bytes()


@pytest.mark.kernel
def test_a_widget_leaves_what_it_shows_without_its_kernel(tmp_path):
    class_ = "class W:\n    def _repr_mimebundle_(self, **k):\n        return "
    bundle = f"{{{html.WIDGET!r}: {{'model_id': 'f00'}}, 'text/html': '<b>shown</b>'}}"
    path = write_notebook(tmp_path, "01_widget", f"{class_}{bundle}\nW()")
    (output,) = html.execute(path).cells[1].outputs
    assert set(output.data) == {"text/html", "text/plain"}
