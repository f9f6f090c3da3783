"""The notebooks as readers find them: executed in order, answer first, findings after outputs."""

import ast
import re
from pathlib import Path
from statistics import median, quantiles

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks_and_their_names_are_numbered_slugs():
    assert NOTEBOOKS
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem) for path in NOTEBOOKS)


@pytest.mark.parametrize("text", [FOLDER.parent / "README.md", NOTEBOOKS[0]], ids=["README", "00"])
def test_every_other_notebook_can_be_found_from_here(text):
    found = re.findall(r"\((?:notebooks/)?(\d\d_\w+\.ipynb)\)", text.read_text())
    assert {path.name for path in NOTEBOOKS[1:]} <= {*found}


def test_every_code_cell_was_executed_in_order_and_has_an_output_that_is_no_warning(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


def test_the_first_cell_asks_a_question_and_answers_it_in_bold_with_gpu_and_date(notebook):
    question, answer = notebook.cells[0].source.split("\n\n")[:2]
    assert question.startswith("# ") and question.endswith("?")
    assert re.match(r"\*\*.*H200.*\*\*$", answer, re.S) and re.search(r"\d{4}-\d\d-\d\d", answer)


def test_every_output_is_followed_by_its_result_and_last_stands_what_is_not_shown(notebook):
    for cell, after in zip(notebook.cells, notebook.cells[1:], strict=False):
        if cell.cell_type == "code":
            assert re.match(r"\*\*(Result|Surprise)\.\*\*", after.source), cell.source
    assert "## What this does not show" in notebook.cells[-1].source


def test_code_cells_are_short_define_nothing_and_end_without_semicolons(notebook):
    sources = [cell.source for cell in code_cells(notebook)]
    lengths = [source.count("\n") + 1 - source.count("\n\n") for source in sources]
    assert median(lengths) <= 6 and quantiles(lengths, n=10)[-1] <= 12
    for source in sources:
        defined = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
        assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, defined)]
        assert not source.rstrip().endswith(";")


def test_outputs_name_no_folder_and_no_object_address(notebook):
    text = str([cell.outputs for cell in code_cells(notebook)])
    assert not re.search(r"at 0x[0-9a-f]{6,}|/(?:home|root|tmp|work)/", text)
