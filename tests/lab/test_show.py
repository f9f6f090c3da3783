"""`attnlib.show`: tables without index, without NaN, with three digits."""

import numpy as np
import pandas as pd
import pytest

import attnlib


@pytest.mark.parametrize(
    "value, said",
    [
        (131.02, "131"),
        (27.26, "27.3"),
        (1842.6, "1,843"),
        (0.969, "0.97"),
        (1.0, "1.00"),
        (9.999, "10.0"),
        (0.0, "0.00"),
        (-0.5, "-0.50"),
        (np.int64(12345), "12,345"),
        (16, "16"),
        (True, "yes"),
        (float("nan"), "-"),
        (None, "-"),
        ("page 16", "page 16"),
    ],
)
def test_a_cell_in_words(value, said):
    table = attnlib.show(pd.DataFrame({"x": pd.Series([value], dtype=object)}))
    assert table.words.x.tolist() == [said]


def test_an_index_with_a_name_is_a_column_and_another_is_left_out():
    rows = pd.DataFrame(
        {"us": [1.5]},
        index=pd.Index(["fa2"], name="backend"),
    )
    assert list(attnlib.show(rows).words) == ["backend", "us"]
    assert list(attnlib.show(rows.rename_axis(None)).words) == ["us"]


def test_it_is_shown_with_caption_and_source_alone():
    table = attnlib.show(pd.DataFrame({"a": [1]}), "a row is a call", "records of an H200")
    page = table._repr_html_()
    assert "<caption>a row is a call</caption>" in page
    assert "<footer>records of an H200</footer>" in page
    assert "<h4>" not in page and "<dl>" not in page
    assert repr(table).splitlines()[0].strip() == "a"


def test_what_is_no_table_is_refused():
    with pytest.raises(TypeError, match="table must be a DataFrame, got list"):
        attnlib.show([1])
    with pytest.raises(ValueError, match="digits must be 1 to 9|digits"):
        attnlib.show(pd.DataFrame({"a": [1]}), digits=0)
