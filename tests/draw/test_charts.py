"""Shapes of figures: every row is there, in its place, under the word that its interval earns."""

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from attnlib.studies.decode_metadata.study import STUDY
from matplotlib.collections import PathCollection
from matplotlib.patches import Rectangle

from attnlib.draw import charts, style
from attnlib.draw.charts import FASTER, SLOWER, UNDECIDED
from attnlib.run import frame as rows
from attnlib.run import store
from attnlib.studies.decode_metadata import figures as metadata_figures
from attnlib.studies.decode_metadata import tables as metadata
from attnlib.studies.fa3_decode_regression import HEADLINE, REGRESSED
from attnlib.studies.measurement_trust import figures, tables

pytestmark = pytest.mark.usefixtures("published_records")
SIZES = charts.Sizes("x", "y", "p", ("batch, requests", "context, tokens"), "page size {}")


@pytest.fixture
def broken(frame):
    return rows.decode_rows(frame[frame.case.isin(HEADLINE)], release=REGRESSED)


@pytest.fixture
def words(broken):
    return tables.verdicts(broken, rows.AUTO, rows.FA2, noise=0.05)


def dots(axis):
    """Row -> (ratio, low, high, label) of every dot with its bar."""
    points = [drawn for drawn in axis.collections if isinstance(drawn, PathCollection)]
    found = {}
    for point, container in zip(points, axis.containers, strict=True):
        bars = container[2][0].get_segments()
        for (x, y), bar in zip(point.get_offsets(), bars, strict=True):
            found[int(y)] = (x, *bar[:, 0], point.get_label())
    return found


def cells(axis):
    """(across, up) of every cell -> what its fill and hatch say."""
    kinds = {look[:2]: kind for kind, look in charts.CELLS.items()}
    patches = [patch for patch in axis.patches if isinstance(patch, Rectangle)]
    middles = [(patch.get_x() + 0.5, patch.get_y() + 0.5) for patch in patches]
    looks = [(mpl.colors.to_hex(p.get_facecolor()).upper(), p.get_hatch() or "") for p in patches]
    return dict(zip(middles, (kinds[look] for look in looks), strict=True))


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
    for looks in (charts.VERDICTS, style.looks("abcdefg"), metadata_figures.LOOKS):
        assert len({look.color for look in looks.values()}) == len(looks)
        assert len({(look.marker, look.hollow) for look in looks.values()}) == len(looks)
    assert len({hatch for _, hatch, _ in charts.CELLS.values()}) == 3


def test_colours_stand_in_one_file_and_those_of_kernels_in_their_table():
    package = Path(charts.__file__).parents[1]
    colored = {p for p in package.rglob("*.py") if re.search('"#[0-9A-Fa-f]{6}"', p.read_text())}
    assert colored == {package / "draw/style.py", package / "core/backends/table.py"}


def test_a_name_without_a_look_is_drawn_all_the_same():
    (axis,) = charts.panels(["t"], (3, 3), "by hand")[1]
    table = pd.DataFrame({"x": [1, 2], "y": [1, 2], "kind": ["new", "known"]})
    charts.dots(axis, table, "x", "y", by="kind", looks=style.looks(["known", "absent"]))
    assert axis.get_legend_handles_labels()[1] == ["known", "new"]


def test_nothing_judged_and_nothing_found_are_refused(words, broken):
    with pytest.raises(ValueError, match="words must hold a case"):
        figures.ratio_chart(words[:0], broken, label="l")
    with pytest.raises(ValueError, match="found must hold a ratio"):
        charts.crossover_map(pd.DataFrame({"ratio": []}), broken, SIZES, title="t")


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [(0.8, 0.99, FASTER), (0.8, 1, UNDECIDED), (1, 1.2, UNDECIDED), (1.01, 1.2, SLOWER)]
    + [(float("nan"), float("nan"), UNDECIDED)],
)
def test_an_interval_that_holds_one_or_is_none_decides_nothing(low, high, kind):
    assert charts.cell_kind(low, high) == kind


def test_a_map_has_a_cell_per_size_and_its_line_where_faster_meets_slower(broken):
    table = [(1, 10, 0.5), (2, 10, 1.0), (4, 10, 2.0), (1, 20, 0.5), (4, 20, 2.0), (2, 20, 3.0)]
    found = pd.DataFrame(table, columns=["x", "y", "ratio"]).assign(p=7)
    found = found.assign(low=found.ratio - 0.1, high=found.ratio + 0.1)
    axis = charts.crossover_map(found, broken, SIZES, title="t").axes[0]
    below = {(0, 0): FASTER, (1, 0): UNDECIDED, (2, 0): SLOWER}
    assert cells(axis) == below | {(0, 1): FASTER, (1, 1): SLOWER, (2, 1): SLOWER}
    (line,) = axis.lines
    assert line.get_xdata().tolist() == [0.5, 0.5] and sorted(line.get_ydata()) == [0.5, 1.5]
    numbers = sorted(text.get_text() for text in axis.texts)
    assert numbers == ["0.50", "0.50", "1.00", "2.00", "2.00", "3.00"]
    assert axis.get_title(loc="left") == "page size 7"
    assert (axis.get_xlabel(), axis.get_ylabel()) == SIZES.words


@pytest.mark.parametrize("rival", [metadata.SERIAL, metadata.TODAY])
def test_the_published_map_says_what_the_table_of_crossovers_says(rival):
    frame = store.load(STUDY.name, STUDY.reference_machine)
    figure = metadata_figures.crossover_map(frame[frame.timer == "graph"], rival)
    found = rows.over(metadata.metadata_rows(frame), rival, metadata.OPS)
    panels = [axis for axis in figure.axes if axis.patches]
    assert len(panels) == found.page_size.nunique()
    short = found.assign(b=found.batch_size.map(style.short_count))
    short = short.assign(c=found.max_ctx.map(style.short_count))
    for axis, (_, part) in zip(panels, short.groupby("page_size"), strict=True):
        shown, ticks = cells(axis), (axis.get_xticklabels(), axis.get_yticklabels())
        for place, kind in shown.items():
            batch, context = (t[int(at)].get_text() for t, at in zip(ticks, place, strict=True))
            (row,) = part[(part.b == batch) & (part.c == context)].itertuples()
            assert kind == charts.cell_kind(row.low, row.high)
        assert len(shown) == len(ticks[0]) * len(ticks[1]) == 20
