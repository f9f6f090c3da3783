"""A notebook as a piece of the page: nothing of it runs, nothing collides, all of it is named."""

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from attnlib.report.fragment import notebook_fragment

PNG = "iVBORw0KGgo="
FIRST = "# What is it?\n\n**It is `5`.** And so on.\n\n## Why\nSee [there](#Why)."


def shown(source, **data):
    outputs = [new_output("display_data", {name.replace("__", "/"): v for name, v in data.items()})]
    return new_code_cell(source, execution_count=1, outputs=outputs)


def fragment(*cells, first=FIRST, names=()):
    notebook = new_notebook(cells=[new_markdown_cell(first), *cells])
    return notebook_fragment(notebook, "03_slug", shown=names)


def soup(*cells, **options):
    return BeautifulSoup(fragment(*cells, **options).body, "html.parser")


def test_question_and_finding_are_taken_from_the_first_cell_and_else_its_name():
    found, silent = fragment(), fragment(first="Only words.")
    assert (found.question, found.finding) == ("What is it?", "It is <code>5</code>.")
    assert "What is it?" not in found.body and 'class="finding"' in found.body
    assert (silent.question, silent.finding) == ("03_slug", "")


@pytest.mark.parametrize(
    "evil",
    [
        "<script>steal()</script>",
        "<p onclick='steal()'></p>",
        "<iframe src='https://example.com'></iframe>",
        "<style>body { display: none }</style>",
        "<link rel='stylesheet' href='https://example.com/a.css'>",
    ],
)
def test_what_an_output_would_run_load_or_restyle_is_gone(evil):
    body = fragment(shown("show()", text__html=f"{evil}<p>kept</p>")).body
    assert "kept" in body
    for word in ("steal", "example.com", "display: none", "<script", "<style", "<iframe", "<link"):
        assert word not in body


def test_strings_in_tables_and_texts_are_escaped():
    evil = "<img src=x onerror=alert(1)>"
    table = pd.DataFrame({evil: [evil]}).to_html()
    found = soup(shown("show()", text__html=table), shown(f"'{evil}'", text__plain=evil))
    assert found.find_all("img") == []
    assert found.get_text().count(evil) == 5  # head, cell, output, and twice the source


@pytest.mark.parametrize(
    ("output", "is_open"),
    [({"text__html": "<table><td>1</td></table>"}, False), ({"text__plain": "1"}, True)],
)
def test_code_stands_under_the_line_that_made_the_output_and_a_tables_is_folded(output, is_open):
    source = "limit = rows.ceilings(frame)\ntables.ceiling_table(limit)"
    found = soup(shown(source, **output))
    (details,) = found.select("details.code")
    assert details.summary.get_text() == "code: tables.ceiling_table(limit)"
    assert source in details.get_text() and details.has_attr("open") == is_open
    assert not details.find_all(class_="output")


def test_a_notebook_has_contents_and_its_first_figure():
    found = fragment(shown("draw()", image__png=PNG), shown("again()", image__png=PNG))
    assert found.figure.startswith(f'<img src="data:image/png;base64,{PNG}" alt="Figure 1 of')
    assert found.contents == (("03_slug-Why", "Why"),)
    assert fragment(shown("f()", text__plain="1")).figure == ""


def test_a_figure_says_what_drew_it_and_where():
    source = "_ = figures.floor_chart(frame)\nplt.show()"
    (image,) = soup(shown(source, image__png=PNG)).find_all("img")
    assert image["alt"] == "Figure 1 of notebook 03, drawn by figures.floor_chart: Why"


def test_headings_go_down_one_level_and_every_id_stands_once_and_has_the_notebooks_name():
    found = soup(shown("a", text__plain="1"), shown("b", text__plain="2"))
    (heading,), (link,) = found.find_all(["h1", "h2", "h3"]), found.find_all("a")
    assert (heading.name, heading["id"], link["href"]) == ("h3", "03_slug-Why", "#03_slug-Why")
    ids = [element["id"] for element in found.find_all(id=True)]
    assert len(ids) == len(set(ids)) > 3
    assert all(name.startswith("03_slug-") for name in ids)


def test_links_lead_to_notebooks_of_the_page_to_the_net_or_nowhere():
    to = ("06_x.ipynb", "07_y.ipynb", "../README.md", "https://example.com", "javascript:alert")
    links = zip("abcdef", (*to, "06_x.ipynb#part"), strict=True)
    found = soup(first=" ".join(f"[{name}]({link})" for name, link in links), names=["06_x"])
    links = {link.get_text(): link["href"] for link in found.find_all("a")}
    assert links == {"a": "#06_x", "d": "https://example.com", "f": "#06_x"}
    assert [s.get_text() for s in found.find_all("span", title="not in this file")] == [*"bce"]


def test_what_may_be_wide_scrolls_in_a_named_box_by_key_and_heads_of_a_table_say_of_what():
    table = pd.DataFrame({"n": [1]}, index=["a"]).to_html()
    found = soup(shown("t()", text__html=table), shown("f()", image__png=PNG))
    for element in found.find_all(["table", "img", "pre"]):
        assert element.parent["class"][0] == "scroll" and element.parent["tabindex"] == "0"
        assert element.parent["role"] == "group" and element.parent["aria-label"]
    heads = [(th.get_text(), th["scope"]) for th in found.find_all("th")]
    assert heads == [("n", "col"), ("a", "row")]
