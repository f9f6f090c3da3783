"""The numbers in the prose of the explorer's notebook are those of the committed records."""

from pathlib import Path

import nbformat
import pytest

from attnlib import view

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
STUDY = "fa3_decode_regression"
FA2, FA3, AUTO = "flashinfer-fa2", "flashinfer-fa3", "flashinfer-auto"

pytestmark = pytest.mark.usefixtures("published_records")


@pytest.fixture(scope="module")
def prose():
    cells = nbformat.read(FOLDER / "10_explore_the_records.ipynb", as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


@pytest.fixture
def seen():
    return view("Llama-3.1-8B", release="0.6.3", batch=16, kv_len=8192, records=STUDY)


def test_notebook_10_answers_with_the_price_of_auto_and_what_the_fixed_release_takes(prose, seen):
    times = seen.times.set_index("backend")
    ratios = seen.comparison.set_index("backend").ratio
    answer = f"in {ratios[AUTO]:.2f} times the time that fa2 takes: {times.us[AUTO]:.0f} us where "
    assert f"{answer}the memory needs {seen.floor_us:.0f} us" in prose
    assert set(seen.comparison.verdict) == {"slower"} and times.ran[AUTO] == "fa3"
    rule = seen.rules.set_index("library").loc["flashinfer==0.6.4"]
    assert rule.chooses == FA2
    assert f"0.6.4 takes fa2 again, which takes {rule.us:.0f} us there" in prose


def test_notebook_10_gives_the_ratio_of_a_short_request(prose):
    small = view("Llama-3.1-70B at TP 8", release="0.6.3", batch=1, kv_len=1024, records=STUDY)
    ratio = small.comparison.set_index("backend").ratio[FA3]
    assert f"fa3 takes {ratio:.2f} times the time of fa2" in prose
