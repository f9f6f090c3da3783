"""The timeline of a profiled call, of the spans that records keep."""

import pytest

from attnlib.lab.profile import load_profile
from attnlib.lab.timeline import MOST_NAMES, OTHERS, draw_timeline
from attnlib.measure.spans import Span


def kernel(name, start_us, length_us):
    return Span("kernel", name, start_us, length_us, self_us=length_us, call=0)


def bars_of(figure):
    """Row -> the start and the end of each of its bars, and those of the shaded gaps."""
    (axis,) = figure.axes
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
    rows, gaps = bars_of(draw_timeline(spans, "call", "nowhere"))
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
    rows, _ = bars_of(draw_timeline(spans, "call", "nowhere"))
    assert len(rows) == MOST_NAMES + 1
    assert [*rows][-1] == OTHERS
    assert rows[OTHERS] == [(0, 1), (10, 12)]


def test_a_recorded_profile_has_the_timeline_of_each_of_its_calls(published_records):
    profile = load_profile("metadata_op_by_op")
    for call in (0, profile.calls - 1):
        figure = profile.timeline(call)
        rows, gaps = bars_of(figure)
        spans = [span for span in profile.work if span.call == call]
        lengths = [end - start for bars in rows.values() for start, end in bars]
        assert sorted(lengths) == pytest.approx(sorted(s.length_us for s in spans), abs=0.002)
        assert len(gaps) == len([gap for gap in profile.gaps if gap.call == call])
    for wrong in (-1, profile.calls):
        with pytest.raises(ValueError, match="call must be"):
            profile.timeline(wrong)
