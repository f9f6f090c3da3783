"""What the report leaves to the notebook: what goes, what stays, and that each cut is said."""

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_notebook, new_output

from attnlib.lab.cards import Card, as_html
from attnlib.lab.report import shorten
from attnlib.lab.report.fragment import notebook_fragment
from attnlib.lab.report.shorten import REST, count_words


def shown(source="f()", *, seen=None, anchor="02_b", **content):
    """A notebook of one cell as the report shows it; `content` is `html` or `plain`."""
    ((kind, text),) = content.items()
    output = new_output("display_data", {f"text/{kind}": text})
    cell = new_code_cell(source, execution_count=1, outputs=[output])
    notebook = new_notebook(cells=[cell])
    found = notebook_fragment(notebook, anchor, shown=["01_a", "02_b"], seen=seen)
    return BeautifulSoup(found.body, "html.parser")


def card(rows=1, facts=1, notes=1):
    """A card of that size, with a second table and code."""
    table = pd.DataFrame({"name": [f"row{number}" for number in range(rows)]})
    return as_html(
        Card(
            title="a title",
            notes=[f"note{number}" for number in range(notes)],
            facts=[(f"fact{number}", f"value{number}") for number in range(facts)],
            table=table,
            caption="first",
            footer="a footer",
            more=[("second", table)],
            code="again()",
        )
    )


@pytest.mark.parametrize(
    "html, words",
    [
        ("<p>two words</p><p>three</p>", 3),
        ("<td>1</td><td>2</td>", 2),
        ("<code>a<span>.</span><b>b</b>()</code>", 1),
        ("<details><summary>more</summary>folded too</details>", 3),
        ("<style>a b</style><script>c d</script>", 0),
    ],
)
def test_words_are_counted_as_a_reader_sees_them(html, words):
    assert count_words(BeautifulSoup(html, "html.parser")) == words


def test_a_card_keeps_title_footer_and_the_first_of_each_kind_and_says_that_there_is_more():
    text = shown(html=card(rows=12, facts=9, notes=4)).get_text()
    for kept in ("a title", "a footer", "note1", "value3", "fact3", "row5", REST):
        assert kept in text
    for gone in ("note2", "value4", "fact4", "row6", "second", "again()", "This view again"):
        assert gone not in text


def test_what_is_short_stays_whole_without_a_word_of_more():
    text = shown(html="<table><tbody><tr><td>1</td></tr></tbody></table>").get_text()
    assert "1" in text and REST not in text
    assert REST not in shown(plain="one\ntwo").get_text()


def test_what_an_output_folds_and_the_end_of_a_long_print_are_left_out():
    text = shown(html="<p>kept</p><details><summary>Details</summary>rest</details>").get_text()
    assert "kept" in text and "Details" not in text and REST in text
    lines = "\n".join(f"line{number}" for number in range(9))
    text = shown(plain=lines).get_text()
    assert "line7" in text and "line8" not in text and REST in text


@pytest.mark.parametrize(
    "source, stays",
    [
        ("attnlib.advise()", True),
        ("a\n\nb\nc\nd\ne", True),
        ("a\nb\nc\nd\ne\nf", False),
        ("import pandas", False),
        ("from attnlib import view", False),
    ],
)
def test_only_short_code_stays(source, stays):
    assert len(shown(source, plain="1").select("div.input")) == stays


def test_an_output_that_the_page_has_shown_is_a_link_to_the_notebook_that_showed_it():
    seen = {}
    long = " ".join(f"word{number}" for number in range(shorten.LEAST_REPEATED_WORDS))
    for anchor in ("01_a", "01_a"):
        assert "word0" in shown(seen=seen, anchor=anchor, plain=long).get_text()
    again = shown(seen=seen, plain=long).select_one(".output_area")
    assert again.get_text() == "The same output as in notebook 01."
    assert again.a["href"] == "#01_a"
    assert "word0" in shown(seen=seen, plain=f"{long} another").get_text()
    for anchor in ("01_a", "02_b"):
        assert "short" in shown(seen=seen, anchor=anchor, plain="short").get_text()
