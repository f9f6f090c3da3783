"""The short text of `advise`: the times of what the engine has, and what to set for each."""

import pandas as pd
import pytest
from support.words import flat

import attnlib
from attnlib.lab import advised_times
from attnlib.lab.advised_times import (
    RUNS_NOW,
    confidence_of_call,
    confidence_of_nearest,
    mean_slowdowns,
    mean_speedups,
    recorded_rows,
    setting_of,
    with_speedups,
)
from attnlib.select.lines import WIDTH

OWN = "sglang-flash-attn-3"
RUNS = {
    OWN: "fa3",
    f"{OWN}@bounded": "our plugin, SPLITS=bounded",
    "flash-attn-3-precomputed": "fa3, of another build",
    "flashinfer-fa2": "flashinfer",
    "flashinfer-xqa": "trtllm_mha",
    "flashinfer-cuda-cores": "flashinfer, cubins=no",
}


@pytest.mark.parametrize(
    "word, engine, setting",
    [
        ("flashmla", "sglang", "--attention-backend flashmla"),
        ("FLASHINFER, cubins=no", "vllm", "--attention-backend FLASHINFER, without cubins"),
        ("our plugin, SPLITS=bounded", "sglang", "ATTNLIB_SGLANG_SPLITS=bounded"),
        ("our planner", "vllm", "ATTNLIB_VLLM_DECODE=planned, with FlashInfer"),
        ("fa", "mini-sglang", "fa"),
    ],
)
def test_what_to_set_is_an_option_of_the_engine_or_a_variable_of_ours(word, engine, setting):
    assert setting_of(word, engine) == setting


def recorded(study, **us):
    rows = []
    for name, time in us.items():
        row = {"study": study, "gpu": "g", "timer": "graph", "page_table": "", "rounds": 3}
        rows.append(row | {"backend": name.replace("_", "-"), "us": time})
    return pd.DataFrame(rows)


def test_records_are_of_one_study_that_has_the_pick_and_of_no_other_build():
    large = recorded("a", flash_attn_3_precomputed=1.0, flashinfer_fa2=2.0, vllm_triton=3.0)
    small = recorded("b", sglang_flash_attn_3=4.0, flashinfer_fa2=2.0)
    rows = recorded_rows(pd.concat([large, small], ignore_index=True), OWN, RUNS)
    assert {*rows.study} == {"b"}
    more = recorded("c", flashinfer_fa2=1.0, flashinfer_xqa=1.0, flashinfer_cuda_cores=1.0)
    assert {*recorded_rows(pd.concat([more, small]), OWN, RUNS).study} == {"b"}
    assert recorded_rows(large, OWN, RUNS).backend.tolist() == ["flashinfer-fa2"]
    table = with_speedups(rows, OWN)
    assert table.backend.tolist() == ["flashinfer-fa2", OWN]
    assert table.speedup.tolist() == [2.0, 1.0]


def test_speedups_are_over_the_batches_that_have_both():
    times = pd.DataFrame({OWN: [4.0, 9.0, 1.0], "flashinfer-fa2": [1.0, 1.0, None]})
    beside = pd.DataFrame({OWN: [1.0], "flashinfer-fa2": [1.0], f"{OWN}@bounded": [0.5]})
    table = mean_speedups([times, beside], OWN, RUNS).set_index("backend")
    assert table.speedup.to_dict() == pytest.approx(
        {"flashinfer-fa2": 6.0, f"{OWN}@bounded": 2.0, OWN: 1.0}
    )
    assert table.batches["flashinfer-fa2"] == 2
    assert mean_speedups([times.drop(columns=OWN)], OWN, RUNS).empty
    others = pd.DataFrame({"flashinfer-fa2": [1.0, 4.0], f"{OWN}@bounded": [2.0, 2.0]})
    slower = mean_slowdowns(others, RUNS).set_index("backend").slowdown
    assert slower.to_dict() == pytest.approx({"flashinfer-fa2": 2**0.5, f"{OWN}@bounded": 2**0.5})


def test_the_pick_is_shown_with_the_best():
    names = [f"backend-{number}" for number in range(8)]
    table = pd.DataFrame({"backend": [*names, OWN], "speedup": [*range(9, 1, -1), 1.0]})
    rows = advised_times.shown(table, OWN, RUNS | dict.fromkeys(names, "x"), "sglang")
    assert rows.backend.tolist() == [*names[:4], OWN]
    assert rows["set in the engine"].iloc[-1] == RUNS_NOW
    of_library = advised_times.shown(table, OWN, None, "flashinfer")
    assert "set in the engine" not in of_library


@pytest.mark.parametrize(
    "arguments, level",
    [
        ((3, True, True), "high"),
        ((1, True, True), "medium"),
        ((3, False, True), "low"),
        ((3, True, False), "low"),
    ],
)
def test_how_sure_rounds_of_the_call_are(arguments, level):
    assert confidence_of_call(*arguments).startswith(f"Confidence: {level}, ")


