"""The report: one file, nothing loaded from elsewhere, the same bytes every time."""

import re
from unittest.mock import Mock

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from attnlib.lab import claims
from attnlib.lab.report import build, page

FIGURE = "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nplt.show()"
ANSWER = "**On an H200, 1 & 2 are `less` than 3.** More is said here."
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
WIDGET_CELL = f"""\
class W:
    def _repr_mimebundle_(self, **options):
        return {{{build.WIDGET!r}: {{'model_id': 'f00'}}, 'text/html': '<b>shown</b>'}}
W()"""

pytestmark = pytest.mark.usefixtures("published_records")


def write_notebook(folder, name, *sources):
    cells = [new_markdown_cell(f"# Is {name} <b>bold</b> & right?\n\n{ANSWER}")]
    cells += [new_code_cell(source) for source in sources]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_notebook(folder, "01_first", FIGURE, "'<script>alert(1)</script>'")
    write_notebook(folder, "02_second", "1")
    return folder


def built(folder, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNLIB_MODE", "replay")
        patch.delenv("ATTNLIB_DATA", raising=False)
        return build.build_report(folder / name, folder).read_text()


@pytest.fixture(scope="module")
def text(folder):
    """The report of two notebooks."""
    return built(folder, "a.html")


@pytest.mark.kernel
def test_two_builds_are_identical_and_run_and_load_nothing(folder, text):
    assert built(folder, "b.html") == text
    assert f'content="{POLICY}"' in text
    assert not re.findall(r"<(?:script|link|iframe)\b", text)
    assert not re.findall(r'src\s*=\s*["\'](?!data:)', text)
    assert "@import" not in text
    assert "url(http" not in text
    assert 'src="data:image/png;base64,' in text


@pytest.mark.kernel
def test_findings_come_first_then_notebooks_known_problems_claims_and_provenance(text):
    sections = re.findall('<section id="([a-z0-9_]+)"', text)
    named = ["01_first", "02_second"]
    assert sections == ["findings", *named, "known", "claims", "provenance"]
    finding = "<p>On an H200, 1 &amp; 2 are <code>less</code> than 3.</p>"
    assert text.count(finding) == 2
    assert text.rindex(finding) < text.index('<section id="claims"')
    for claim in claims.load_claims():
        assert text.count(f'id="claim-{claim.id}"') == 1


@pytest.mark.kernel
def test_every_study_has_provenance(text):
    shown = page.published()
    for study, _ in shown:
        assert text.count(f'<tr id="study-{study}">') == 1
    assert len(re.findall("<td>[0-9a-f]{64}</td>", text)) == len(shown)


@pytest.mark.parametrize("name", ["gone/a.html", "file/a.html", "."])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path, folder, monkeypatch, name
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(build, "execute", lambda path: pytest.fail("was run"))
    words = "a file to write" if name == "." else "in a folder to write to"
    with pytest.raises(ValueError, match=f"out must be {words}"):
        build.build_report(tmp_path / name, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    refuse = Mock(side_effect=PermissionError("Permission denied"))
    monkeypatch.setattr("attnlib.measure.files.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"out must be in a folder to write to, .*Permission"):
        build.build_report(tmp_path / "a.html", folder)


@pytest.mark.kernel
def test_a_failing_cell_names_the_notebook_and_leaves_the_old_report(tmp_path):
    write_notebook(tmp_path, "02_bad", "1 / 0")
    out = tmp_path / "index.html"
    out.write_text("the old one")
    with pytest.raises(RuntimeError, match="02_bad.ipynb failed: ZeroDivisionError"):
        build.build_report(out, tmp_path)
    assert out.read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["02_bad.ipynb", "index.html"]
    with pytest.raises(ValueError, match="notebooks must be a folder with .ipynb files"):
        build.build_report(out, tmp_path / "gone")


def test_refresh_refuses_to_write_live_outputs(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "mode", lambda: "live")
    with pytest.raises(RuntimeError, match="ATTNLIB_MODE=replay"):
        build.refresh(tmp_path)


@pytest.mark.slow
def test_readmes_figures_are_drawn_from_the_committed_records(tmp_path):
    drawn = build.draw_readme_figures(tmp_path)
    names = ["split_cap.png", "fa3_decode_slowdown.png", "plan_speedup.png"]
    assert [path.name for path in drawn] == names
    for path in drawn:
        assert path.read_bytes() == (build.FIGURES / path.name).read_bytes()


@pytest.mark.kernel
def test_a_widget_leaves_what_it_shows_without_its_kernel(tmp_path):
    path = write_notebook(tmp_path, "01_widget", WIDGET_CELL)
    (output,) = build.execute(path).cells[1].outputs
    assert set(output.data) == {"text/html", "text/plain"}
