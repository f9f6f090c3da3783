"""Figures: every row is a dot in its place, the source is named, and a file is the same twice."""

import numpy as np
import pandas as pd
import pytest

import attnlib
from attnlib.run.figures import charts, style


def test_every_row_is_a_dot_with_its_interval_if_it_has_one_and_an_unknown_name_comes_last():
    rows = pd.DataFrame(
        {
            "ratio": [1.2, 0.9, 1.0],
            "low": [1.1, np.nan, 0.99],
            "high": [1.3, np.nan, 1.01],
            "place": [0, 1, 2],
            "verdict": ["slower", "new word", "same"],
        }
    )
    figure, (axis,) = charts.panels(["t"], (3, 3), "by hand")
    looks = style.looks(("slower", "same"))
    charts.dots(axis, rows, "ratio", "place", by="verdict", looks=looks, interval="x")
    assert axis.get_legend_handles_labels()[1] == ["slower", "same", "new word"]
    spans = {}
    for container in axis.containers:
        (bar,) = container[2][0].get_segments()
        spans[int(bar[0][1])] = [x for x, _ in bar]
    assert spans[0] == pytest.approx([1.1, 1.3])
    assert spans[1] == pytest.approx([0.9, 0.9])
    assert figure.texts[-1].get_text() == "by hand"


def test_every_look_has_a_marker_of_its_own_beside_its_colour():
    looks = style.looks("abcdefg")
    assert len({look.color for look in looks.values()}) == len(looks)
    assert len({look.marker for look in looks.values()}) == len(looks)


@pytest.mark.parametrize(
    "keys, offsets",
    [
        (["b", "a", "b", "c"], [0.0, -0.2, 0.0, 0.2]),
        (["a", "a"], [0.0, 0.0]),
        ([], []),
    ],
)
def test_dots_that_would_cover_others_are_spread_about_the_middle(keys, offsets):
    spread = charts.spread(pd.Series(keys, dtype=object), width=0.4)
    assert spread.tolist() == pytest.approx(offsets)


def test_a_saved_figure_is_the_same_twice_and_another_suffix_is_refused(tmp_path):
    figure, (axis,) = charts.panels(
        titles=["t"],
        size=(3, 3),
        source="by hand",
        words=("x", "y"),
    )
    axis.plot([1, 2], [1, 2])
    first = attnlib.save(figure, tmp_path / "a.png").read_bytes()
    assert attnlib.save(figure, tmp_path / "b.png").read_bytes() == first
    with pytest.raises(ValueError, match=r"path must end in .png or .svg, got 'a.pdf'"):
        attnlib.save(figure, tmp_path / "a.pdf")
