"""The timeline of a profiled call, of the spans that records keep."""

from dataclasses import replace

import pytest

from attnlib.lab.profile import load_profile
from attnlib.lab.timeline import MOST_NAMES, OTHERS, Timeline, draw_timelines
from attnlib.measure.spans import Span


def kernel(name, start_us, length_us):
    return Span("kernel", name, start_us, length_us, self_us=length_us, call=0)


def drawn(*calls):
    """The figure of the spans of each call."""
    timelines = [Timeline(f"call {number}", spans) for number, spans in enumerate(calls)]
    return draw_timelines(timelines, "nowhere")


def bars_of(axis):
    """Row -> the start and the end of each of its bars, and those of the shaded gaps."""
    labels = [label.get_text() for label in axis.get_yticklabels()]
    rows = {}
    for label, bars in zip(labels, axis.collections, strict=True):
        spans = [path.get_extents() for path in bars.get_paths()]
        rows[label] = [(round(span.x0, 3), round(span.x1, 3)) for span in spans]
    gaps = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axis.patches]
    return rows, gaps


def test_a_row_is_a_kernel_a_bar_a_launch_and_gaps_are_shaded():
    spans = [
        kernel("b", 100, 10),
        kernel("a", 115, 5),
        kernel("b", 120, 30),
    ]
    rows, gaps = bars_of(*drawn(spans).axes)
    assert rows == {
        "b": [
            (0, 10),
            (20, 50),
        ],
        "a": [(15, 20)],
    }
    assert gaps == [(10, 15)]


def test_the_kernels_of_least_time_share_the_last_row():
    spans = [kernel(f"k{number}", 10 * number, 1 + number) for number in range(MOST_NAMES + 2)]
    rows, _ = bars_of(*drawn(spans).axes)
    assert len(rows) == MOST_NAMES + 1
    assert [*rows][-1] == OTHERS
    assert rows[OTHERS] == [(0, 1), (10, 12)]


def test_a_recorded_profile_has_the_timeline_of_each_of_its_calls(published_records):
    profile = load_profile("metadata_op_by_op")
    for call in (0, profile.calls - 1):
        figure = profile.timeline(call)
        rows, gaps = bars_of(*figure.axes)
        spans = [span for span in profile.work if span.call == call]
        lengths = [end - start for bars in rows.values() for start, end in bars]
        assert sorted(lengths) == pytest.approx(sorted(s.length_us for s in spans), abs=0.002)
        assert len(gaps) == len([gap for gap in profile.gaps if gap.call == call])
    for wrong in (-1, profile.calls):
        with pytest.raises(ValueError, match="call must be"):
            profile.timeline(wrong)


def test_two_calls_stand_under_each_other_over_one_time_axis():
    above = [kernel("a", 100, 10)]
    below = [kernel("b", 7, 30), kernel("c", 40, 5)]
    figure = drawn(above, below)
    first, second = figure.axes
    assert bars_of(first)[0] == {"a": [(0, 10)]}
    assert bars_of(second)[0] == {"b": [(0, 30)], "c": [(33, 38)]}
    assert first.get_xlim() == second.get_xlim()
    assert first.get_position().y0 > second.get_position().y1
    assert (first.get_xlabel(), second.get_xlabel()[:8]) == ("", "us since")


def test_a_profile_stands_above_a_recorded_one_and_both_say_where_they_are_from(published_records):
    fused, ops = load_profile("metadata_fused"), load_profile("metadata_op_by_op")
    figure = fused.timeline(beside=ops)
    rows = [bars_of(axis)[0] for axis in figure.axes]
    assert len(rows[0]) < len(rows[1])
    words = [text.get_text() for text in figure.texts]
    assert f"above: {fused.origin}\nbelow: {ops.origin}" in words
    with pytest.raises(TypeError, match="beside must be a Profile, got str"):
        fused.timeline(beside="metadata_op_by_op")
    on_cpu = replace(ops, device="cpu")
    with pytest.raises(ValueError, match="beside must be of kernels, got CPU operators"):
        fused.timeline(beside=on_cpu)