@pytest.mark.parametrize(
    "distance, is_alike, level", [(3.0, True, "medium"), (3.1, True, "low"), (0.5, False, "low")]
)
def test_how_sure_other_batches_are(distance, is_alike, level):
    assert confidence_of_nearest(distance, is_alike).startswith(f"Confidence: {level}, ")


MLA = "mode=mla heads=128/1 lens=32768x8+2048x56"


@pytest.mark.slow
@pytest.mark.usefixtures("published_records")
def test_the_short_text_says_what_runs_what_is_known_what_is_faster_and_how_sure_that_is():
    advice = attnlib.advise(MLA, library="sglang==0.5.23", gpu="h100")
    lines = repr(advice).splitlines()
    assert len(lines) <= 22 and max(map(len, lines)) <= WIDTH
    assert lines[1] == "sglang==0.5.23 on h100 runs fa3: MLA on Hopper"
    size = next(line for line in lines if line.startswith("  size: "))
    assert size == "  size: slowdown 3.55 on record of this call, H100"
    (head,) = [at for at, line in enumerate(lines) if line.startswith("backend ")]
    rows = [line.split() for line in lines[head + 1 : head + 6]]
    assert rows[0][0] == "flashmla-dense," and rows[3][0] == f"{OWN}-mla"
    assert lines[head + 4].endswith(RUNS_NOW)
    assert "Confidence: high, this call was measured in 3 rounds." in lines
    assert (
        "NVIDIA H200" not in repr(advice)
        and lines[-1].endswith(": --details")
        and "NVIDIA H200" in advice.details
    )


@pytest.mark.slow
@pytest.mark.usefixtures("published_records")
@pytest.mark.parametrize(
    "gpu, words",
    [
        ("h200", "This call is not on record; expected by all batches (NVIDIA H200):"),
        ("h20", "No batch is on record of an H20: these are of NVIDIA H200"),
    ],
)
def test_a_call_that_is_not_on_record_has_the_nearest_batches(gpu, words):
    told = repr(attnlib.advise("heads=8/1 lens=3500x31", library="sglang==0.5.23", gpu=gpu))
    assert words in told and "Confidence: low, the nearest batch is at distance" in told


def test_what_runs_is_marked_where_the_base_is_another_build_of_it():
    runs = {"own": "FLASH_ATTN", "twin": "FLASH_ATTN, of another build", "other": "TRITON_ATTN"}
    table = pd.DataFrame({"backend": ["own", "twin", "other"], "speedup": [1.05, 1.0, 0.5]})
    rows = advised_times.shown(table, "twin", runs, "vllm").set_index("backend")
    settings = rows["set in the engine"]
    assert settings["own"] == RUNS_NOW
    assert settings["twin"] == advised_times.TIMED_ELSEWHERE
    assert settings["other"] == "--attention-backend TRITON_ATTN"


@pytest.mark.slow
@pytest.mark.usefixtures("published_records")
def test_one_backend_alone_is_no_comparison_and_the_reason_precedes_the_confidence():
    call = "model=DeepSeek-V3 tp=8 lens=32768x8+2048x56"
    lines = repr(attnlib.advise(call, library="vllm==0.33.0", gpu="h100")).splitlines()
    assert not [line for line in lines if line.startswith("backend ")]
    reason = lines.index("No batch near it is on record of FLASH_ATTN_MLA.")
    assert lines[reason + 1].startswith("Confidence: low")


@pytest.mark.slow
@pytest.mark.usefixtures("published_records")
def test_rows_of_few_batches_are_no_ranking_and_the_best_of_most_is_told_over_them():
    text = "mode=mla heads=128/1 page=1 lens=100000+500x39"
    advice = attnlib.advise(text, library="sglang==0.5.23", gpu="h100")
    table = advice.short_card().table
    bounded, *_ = table.backend
    assert bounded == "sglang-flash-attn-3-mla@bounded"
    few = table[table.batches.astype(int) == 1].backend.tolist()
    assert table.backend.tolist()[-len(few) :] == few and "flashmla-dense" in few
    said = f"stand last: over the batch of flashmla-dense, {bounded} has a speedup of 9.79."
    assert said in flat(repr(advice))


@pytest.mark.slow
@pytest.mark.usefixtures("published_records")
def test_pages_that_sglang_does_not_plan_are_none_of_its_rivals():
    text = "mode=mla heads=128/1 page=1 lens=32768x8+2048x56"
    shown = str(attnlib.advise(text, library="sglang==0.5.23", gpu="h100"))
    assert "flashmla-dense, page=64" in shown and "flashinfer-mla" not in shown


@pytest.mark.slow
@pytest.mark.usefixtures("published_records")
@pytest.mark.parametrize("library", ["vllm==0.33.0", "sglang==0.5.23"])
def test_one_row_is_what_runs_now_and_has_a_speedup_of_1(library):
    text = "heads=8/1 lens=32768x8+2048x56"
    table = attnlib.advise(text, library=library, gpu="h100").short_card().table
    runs_now = table["set in the engine"].str.startswith("(runs now")
    (speedup,) = table.speedup[runs_now]
    assert speedup == "1.00"
