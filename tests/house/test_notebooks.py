"""The notebooks as readers see them: executed, answer first, short, and using the package."""

import re
from pathlib import Path

import nbformat
import pytest
from support.prose import prose_of

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_NOTEBOOKS = 10
MOST_WORDS = 900
MOST_WORDS_OF_ALL = 8_000
LEAST_WORDS_A_NUMBER = 15


def cells_of(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_notebooks_are_few_and_their_words_too():
    assert 0 < len(NOTEBOOKS) <= MOST_NOTEBOOKS
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem) for path in NOTEBOOKS)
    assert sum(prose_of(path).words for path in NOTEBOOKS) <= MOST_WORDS_OF_ALL


def test_a_notebook_is_short_and_its_numbers_are_few(path):
    prose = prose_of(path)
    assert prose.words <= MOST_WORDS
    assert prose.words_per_number >= LEAST_WORDS_A_NUMBER


def test_two_of_three_cells_call_a_tool_on_an_input_of_ones_own():
    counts = [prose_of(path) for path in NOTEBOOKS]
    assert 3 * sum(each.tools for each in counts) >= 2 * sum(each.cells for each in counts)


def test_a_notebook_links_the_glossary_and_answers_three_questions(path):
    assert "../GLOSSARY.md" in path.read_text()
    asked = (FOLDER / "QUESTIONS.md").read_text()
    part = re.search(rf"^## {path.stem[:2]} .*?(?=^## |\Z)", asked, re.M | re.S)
    assert part and len(re.findall(r"^\d\. .*\?$", part[0], re.M)) == 3


def test_every_notebook_is_linked_in_the_first():
    links = re.findall(r"\((\d\d_\w+\.ipynb)\)", NOTEBOOKS[0].read_text())
    assert {path.name for path in NOTEBOOKS[1:]} <= set(links)


def test_every_code_cell_was_executed_in_order_without_warnings(path):
    cells = cells_of(path, "code")
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        refused = "raises-exception" in cell.metadata.get("tags", ())
        kinds = {output.output_type for output in cell.outputs}
        assert ("error" in kinds) == refused
        assert not [o for o in cell.outputs if o.get("name") == "stderr"]


def test_the_first_cell_has_a_title_and_the_answer_in_bold_with_a_date(path):
    title, *paragraphs = cells_of(path, "markdown")[0].source.split("\n\n")
    assert re.fullmatch("# .+", title)  # a question, or the finding itself
    assert re.match(r"\*\*.*H[12]00.*\*\*", paragraphs[0], re.S)
    assert re.search(r"\d{4}-\d\d-\d\d", "\n\n".join(paragraphs))


def test_the_last_section_says_what_is_not_shown(path):
    headings = re.findall(
        r"^## .*",
        cells_of(path, "markdown")[-1].source,
        re.M,
    )
    assert headings[-1] == "## What this does not show"


def test_outputs_name_no_folder_and_no_object_address(path):
    for cell in cells_of(path, "code"):
        text = str([o for o in cell.outputs if o.output_type != "error"])
        assert not re.search(r"at 0x[0-9a-f]{6,}|/(?:home|root|tmp|work)/", text)
