"""The timeline: which lanes there are, whatever else the trace holds."""

import pytest

from attnlib.draw.timeline import draw_timeline
from attnlib.measure.spans import Span

CALL = Span("call", "attnlib call", "host", 0.0, 40.0, 40.0, call=0)
LAUNCH = Span("launch", "cudaLaunchKernel", "host", 5.0, 4.0, 4.0, call=0)
OPERATOR = Span("operator", "aten::add_", "main thread", 4.0, 8.0, 8.0, call=0)
KERNEL = Span("kernel", "add", "stream 7", 12.0, 10.0, 10.0, call=0)
COPY = Span("memcpy", "Memcpy DtoH", "stream 9", 25.0, 5.0, 5.0, call=0)


def lanes(*spans: Span) -> list[str]:
    figure = draw_timeline(spans, title="a step", footer="by hand")
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_gpu_work_has_a_lane_per_stream_and_operators_are_the_work_only_without_it():
    assert lanes(CALL, OPERATOR, LAUNCH, KERNEL, COPY) == ["host", "stream 7", "stream 9"]
    assert lanes(CALL, OPERATOR) == ["host", "main thread"]
    with pytest.raises(ValueError, match="must hold a kernel or an operator"):
        lanes(CALL)
