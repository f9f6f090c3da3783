"""What changed between two profiles: words, launches, totals. Spans by hand, and a real pair."""

import pytest

from attnlib.lab.compare import compare
from attnlib.lab.profile import Profile
from attnlib.measure.spans import Span

GPU = {"gpu": "Test GPU", "gpu_id": "0badcafe"}


def made(times, *, device="cuda", machine=GPU, host_us=50.0):
    """A profile by hand: `times` has the kernel times (us) of each call, by name."""
    kind = "kernel" if device == "cuda" else "operator"
    calls = len(next(iter(times.values())))
    spans = []
    clock = 0.0
    for call in range(calls):
        for name, length in ((name, us) for name, every in times.items() for us in every[call]):
            spans.append(
                Span(
                    kind,
                    name,
                    clock,
                    length,
                    length,
                    call,
                    launch=len(spans),
                )
            )
            clock += length + 1.0
    told = {"name": "made by hand", "note": "", "threads": 1, "torch_version": "0"}
    ran = {"taken_at": "2026-01-02T03:04:05+00:00", "calls": calls, "ran": calls}
    host = {"host_us": (host_us,) * calls, "wall_us": 2 * host_us, "packed_trace": b""}
    where = {"device": device, "machine": machine, "cuda_graph": False}
    return Profile(**told, **ran, **host, **where, spans=tuple(spans))


def each(*calls):
    """One launch a call, of these times."""
    return [[us] for us in calls]


@pytest.mark.parametrize(
    "a, b, word",
    [
        (
            each(10, 10, 10, 10),
            each(12, 12, 12, 12),
            "slower",
        ),
        (
            each(12, 12, 12, 12),
            each(10, 10, 10, 10),
            "faster",
        ),
        (
            each(10, 10, 10, 10),
            each(10.1, 10.1, 10.1, 10.1),
            "same",
        ),
        (
            each(10, 30, 10, 30),
            each(12, 40, 12, 40),
            "inconclusive",
        ),
        (
            each(10, 10, 10, 10),
            each(10, 10, 10, 90),
            "inconclusive",
        ),  # one slow call is no change
        (each(10), each(12), "slower"),
        (
            [[5, 5], [5, 5]],
            each(12, 12),
            "slower",
        ),
    ],
)
def test_a_change_is_called_by_its_time_a_call(a, b, word):
    assert compare(
        made({"k": a}),
        made({"k": b}),
    ).changes.change.tolist() == [word]


def test_kernels_gone_and_new_are_named_with_their_launches_the_largest_difference_first():
    a = made({"kept": each(10, 10), "old": each(50, 50)})
    b = made(
        {
            "kept": [
                [10, 10],
                [10, 10],
            ],
            "young": each(7, 7),
        }
    )
    table = compare(a, b).table().set_index("kernel")
    assert table.index.tolist() == ["old", "kept", "young"]
    assert table.change.to_dict() == {"old": "gone", "kept": "slower", "young": "new"}
    assert table.loc["kept", ["launches a", "launches b"]].tolist() == [1, 2]
    gone = table.loc["old"]
    assert gone["us a"] == 50
    assert gone["us b"] == 0
    assert gone["b - a"] == -50


def test_totals_are_those_of_the_two_profiles():
    a = made({"k": each(10, 10)}, host_us=50.0)
    b = made({"k": each(5, 5)}, host_us=100.0)
    totals = {name: sides for name, *sides in compare(a, b).totals()}
    assert totals["time of kernels, us"] == [10, 5]
    assert totals["kernels"] == [1, 1]
    assert totals["until the call returns, us (no tracing)"] == [50, 100]


def test_names_are_escaped_and_no_verdict_is_claimed():
    a = made({"k<int>&": each(10)})
    b = made({"<script>": each(10)})
    shown = compare(a, b)._repr_html_()
    assert "<script>" not in shown and "k&lt;int&gt;&amp;" in shown
    assert "several rounds in fresh processes" in shown and "1 gone" in shown and "1 new" in shown


def test_what_must_not_be_compared_is_refused():
    times = {"k": each(10)}
    another = {"gpu": "Test GPU", "gpu_id": "another"}
    with pytest.raises(TypeError, match=r"b must be a Profile \(attnlib.profile\), got int"):
        compare(made(times), 3)
    with pytest.raises(ValueError, match="a is of kernels, b of CPU operators"):
        compare(made(times), made(times, device="cpu"))
    with pytest.raises(ValueError, match="must be of one GPU"):
        compare(made(times), made(times, machine=another))
