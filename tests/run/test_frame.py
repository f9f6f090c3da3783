"""Rows and ratios: what may be divided by what, and what is left out."""

from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest

from attnlib.core import AttnSpec
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.spans import Kernel
from attnlib.run import frame as rows
from attnlib.run.frame import heads_of

CASE = DecodeCase(AttnSpec(8, 2, 128, 16), batch_size=4, kv_len=1024)

SAME = {"study": "demo", "release": "0.6.3", "timer": "graph", "status": "ok", "schema": 1}
SAME |= {"gpu": "Test GPU", "gpu_id": "0badcafe", "num_sms": 132, "power_limit_w": 700}
SAME |= {"kernel_family": "fa2", "kernels": (), "throttled": False, "repeat": False}
SAME |= {"started_at": "2026-01-02"}


def row(case, backend, round_, run_us, /, **told):
    """A record's row, as `frame.frame_of` has it, less what no test asks for."""
    fields = {"case": case, **case.to_dict(), "heads": heads_of(case)}
    return {**SAME, **fields, "backend": backend, "round": round_, "run_us": run_us, **told}


def timed(backend, round_, run_us, /, **told):
    return row(CASE, backend, round_, run_us, **told)


def frame(*rows):
    return pd.DataFrame(rows)


def ran(*names):
    """The kernels of a call that launched these: one per name, as often as it stands, 1 us."""
    return tuple(Kernel(name, float(count), 1.0) for name, count in Counter(names).items())


def test_ratios_pair_round_by_round_and_leave_out_a_round_that_lacks_one_side():
    both = [
        timed("a", 0, 2.0),
        timed("b", 0, 1.0),
        timed("a", 1, 40.0),
        timed("b", 1, 20.0),
    ]
    found = rows.over(frame(*both, timed("a", 2, 9.0)), "a", "b")
    assert found[["ratio", "low", "high", "rounds"]].to_numpy().tolist() == [[2.0, 2.0, 2.0, 2]]
    nothing = rows.over(frame(*both), "a", "c")
    assert nothing.empty and "ratio" in nothing


@pytest.mark.parametrize(
    "column, other",
    [
        ("gpu_id", "deadbeef"),
        ("power_limit_w", 350),
        ("timer", "eager"),
        ("schema", 2),
    ],
)
def test_nothing_is_divided_or_tabled_across_what_moves_times(column, other):
    work = {"work_per_call": 1e9}
    mixed = frame(
        timed("a", 0, 2.0),
        timed("b", 0, 1.0, **{column: other}),
    )
    limit = frame(
        timed("copy", 0, 2.0, **work),
        timed("matmul", 0, 1.0, **work, **{column: other}),
    )
    words = rf"{column} must be the same .*, got {timed('a', 0, 2.0)[column]!r} and {other!r}"
    for call, *arguments in (
        (rows.over, mixed, "a", "b"),
        (rows.times, mixed),
        (rows.ceilings, limit),
    ):
        with pytest.raises(ValueError, match=words):
            call(*arguments)


def test_a_third_backend_from_elsewhere_does_not_stand_in_the_way_of_a_ratio():
    found = frame(
        timed("a", 0, 2.0),
        timed("b", 0, 1.0),
        timed("c", 0, 9.0, gpu_id="deadbeef"),
    )
    assert rows.over(found, "a", "b").ratio.item() == pytest.approx(2.0)


def test_only_ok_rows_of_one_timer_and_release_are_decode_rows():
    mixed = frame(
        timed("a", 0, 1.0),
        timed("b", 0, 1.0, timer="eager"),
        timed("c", 0, float("nan"), status="incorrect"),
        timed("d", 0, 1.0, release="0.6.4"),
        timed("e", 0, 1.0, heads=None, case=None),
    )
    assert rows.decode_rows(mixed, release="0.6.3").backend.tolist() == ["a"]
    assert rows.decode_rows(mixed, timer="eager").backend.tolist() == ["b"]


def test_cases_with_another_seed_or_length_are_cases_of_their_own_in_order():
    longer = replace(CASE, kv_len=2048)
    other = replace(CASE, seed=3)
    found = rows.times(
        frame(
            row(longer, "a", 0, 3.0),
            row(other, "a", 0, 2.0),
        )
    )
    assert found.case.tolist() == [other, longer]
    assert found.a.tolist() == [2.0, 3.0]
    assert found[rows.SHAPE].to_numpy().tolist() == [
        ["8/2", 16, 4, 1024],
        ["8/2", 16, 4, 2048],
    ]


def test_launches_are_those_of_the_trace_by_name():
    found = frame(
        timed("a", 0, 1.0, kernels=ran("one", "two", "two")),
        timed("b", 0, 1.0),
    )
    assert rows.launches(found).tolist() == [3, 0]
    assert rows.launches(found, "tw").tolist() == [2, 0]


def test_ceilings_are_work_over_time_in_their_units_and_refused_by_name_where_one_lacks():
    copy = ("copy", 0, 2000.0)
    matmul = ("matmul", 0, 1000.0)
    both = frame(timed(*copy, work_per_call=8.0e9), timed(*matmul, work_per_call=8.0e11))
    found = rows.ceilings(both)
    assert found.copy_gbps == 4000.0
    assert found.matmul_tflops == 800.0
    with pytest.raises(ValueError, match="frame must hold a 'copy' ceiling"):
        rows.ceilings(both[1:])
