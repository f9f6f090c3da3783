"""`attnlib.decisions`: what lost least to the fastest, by kind of call."""

import numpy as np
import pandas as pd
import pytest

import attnlib
from attnlib.lab.decide import Decisions, _losses
from attnlib.run.store import load
from attnlib.studies import engine_modes


def losses(**times):
    return _losses("a call", pd.DataFrame(times, index=["first", "second"]))


def test_the_least_mean_slowdown_stands_first_and_is_against_the_fastest_of_each_call():
    table = losses(**{"flashinfer-fa2": [10.0, 20.0], "flashinfer-fa3": [20.0, 19.0]})
    assert table.use.tolist() == ["fa2", "fa3"]
    assert table["mean"].tolist() == pytest.approx([(0 + 1 / 19) / 2, (1 + 0) / 2])
    assert table.worst.tolist() == pytest.approx([1 / 19, 1.0])
    assert table.calls.tolist() == [2, 2]


def test_a_row_has_the_best_and_the_next_in_percent():
    table = Decisions(losses(**{"flashinfer-fa2": [10.0, 10.0], "flashinfer-fa3": [20.0, 30.0]}))
    (row,) = table.table().to_dict("records")
    assert row["use"] == "fa2"
    assert row["slower by, %"] == 0.0
    assert row["next best"] == "fa3"
    assert row["next slower by, %"] == 150.0


def test_one_backend_alone_has_no_next():
    (row,) = Decisions(losses(**{"flashinfer-fa2": [10.0, 10.0]})).table().to_dict("records")
    assert row["next best"] == "" and pd.isna(row["next slower by, %"])


def test_a_backend_that_is_left_out_is_in_no_row_and_an_unknown_one_is_refused(published_records):
    whole = attnlib.decisions()
    left = attnlib.decisions(without=["flash-attn-3-precomputed"])
    assert "FlashAttention-3" in set(whole.losses.use)
    assert "FlashAttention-3" not in set(left.losses.use)
    with pytest.raises(ValueError, match="without must be one of"):
        attnlib.decisions(without=["fa4"])


def test_the_ways_to_choose_for_decode_are_those_of_the_table(published_records):
    ways = attnlib.decisions().of_decode().set_index("choice")["mean slowdown, %"]
    assert ways["advise"] < ways["this table"] < ways["always FlashAttention-3"]
    engines = attnlib.decisions(without=["flashinfer-cuda-cores"])
    left = engines.of_decode().set_index("choice")["mean slowdown, %"]
    assert {*ways.index} - {*left.index} == {"this table", "always CUDA cores"}
    always = "always FlashAttention-3"
    assert left[always] < ways[always], "the fastest is one that is left"
    (axis,) = attnlib.decisions().figure().axes
    marks = {entry.get_label(): entry.get_offsets() for entry in axis.collections}
    assert len(marks["BatchPOD"]) == 1, "a look of its own"
    places = np.concatenate([*marks.values()])
    assert len(np.unique(places[:, 1].round(3))) == 2 * len(axis.get_yticklabels())
    assert [label.get_text() for label in axis.get_yticklabels()][0].startswith("decode")


@pytest.mark.parametrize(
    ("heads", "kernel"),
    [
        ("8/8", "cuda-cores"),
        ("16/8", "cuda-cores"),
        ("24/8", "cuda-cores"),
        ("32/8", "fa2"),
    ],
)
def test_sglang_by_flashinfer_decodes_on_the_cuda_cores_that_win_with_few_heads(
    published_records,
    heads,
    kernel,
):
    answer = attnlib.explain(
        f"heads={heads} page=16",
        gpu="h200",
        library="sglang==0.5.23",
        policy="flashinfer",
    )
    assert answer.kernel == kernel
    few_heads, more = attnlib.decisions().table().use[:2]
    assert (few_heads, more) == ("CUDA cores", "FlashAttention-3")


def test_rows_of_the_chart_by_mode_are_separated(published_records):
    frame = load("engine_modes", "nvidia-h200-e0997f6a")
    (axis,) = engine_modes.ratio_chart(frame).axes
    between = [line for line in axis.lines if line.get_ydata()[0] == line.get_ydata()[-1]]
    places = {line.get_ydata()[0] for line in between}
    rows = len(axis.get_yticklabels())
    assert {row - 0.5 for row in range(1, rows)} <= places
