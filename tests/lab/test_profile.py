"""Profiles of real callables: CPU operators anywhere, and on a GPU what really ran."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.words import flat

import attnlib
from attnlib.lab.profile import call_words
from attnlib.measure import trace
from attnlib.measure.timer import WARM_UP_CALLS

X = torch.ones(64, 64)


def softmax_of_a_product(x):
    return torch.softmax(x @ x, dim=-1)


@pytest.fixture
def taken(without_gpu):
    return attnlib.profile(softmax_of_a_product, X, calls=4, warmup=2)


def test_a_profile_names_the_operators_that_ran_and_how_often_and_times_add_up(taken):
    table = taken.table().set_index("CPU operator")
    assert table.calls[["aten::mm", "aten::_softmax"]].tolist() == [1, 1]
    assert (table.us >= 0).all()
    assert table.share.sum() == pytest.approx(1, abs=0.01)
    assert table.us.is_monotonic_decreasing
    assert taken.launches == len([span for span in taken.work if span.call == 0])
    assert taken.busy_us == pytest.approx(taken.time_us, rel=1e-3)
    assert all(gap.length_us > 0 for gap in taken.gaps)
    assert len(taken.host_us) == 4
    assert min(taken.host_us) > 0
    assert taken.wall_us > 0


def test_a_profile_without_a_gpu_never_speaks_of_kernels_but_to_deny_them(taken, capfd):
    assert taken.device == "cpu"
    assert taken.row_word == "CPU operator"
    assert taken.machine["gpu"] == ""
    for shown in (repr(taken), taken._repr_html_()):
        assert "These are CPU operators, not kernels: " in shown
        assert "no kernels" in shown and "GPU busy" not in shown and "launches" not in shown
    trace.trace_calls(lambda: None, 1, gpu=False)
    assert capfd.readouterr().err == "", "the profiler's own words"


@pytest.mark.parametrize(
    "warmup, ran",
    [
        (0, 3 + 3),
        (2, 2 + 3 + 1 + 3),
    ],
)
def test_a_profile_tells_how_often_it_called(warmup, ran, without_gpu):
    calls = []
    taken = attnlib.profile(
        lambda: calls.append(torch.ones(2)),
        calls=3,
        warmup=warmup,
    )
    assert len(calls) == taken.ran == ran
    assert f"the callable itself ran {ran} times" in repr(taken)


def test_a_callable_that_runs_no_operator_has_an_empty_profile(without_gpu):
    taken = attnlib.profile(lambda: None, calls=2)
    assert taken.launches == 0
    assert len(taken.table()) == 0
    assert "0 CPU operators" in repr(taken) and "<table>" not in taken._repr_html_()


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"fn": torch.ones(1)}, TypeError, "fn must be callable, got Tensor"),
        ({"calls": 0}, ValueError, "calls must be an integer >= 1, got 0"),
        ({"warmup": -1}, ValueError, "warmup must be an integer >= 0, got -1"),
        ({"device": "tpu"}, ValueError, "device must be one of auto, cuda, cpu, got 'tpu'"),
        ({"device": "cuda"}, RuntimeError, "device='cuda' cannot be had: "),
        ({"cuda_graph": True}, ValueError, "cuda_graph=True needs kernels to capture: "),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_it_runs(arguments, error, words, without_gpu):
    with pytest.raises(error, match=words):
        attnlib.profile(**{"fn": lambda: pytest.fail("ran"), **arguments})


def test_an_error_of_the_callable_is_its_own_and_the_next_profile_works(without_gpu):
    with pytest.raises(ZeroDivisionError):
        attnlib.profile(lambda: 1 / 0)
    calls = iter([0, 0, 0, 1])  # raises under the profiler
    with pytest.raises(StopIteration):
        attnlib.profile(lambda: next(calls) and None, calls=2, warmup=1)
    assert attnlib.profile(softmax_of_a_product, X, calls=1).launches > 0


def test_a_second_recording_is_refused_in_any_thread_and_the_first_goes_on(without_gpu):
    def again():
        with pytest.raises(RuntimeError, match="must not be recording already, in any thread"):
            attnlib.profile(softmax_of_a_product, X, calls=1)
        return softmax_of_a_product(X)

    with torch.profiler.profile() as first:
        again()
    assert "aten::_softmax" in {event.name for event in first.events()}
    with ThreadPoolExecutor() as pool:
        found = trace.trace_calls(
            lambda: pool.submit(again).result(),
            1,
            gpu=False,
            settle=0,
        )
    assert found["traceEvents"]


def test_a_gpu_that_the_profiler_does_not_see_is_no_reason_to_show_operators(monkeypatch):
    monkeypatch.setattr("attnlib.lab.profile._why_no_gpu", lambda *asked: "")
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    cpu_only = trace.trace_calls(lambda: softmax_of_a_product(X), 1, gpu=False)
    monkeypatch.setattr("attnlib.measure.trace.trace_calls", lambda *given, **known: cpu_only)
    with pytest.raises(RuntimeError, match="saw no CUDA call, not even its own"):
        attnlib.profile(softmax_of_a_product, X, calls=1)


def test_a_saved_trace_is_what_perfetto_reads_and_names_no_machine(taken, tmp_path):
    found = json.loads(taken.save_trace(tmp_path / "step.json").read_text())
    assert {"aten::mm", "aten::_softmax"} <= {event["name"] for event in found["traceEvents"]}
    assert not {"host_name", "traceName"} & set(found)
    first, second = (taken.save_trace(tmp_path / name) for name in ("a.json.gz", "b.json.gz"))
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(gzip.decompress(first.read_bytes())) == found


@pytest.mark.gpu
class TestOnAGpu:
    """What only a GPU shows."""

    @pytest.fixture
    def y(self):
        return torch.zeros(2**20, device="cuda")

    def test_kernels_are_named_counted_and_timed_and_times_add_up(self, y):
        taken = attnlib.profile(
            lambda: (
                y.add_(1),
                y.mul_(2),
                y.sin_(),
            ),
            calls=5,
        )
        assert taken.device == "cuda"
        assert taken.note == ""
        assert taken.launches == 3
        assert taken.host_launches == 3
        assert not any(span.in_graph for span in taken.work)
        table = taken.table()
        assert table.kernel.str.contains("elementwise_kernel").all()
        assert table.launches.sum() == 3
        assert (table.us > 0).all()
        assert {span.call for span in taken.work} == set(range(5))
        assert taken.machine["gpu"] == torch.cuda.get_device_name()
        assert all(gap.length_us > 0 for gap in taken.gaps)
        assert taken.gap_us >= 0
        assert 0 < taken.busy_us <= taken.time_us * (1 + 1e-6)
        assert taken.busy_us <= taken.wall_us

    def test_a_replay_is_one_launch_of_a_graph_and_what_cannot_be_captured_says_so(self, y):
        taken = attnlib.profile(
            lambda: (y.add_(1), y.mul_(2)),
            calls=5,
            warmup=1,
            cuda_graph=True,
        )
        assert taken.launches == 2
        assert taken.host_launches == 1
        assert "1 by the host, 1 of them of a CUDA graph" in repr(taken)
        assert all(span.in_graph for span in taken.work)
        assert taken.ran == 1 + WARM_UP_CALLS + 1  # warm-up, before the capture, the capture
        with pytest.raises(RuntimeError, match="can be captured"):
            attnlib.profile(lambda: y.sum().item(), cuda_graph=True)

    def test_copies_are_work_too_on_whatever_stream(self, y):
        side = torch.cuda.Stream()

        def step():
            y.add_(1)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y.mul_(2)
            torch.cuda.current_stream().wait_stream(side)
            return y[:4].cpu()

        taken = attnlib.profile(step, calls=3)
        assert taken.table().kernel.str.startswith("Memcpy DtoH").any()
        assert taken.launches == 3

    def test_a_callable_without_kernels_is_told_apart_and_operators_can_be_asked_for(self, y):
        taken = attnlib.profile(softmax_of_a_product, X, calls=2)
        assert taken.device == "cpu" and "the callable used no GPU" in taken.note
        with pytest.raises(RuntimeError, match="saw no kernel"):
            attnlib.profile(softmax_of_a_product, X, calls=2, device="cuda")
        with pytest.raises(RuntimeError, match="cuda_graph=True needs an fn that uses the GPU"):
            attnlib.profile(lambda: None, calls=2, cuda_graph=True)
        taken = attnlib.profile(lambda: y.add_(1), calls=2, device="cpu")
        assert taken.device == "cpu" and "what a GPU did is not shown" in taken.note
        assert "aten::add_" in set(taken.table()["CPU operator"])

    def test_eager_and_replay_differ_in_launches_not_in_kernels(self, y):
        def step():
            y.add_(1), y.mul_(2)

        replay = attnlib.profile(step, calls=5, cuda_graph=True)
        found = attnlib.compare(attnlib.profile(step, calls=5), replay)
        assert not {"gone", "new"} & set(found.changes.change)
        assert ("launches by the host", 2, 1) in found.totals()


CASE = attnlib.DecodeCase(attnlib.AttnSpec(32, 8, 128, 16), 16, 8192)
FA2 = attnlib.decode_call("flashinfer-fa2", CASE)


def test_a_recorded_profile_says_of_which_call_card_and_releases_it_is(
    without_gpu, published_records
):
    taken = attnlib.profile(FA2, recorded="decode_fa2")
    for shown in (repr(taken), taken._repr_html_()):
        call = "flashinfer-fa2, heads=32/8 head_dim=128 page=16 lens=8192x16"
        shown = flat(shown)
        assert f"Recorded: {call}" in shown
        assert "on NVIDIA H100 80GB HBM3 (2d7a65a0), torch 2.11.0+cu130" in shown
        assert "the call did not run here" in shown
    assert attnlib.profile(FA2, name="mine", recorded="decode_fa2").name == "mine"


def fused(lengths):
    pytest.fail("ran")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"fn": attnlib.decode_call("flashinfer-fa3", CASE)}, "not of 'flashinfer-fa3, heads=32/8"),
        ({"fn": attnlib.decode_call("flashinfer-fa2", replace(CASE, kv_len=16))}, "lens=16x16'"),
        ({"fn": lambda: pytest.fail("ran")}, "not of 'a callable without a name'"),
        ({"device": "cpu"}, "is of device 'cuda', not of 'cpu'"),
        ({"cuda_graph": True}, "taken with cuda_graph=False, not with True"),
        ({"recorded": "none"}, "recorded must be one of decode_fa2, .*, got 'none'"),
    ],
)
def test_a_recorded_profile_stands_for_no_other_call(
    arguments, words, without_gpu, published_records
):
    with pytest.raises(ValueError, match=words):
        attnlib.profile(**{"fn": FA2, "recorded": "decode_fa2", **arguments})


@pytest.mark.parametrize(
    "count",
    [
        (3,),
        (3, 4, (3, 65)),
    ],
)
def test_a_call_is_its_arguments_types_and_shapes_too(count, without_gpu, published_records):
    tables = [torch.zeros(size, dtype=torch.int32) for size in count]
    with pytest.raises(ValueError, match=r"is of the call 'fused\(int32 \[3\], .*not of 'fused"):
        attnlib.profile(fused, *tables, recorded="metadata_fused")


def test_a_call_in_words_has_its_numbers_and_its_tensors():
    assert call_words(fused, (X, 3, True, "x", [X])) == (
        "fused(float32 [64, 64], 3, True, 'x', list)"
    )
    assert call_words(fused, ()) == "fused"
    assert call_words(lambda: None, ()) == call_words(partial(fused, 3), ()) == ""


def test_a_profile_is_read_back_as_it_was_saved_and_one_of_a_lambda_is_not_saved(
    taken, without_gpu, monkeypatch, tmp_path
):
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    taken.save(tmp_path / "profiles" / "mine.json")
    seen = attnlib.profile(softmax_of_a_product, X, recorded="mine")
    assert seen.call == "softmax_of_a_product(float32 [64, 64])"
    assert seen.wall_us == taken.wall_us
    assert seen.versions == taken.versions
    assert f"torch {torch.__version__}" in seen.note
    unnamed = attnlib.profile(lambda: None, calls=1)
    with pytest.raises(ValueError, match="of a callable with a name"):
        unnamed.save(tmp_path / "profiles" / "other.json")
