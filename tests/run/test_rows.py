"""Rows and ratios: what may be divided by what, and what is left out."""

from __future__ import annotations

import pandas as pd
import pytest

from attnlib.core.spec import AttnSpec
from attnlib.kinds.cost import Ceilings
from attnlib.kinds.decode.case import DecodeCase
from attnlib.run import frame as rows
from attnlib.run.study import Grid, Study
from attnlib.studies.fa3_decode_regression import tables

CASE = DecodeCase(AttnSpec(8, 2, 128, 16), batch_size=4, kv_len=1024)


def frame(*entries: dict, case: DecodeCase = CASE) -> pd.DataFrame:
    """Rows as `store.load` gives them: backend, round and run_us, the rest alike."""
    same = {
        **case.to_dict(),
        "heads": case.spec.heads,
        "release": "0.6.3",
        "timer": "graph",
        "status": "ok",
        "round": 0,
        "num_sms": 132,
        "throttled": False,
        "gpu_id": "0badcafe",
        "power_limit_w": 700,
        "schema": 1,
    }
    return pd.DataFrame([{**same, **entry} for entry in entries])


def timed(backend: str, round_: int, run_us: float, **more: object) -> dict:
    return {"backend": backend, "round": round_, "run_us": run_us, **more}


def test_ratios_pair_round_by_round_and_not_by_pool():
    found = rows.ratios(
        frame(timed("a", 0, 2.0), timed("b", 0, 1.0), timed("a", 1, 40.0), timed("b", 1, 20.0)),
        "a",
        "b",
    )
    assert found[["ratio", "low", "high", "pairs"]].to_numpy().tolist() == [[2.0, 2.0, 2.0, 2]]


@pytest.mark.parametrize(
    ("column", "other"),
    [("gpu_id", "deadbeef"), ("power_limit_w", 350), ("timer", "eager"), ("schema", 2)],
)
def test_nothing_is_divided_or_tabled_across_what_moves_times(column, other):
    work = {"work_per_call": 1e9}
    mixed = frame(timed("a", 0, 2.0), timed("b", 0, 1.0, **{column: other}))
    limit = frame(timed("copy", 0, 2.0, **work), timed("matmul", 0, 1.0, **work, **{column: other}))
    refused = rf"{column} must be the same .*, got .* and {other!r}"
    with pytest.raises(ValueError, match=refused):
        rows.ratios(mixed, "a", "b")
    with pytest.raises(ValueError, match=refused):
        rows.medians(mixed)
    with pytest.raises(ValueError, match=refused):
        rows.ceilings(limit)


def test_a_third_backend_from_elsewhere_does_not_stand_in_the_way_of_a_ratio():
    found = frame(timed("a", 0, 2.0), timed("b", 0, 1.0), timed("c", 0, 9.0, gpu_id="deadbeef"))
    assert rows.ratios(found, "a", "b").ratio.item() == pytest.approx(2.0)


@pytest.mark.parametrize("table", ["over_floor", "across_releases"])
def test_tables_that_divide_or_line_up_rows_refuse_two_gpus(table):
    both = [timed("a", n, 1.0, gpu_id=gpu, kernel_family="fa2") for n, gpu in enumerate("xy")]
    arguments = {"over_floor": (Ceilings(1.0, 1.0, 1), "0.6.3"), "across_releases": ("a",)}[table]
    with pytest.raises(ValueError, match="gpu_id must be the same .*, got 'x' and 'y'"):
        getattr(tables, table)(frame(*both), *arguments)


def test_a_round_that_lacks_one_side_is_left_out_of_the_ratio():
    found = rows.ratios(frame(timed("a", 0, 3.0), timed("b", 0, 1.0), timed("a", 1, 9.0)), "a", "b")
    assert (found.ratio.item(), found.pairs.item()) == (pytest.approx(3.0), 1)


def test_a_backend_that_is_not_there_gives_an_empty_table_with_columns():
    found = rows.ratios(frame(timed("a", 0, 3.0)), "a", "b")
    assert found.empty and "ratio" in found


def test_only_ok_rows_of_one_timer_and_release_are_decode_rows():
    mixed = frame(
        timed("a", 0, 1.0),
        timed("b", 0, 1.0, timer="eager"),
        timed("c", 0, float("nan"), status="incorrect"),
        timed("d", 0, 1.0, release="0.6.4"),
        timed("e", 0, 1.0, heads=None),
    )
    assert rows.decode_rows(mixed, release="0.6.3").backend.tolist() == ["a"]
    assert rows.decode_rows(mixed, timer="eager").backend.tolist() == ["b"]


def test_of_cases_keeps_the_rows_of_those_cases_only():
    other = DecodeCase(CASE.spec, 4, 2048, seed=3)
    both = pd.concat([frame(timed("a", 0, 1.0)), frame(timed("b", 0, 1.0), case=other)])
    assert rows.of_cases(both, [other]).backend.tolist() == ["b"]


def test_of_cases_keeps_the_columns_where_there_is_nothing_to_keep():
    nothing = frame(timed("a", 0, 1.0)).iloc[:0]
    assert list(rows.of_cases(nothing, [CASE]).columns) == list(nothing.columns)


def test_a_case_survives_the_way_through_a_frame():
    case = DecodeCase(AttnSpec(6, 3, 64, 1, "float16", "float8_e4m3fn"), 3, 77, "ragged", 9)
    assert rows.case_of(frame(timed("a", 0, 1.0), case=case).iloc[0]) == case


def test_ceilings_are_work_over_time_in_their_units():
    found = rows.ceilings(
        frame(
            timed("copy", 0, 2000.0, work_per_call=8.0e9),
            timed("matmul", 0, 1000.0, work_per_call=8.0e11),
        )
    )
    assert (found.copy_gbps, found.matmul_tflops, found.num_sms) == (4000.0, 800.0, 132)


def test_a_study_without_ceilings_is_refused_by_name():
    with pytest.raises(ValueError, match="frame must hold a 'copy' ceiling"):
        rows.ceilings(frame(timed("a", 0, 1.0)))


def test_releases_are_ordered_as_versions_not_as_words():
    found = frame(*(timed("a", 0, 1.0, release=r) for r in ("0.6.13", "", "0.6.4", "0.7.2.post1")))
    assert rows.release_order(found) == ["0.6.4", "0.6.13", "0.7.2.post1"]


def test_the_rows_of_a_study_are_those_of_its_items_and_no_others():
    found = frame(
        timed("a", 0, 1.0, timer="graph", release="1"),
        timed("a", 1, 2.0, timer="graph", release="1"),
        timed("a", 0, 3.0, timer="eager", release="1"),
        timed("a", 0, 4.0, timer="graph", release="2"),
        timed("b", 0, 5.0, timer="graph", release="1"),
    )
    study = Study(name="demo", question="?", grids=(Grid((CASE,), ("a",), ("1",)),))
    assert rows.of_study(found, study).run_us.tolist() == [1.0, 2.0]
    other = DecodeCase(CASE.spec, batch_size=5, kv_len=1024)
    assert rows.of_study(found, Study("demo", "?", (Grid((other,), ("a",), ("1",)),))).empty
