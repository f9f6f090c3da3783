"""A notebook as a piece of the page: what runs is gone, names do not collide, links lead there."""

from dataclasses import replace

import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from attnlib.lab.report.fragment import notebook_fragment

PNG = "iVBORw0KGgo="
FIRST = "# What is it?\n\n**It is `5`.** And so on.\n\n## Why\nSee there."
LINKS = """\
[a](06_x.ipynb) [b](07_y.ipynb) [c](../README.md) [d](https://example.com)
[e](javascript:alert) [f](06_x.ipynb#part)"""


def cell(source, kind, content):
    output = new_output("display_data", {kind: content})
    return new_code_cell(source, execution_count=1, outputs=[output])


def fragment(*cells, first=FIRST):
    notebook = new_notebook(cells=[new_markdown_cell(first), *cells])
    return notebook_fragment(notebook, "03_slug", shown=["06_x"])


def soup(*cells, first=FIRST):
    return BeautifulSoup(fragment(*cells, first=first).body, "html.parser")


def test_question_finding_and_first_figure_are_taken_from_the_notebook():
    found = fragment(cell("draw()", "image/png", PNG), cell("again()", "image/png", PNG))
    assert found.question == "What is it?"
    assert found.finding == "It is <code>5</code>."
    assert 'class="finding"' in found.body
    assert "What is it?" not in found.body
    alt = "Why: See there."
    assert found.figure == f'<img src="data:image/png;base64,{PNG}" alt="{alt}">'
    assert found.contents == (("03_slug-Why", "Why"),)
    assert found.number == "03"
    assert found.tab == "Slug"
    assert replace(found, anchor="10_sparse_mla").tab == "Sparse MLA"


def test_an_image_without_a_source_is_no_figure():
    html = f"<img alt='none'><img src='data:image/png;base64,{PNG}'>"
    found = fragment(cell("draw()", "text/html", html))
    assert found.figure.startswith(f'<img src="data:image/png;base64,{PNG}"')
    assert fragment(cell("draw()", "text/html", "<img>")).figure == ""


def test_a_notebook_without_a_question_has_its_name_and_no_finding():
    found = fragment(first="Only words.")
    assert found.question == "03_slug"
    assert found.finding == ""
    assert found.figure == ""


@pytest.mark.parametrize(
    "evil",
    [
        "<script>steal()</script>",
        "<iframe src='https://example.com'></iframe>",
        "<style>body { display: none }</style>",
        "<link rel='stylesheet' href='https://example.com/a.css'>",
        "<!--><img src=x onerror=steal()>-->",
        "<!---><img src=x onerror=steal()>-->",
        "<![CDATA[><img src=x onerror=steal()>]]>",
        "<!x><!-- steal() -->",
    ],
)
def test_what_an_output_would_run_load_or_restyle_is_gone(evil):
    body = fragment(cell("show()", "text/html", f"{evil}<p>kept</p>")).body
    assert "kept" in body
    for word in ("steal", "example.com", "display: none", "<script", "<style", "<iframe", "<link"):
        assert word not in body


def test_headings_go_down_one_level_and_every_id_has_the_notebooks_name():
    found = soup(cell("a", "text/plain", "1"), cell("b", "text/plain", "2"))
    (heading,) = found.find_all(["h1", "h2", "h3"])
    assert heading.name == "h3"
    assert heading["id"] == "03_slug-Why"
    ids = [element["id"] for element in found.find_all(id=True)]
    assert len(ids) == len(set(ids)) > 3
    assert all(name.startswith("03_slug-") for name in ids)


def test_links_lead_to_notebooks_of_the_page_to_the_net_or_nowhere():
    found = soup(first=LINKS)
    links = {link.get_text(): link["href"] for link in found.find_all("a")}
    assert links == {"a": "#06_x", "d": "https://example.com", "f": "#06_x"}
    dead = [span.get_text() for span in found.find_all("span", title="not in this file")]
    assert dead == ["b", "c", "e"]


def test_an_output_scrolls_from_the_keyboard():
    (area,) = soup(cell("t()", "text/html", "<table><td>1</td></table>")).select(".output_area")
    assert area["tabindex"] == "0"
    assert area["role"] == "group"
