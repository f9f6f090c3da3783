"""Shapes of figures: every row is there, in its place, under the word that its interval earns."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection

from attnlib.draw import charts, style
from attnlib.run import frame as rows
from attnlib.studies.fa3_decode_regression import HEADLINE, REGRESSED
from attnlib.studies.measurement_trust import figures, tables

pytestmark = pytest.mark.usefixtures("published_records")


@pytest.fixture
def broken(frame):
    return rows.decode_rows(frame[frame.case.isin(HEADLINE)], release=REGRESSED)


@pytest.fixture
def words(broken):
    return tables.verdicts(broken, rows.AUTO, rows.FA2)


def dots(axis):
    """Row -> (ratio, low, high, label) of every dot with its bar."""
    points = [drawn for drawn in axis.collections if isinstance(drawn, PathCollection)]
    found = {}
    for point, container in zip(points, axis.containers, strict=True):
        bars = container[2][0].get_segments()
        for (x, y), bar in zip(point.get_offsets(), bars, strict=True):
            found[int(y)] = (x, *bar[:, 0], point.get_label())
    return found


def test_every_judged_case_is_a_dot_at_its_ratio_with_its_interval_if_it_has_one(words, broken):
    every = ["slower", "faster", "same", "ambiguous"] * 2
    words = words.assign(verdict=every[: len(words)])
    words.loc[0, ["low", "high"]] = np.nan
    found = dots(figures.ratio_chart(words, broken, label="auto / fa2").axes[0])
    assert len(found) == len(words) == len(HEADLINE)
    for place, row in enumerate(words.itertuples()):
        assert found[place][3] == row.verdict
        low, high = (row.low, row.high) if place else (row.ratio, row.ratio)
        assert found[place][:3] == pytest.approx((row.ratio, low, high))


def test_every_look_has_a_marker_of_its_own_beside_its_colour():
    assert set(charts.VERDICTS) == {"slower", "faster", "same", "ambiguous"}
    for looks in (charts.VERDICTS, style.looks("abcdefg")):
        assert len({look.color for look in looks.values()}) == len(looks)
        assert len({(look.marker, look.hollow) for look in looks.values()}) == len(looks)


def test_colours_stand_in_one_file_and_those_of_kernels_in_their_table():
    package = Path(charts.__file__).parents[1]
    colored = {p for p in package.rglob("*.py") if re.search('"#[0-9A-Fa-f]{6}"', p.read_text())}
    assert colored == {package / "draw/style.py", package / "core/backends/table.py"}


def test_a_name_without_a_look_is_drawn_all_the_same():
    (axis,) = charts.panels(["t"], (3, 3), "by hand")[1]
    table = pd.DataFrame({"x": [1, 2], "y": [1, 2], "kind": ["new", "known"]})
    charts.dots(axis, table, "x", "y", by="kind", looks=style.looks(["known", "absent"]))
    assert axis.get_legend_handles_labels()[1] == ["known", "new"]


def test_nothing_judged_is_refused(words, broken):
    with pytest.raises(ValueError, match="words must hold a case"):
        figures.ratio_chart(words[:0], broken, label="l")
