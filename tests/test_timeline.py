"""The timeline: which lanes there are, whatever else the trace holds."""

from __future__ import annotations

import pytest

from attnlib.measure.spans import Span
from attnlib.report.timeline import draw_timeline

CALL = Span("call", "attnlib call", "host", 0.0, 40.0, 40.0, call=0)
LAUNCH = Span("launch", "cudaLaunchKernel", "host", 5.0, 4.0, 4.0, call=0)
OPERATOR = Span("operator", "aten::add_", "main thread", 4.0, 8.0, 8.0, call=0)
KERNEL = Span("kernel", "add", "stream 7", 12.0, 10.0, 10.0, call=0)
COPY = Span("memcpy", "Memcpy DtoH", "stream 9", 25.0, 5.0, 5.0, call=0)


def lanes(*spans: Span) -> list[str]:
    figure = draw_timeline(spans, title="a step", footer="by hand")
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_gpu_work_has_a_lane_a_stream_and_its_operators_none() -> None:
    assert lanes(CALL, OPERATOR, LAUNCH, KERNEL, COPY) == ["host", "stream 7", "stream 9"]


def test_without_gpu_work_the_operators_are_the_work() -> None:
    assert lanes(CALL, OPERATOR) == ["host", "main thread"]


def test_a_call_that_ran_nothing_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="must hold a kernel or an operator"):
        lanes(CALL)
