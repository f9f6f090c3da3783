"""Spans and gaps of traces written by hand: every rule has an event that only it explains.

No measurement: the times are round numbers, so that each sum can be checked by eye.
"""

import pytest

from attnlib.measure import spans
from attnlib.measure.spans import CALL, NO_CALL, Gap, Span, find_gaps, read_spans

CLOCK = 4_385_705_362_000.0  # Kineto's clock starts where it likes


def event(category, name, start, length, *, tid=1, **arguments):
    words = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid}
    return {**words, "ts": CLOCK + start, "dur": length, "args": arguments}


def call(start, length=100.0):
    return event("user_annotation", CALL, start, length)


def kernel(name, start, length, *, correlation, stream=7, **arguments):
    known = {"device": 0, "stream": stream, "correlation": correlation}
    return event("kernel", name, start, length, tid=stream, **known | arguments)


def launch(start, *, correlation, name="cudaLaunchKernel"):
    return event("cuda_runtime", name, start, 4.0, correlation=correlation)


def read(*events):
    return read_spans({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]})


def work(*events):
    return spans.gpu_work(read(*events))


def test_a_trace_that_marks_no_call_is_refused():
    with pytest.raises(ValueError, match="must mark each call"):
        read(kernel("k", 0, 1, correlation=1))


def test_times_count_from_the_first_call():
    ran = [event("cpu_op", "aten::mm", start, 5) for start in (1010, 1530)]
    spans = read(call(1000), call(1500, 40), *ran)
    assert [(s.start_us, s.end_us, s.call) for s in spans] == [
        (10, 15, 0),
        (530, 535, 1),
    ]


@pytest.mark.parametrize(
    "launched, numbers",
    [
        ([20.0], [0]),  # the call that launched it, not the one it ran in
        ([-50.0], []),  # before the first call: not of the profile
        ([], [1]),  # not in the trace: the last call that had started
    ],
)
def test_a_kernel_belongs_to_the_call_that_launched_it(launched, numbers):
    launches = [launch(start, correlation=5) for start in launched]
    late = work(
        *launches,
        call(0.0),
        call(140.0),
        kernel("late", 150.0, 10.0, correlation=5),
    )
    assert [span.call for span in late] == numbers
    assert {span.launch for span in late} <= {5}


def test_gpu_work_is_kernels_copies_and_fills_by_short_names_with_what_they_ran_on():
    template = "void at::native::elementwise_kernel<4, at::native::FillFunctor<int>>(int, A)"
    spans = work(
        call(0.0),
        kernel(
            template,
            10,
            1,
            correlation=1,
            grid=[4, 1, 1],
            block=[128, 1, 1],
        ),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 1, correlation=2, bytes=8),
        event("gpu_memset", "Memset (Device)", 30, 1, correlation=3, bytes=8),
        event("gpu_user_annotation", CALL, 10, 30, tid=7),
        event("cuda_sync", "Stream Sync", 40, 5, tid=7),
        event("cpu_op", "aten::fill_", 1, 2),
    )
    assert [(span.kind, span.name, span.copied_bytes) for span in spans] == [
        ("kernel", "elementwise_kernel", 0),
        ("memcpy", "Memcpy DtoH", 8),
        ("memset", "Memset", 0),
    ]
    assert spans[0].symbol == template
    assert spans[0].grid == (4, 1, 1)
    assert spans[0].block == (128, 1, 1)


@pytest.mark.parametrize(
    "launched_by, graph, in_graph",
    [
        ("cudaGraphLaunch", None, True),
        ("cudaGraphLaunch_ptsz", None, True),
        ("", 3, True),
        ("cudaLaunchKernel", 0, False),
    ],
)
def test_kernels_of_a_graph_share_one_launch_and_say_so(launched_by, graph, in_graph):
    launches = [launch(5.0, correlation=1, name=launched_by)] if launched_by else []
    arguments = {} if graph is None else {"graph id": graph}
    kernels = [kernel("k", 20 + i, 0.5, correlation=1, **arguments) for i in range(3)]
    ran = work(call(0.0), *launches, *kernels)
    assert len(ran) == 3
    for span in ran:
        assert span.in_graph == in_graph
        assert span.launch == 1


def test_of_nested_api_calls_the_outer_one_is_the_launch():
    driver = event("cuda_driver", "cuGraphLaunch", 106.0, 2.0, correlation=1)
    outer = launch(5.0, correlation=1)
    (ran,) = work(
        call(0),
        call(101),
        driver,
        outer,
        kernel("k", 120, 1, correlation=1),
    )
    assert (ran.call, ran.in_graph) == (0, False)


def test_a_trace_that_holds_no_cuda_call_proves_no_absence_of_kernels():
    sync = event("cuda_runtime", "cudaDeviceSynchronize", 90.0, 5.0)
    assert spans.saw_cuda({"traceEvents": [call(0.0), sync]})
    assert not spans.saw_cuda(
        {
            "traceEvents": [
                call(0.0),
                event("cpu_op", "aten::mm", 1, 2),
            ]
        }
    )


def test_an_operators_own_time_is_without_the_operators_it_calls():
    times = {
        "softmax": (10, 30),
        "_softmax": (12, 20),
        "empty": (13, 5),
        "add": (40, 10),
    }
    events = [event("cpu_op", name, *time) for name, time in times.items()]
    operators = spans.operators(read(call(0.0), *events))
    rows = [
        ("softmax", 10),
        ("_softmax", 15),
        ("empty", 5),
        ("add", 10),
    ]
    assert [(span.name, span.self_us) for span in operators] == rows
    assert spans.busy_us(operators) == sum(span.self_us for span in operators) == 40.0


def test_operators_outside_of_the_calls_are_left_out_and_threads_are_apart():
    events = [
        event("cpu_op", "aten::mm", 10, 5),
        event("cpu_op", "aten::later", 500, 5),
    ]
    other = event("cpu_op", "aten::mm_backward", 12, 5, tid=4711)
    operators = spans.operators(read(call(0.0), *events, other))
    assert [(s.name, s.self_us) for s in operators] == [
        ("aten::mm", 5),
        ("aten::mm_backward", 5),
    ]


def of(start, length, name="k", number=0):
    return Span("kernel", name, start, length, length, number)


def test_gaps_lie_where_nothing_runs_name_their_neighbours_and_between_calls_are_of_neither():
    works = [
        of(0, 10, "a"),
        of(4, 2, "inside"),
        of(15, 5, "b"),
        of(18, 7, "c"),
        of(30, 1, "d", 1),
    ]
    assert find_gaps(works) == (
        Gap(10, 5, "a", "b", 0),
        Gap(25, 5, "c", "d", NO_CALL),
    )


def test_back_to_back_spans_have_no_gap_however_the_clock_rounds():
    assert find_gaps([of(CLOCK, 10.001), of(CLOCK + 10.001, 1.0)]) == ()


def test_times_of_a_name_are_added_up_call_by_call():
    times = spans.per_call(
        [
            of(0, 2),
            of(3, 1),
            of(9, 4, number=2),
            of(5, 1, "b"),
        ],
        3,
    )
    assert times == {"k": [3.0, 0.0, 4.0], "b": [1.0, 0.0, 0.0]}
