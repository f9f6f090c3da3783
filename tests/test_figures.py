"""Figures and tables of the published study: the data beside each picture, and stable bytes."""

from __future__ import annotations

import io

import matplotlib as mpl
import pytest

from attnlib.report import figures, rows, tables
from attnlib.studies import FIXED, HEADLINE, REGRESSED, VARIANTS, WIDE

mpl.use("agg")


pytestmark = pytest.mark.usefixtures("published_records")


def png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, metadata={"Software": None})
    return buffer.getvalue()


def test_the_heat_map_shows_every_case_of_the_grid_with_its_number(frame):
    wide = rows.of_cases(frame, WIDE)
    figure = figures.slowdown_heatmap(wide, REGRESSED, page_size=16)
    grid = tables.slowdown_grid(wide, REGRESSED)
    shown = sorted(float(text.get_text()) for axis in figure.axes for text in axis.texts)
    assert shown == sorted(round(r, 1) for r in grid[grid.page_size == 16].ratio)


def test_two_drawings_of_the_same_records_are_the_same_bytes(frame, limit):
    first, second = (png(figures.prediction_chart(frame, limit, REGRESSED)) for _ in range(2))
    assert first == second


def test_the_release_chart_has_a_dot_for_each_case_release_and_wrapper(frame):
    top = rows.of_cases(frame, HEADLINE)
    figure = figures.release_chart(top)
    dots = sum(len(c[0].get_xdata()) for axis in figure.axes for c in axis.containers)
    assert dots == len(HEADLINE) * 4 * 2


def test_the_floor_chart_labels_the_three_kernel_families(frame, limit):
    figure = figures.floor_chart(rows.of_cases(frame, WIDE), limit, REGRESSED)
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["cuda-cores", "fa2", "fa3"]


def test_every_figure_names_study_gpu_and_day_in_its_footer(frame, limit):
    figure = figures.floor_chart(frame, limit, REGRESSED)
    (footer,) = [text.get_text() for text in figure.texts]
    assert footer.startswith("fa3_decode_regression: ") and "NVIDIA H200, 2026-" in footer


def test_the_headline_table_holds_every_headline_case_once(frame, limit):
    table = tables.headline(rows.of_cases(frame, HEADLINE), limit, REGRESSED)
    assert len(table) == len(HEADLINE)
    assert (table.floor > 0).all() and (table[["fa2", "fa3", "auto"]] > 0).all(axis=None)


def test_the_floor_is_bytes_over_the_measured_copy_rate(frame, limit):
    table = tables.headline(rows.of_cases(frame, HEADLINE), limit, REGRESSED)
    row = table[(table.heads == "32/8") & (table.batch_size == 128)].iloc[0]
    kv_bytes = 2 * 2 * 128 * 8 * 128 * 4096
    assert row.floor == pytest.approx(kv_bytes / (limit.copy_gbps * 1e3), rel=0.01)


def test_live_headline_records_alone_fill_every_table(frame, limit):
    top = rows.of_cases(frame[frame.timer == "graph"], HEADLINE)
    assert tables.launch_modes(top, REGRESSED)["fa2 eager"].isna().all()
    assert rows.of_cases(top, VARIANTS).empty
    assert tables.variants(rows.of_cases(top, VARIANTS), FIXED).empty


def test_a_rule_table_has_a_column_for_each_gpu_generation():
    table = tables.rule_table(["0.6.3"], HEADLINE[0].spec)
    assert table.iloc[0][["sm8x", "sm9x", "sm10x", "sm12x"]].tolist() == [
        "fa2",
        "fa3",
        "fa2",
        "fa2",
    ]
