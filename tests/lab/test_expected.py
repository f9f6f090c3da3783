"""What is expected of a call off record: by batches of other layers it chooses well."""

import numpy as np
import pytest

import attnlib
from attnlib.lab.expected import (
    MOST,
    expected_ratios,
    loss_on_layers_left_out,
    neighbour_loss,
    shape_of,
)
from attnlib.lab.recorded import recorded_batches
from attnlib.measure.calls.cases import read_case

pytestmark = [pytest.mark.usefixtures("published_records"), pytest.mark.slow]
FA2, XQA = "flashinfer-fa2", "flashinfer-xqa"
PRECOMPUTED = "flash-attn-3-precomputed"


@pytest.mark.parametrize(
    "draw, backends, mean, last",
    [
        ("all rivals", (FA2, "flashinfer-batch-attention", XQA), 0.012, 0.08),
        ("all rivals", ("vllm-flash-attn-3", XQA), 0.010, 0.08),
        ("all layers", (PRECOMPUTED, FA2), 0.010, 0.08),
        ("all layers", (FA2, "flashinfer-cuda-cores", "flashinfer-fa3"), 0.014, 0.08),
        ("h100", (PRECOMPUTED, FA2), 0.013, 0.08),
        ("h100", (FA2, "flashinfer-batch-attention"), 0.010, 0.08),
    ],
)
def test_the_choice_loses_little_on_layers_left_out(draw, backends, mean, last):
    loss = loss_on_layers_left_out(draw, backends)
    assert 0.002 < loss.mean() < mean, "0 would be the layers themselves"
    assert loss.quantile(0.95) < last


def test_over_all_backends_it_loses_at_most_two_percent_in_the_mean():
    loss = neighbour_loss()
    assert len(loss) == 884
    assert 0.005 < loss.mean() < 0.02


@pytest.mark.parametrize("draws", [("all rivals", "all layers"), ("h100", "all layers")])
def test_a_recorded_batch_is_expected_about_as_it_was_measured(draws):
    batches = recorded_batches(draws[0]).dropna(subset=[FA2, PRECOMPUTED]).head(60)
    errors = []
    for _, row in batches.iterrows():
        expected = expected_ratios(row.case, FA2, [FA2, PRECOMPUTED], draws)
        assert expected[FA2].ratio == pytest.approx(1)
        errors.append(np.log(expected[PRECOMPUTED].ratio * row[FA2] / row[PRECOMPUTED]))
    assert np.abs(errors).mean() < 0.02
    assert expected[PRECOMPUTED].batches == 952
    cuda_cores = "flashinfer-cuda-cores"
    other = expected_ratios(row.case, FA2, [cuda_cores], draws)[cuda_cores]
    assert other.batches == 604
    assert other.gpu == "NVIDIA H200", "no H100 has measured it"


def test_without_batches_of_the_kernel_or_of_the_backend_nothing_is_expected():
    rivals = [FA2, XQA, "flashinfer-fa3"]
    draws = ("all rivals", "all layers")
    usual = expected_ratios(read_case("heads=8/1 page=16 lens=4096x8"), FA2, rivals, draws)
    assert {*usual} == {*rivals}
    wide = read_case("heads=8/1 head_dim=256 page=16 lens=4096x8")
    assert {*expected_ratios(wide, FA2, rivals, draws)} == {FA2, "flashinfer-fa3"}
    unknown = read_case("heads=8/1 head_dim=512 page=16 lens=4096x8")
    assert expected_ratios(unknown, FA2, rivals, draws) == {}
    assert expected_ratios(wide, "vllm-flash-attn-3", rivals, draws) == {}
    most = max(each.ratio for each in usual.values())
    assert most < np.exp(MOST)


@pytest.mark.parametrize(
    "text",
    [
        "heads=8/1 head_dim=80 page=16 lens=1",
        "heads=32/8 head_dim=64 kv_dtype=float8_e4m3fn page=1 lens=3000000x2",
    ],
)
def test_every_call_has_a_shape(text):
    assert np.isfinite(shape_of(read_case(text))).all()


def test_the_table_is_sorted_by_what_is_expected_and_the_brief_says_the_same():
    advice = attnlib.advise("heads=7/1 page=16 lens=4000x5+77", library="vllm==0.33.0", gpu="h200")
    table = advice.table().set_index("backend")["time / engine's choice: expected"]
    assert table.is_monotonic_increasing
    assert table["vllm-flash-attn-3"] == 1
    told = advice.short_card().table.set_index("backend").speedup
    assert float(told[XQA]) == round(1 / advice.expected[XQA].ratio, 2)
    ragged = attnlib.advise("heads=7/1 page=1 lens=4000x5+77", gpu="h200")
    assert XQA not in ragged.expected, "it refuses pages of 1"


def test_the_fix_of_a_known_problem_has_one_size_in_both_places():
    text = "mode=mla heads=16/1 page=1 lens=40000x8+1024x100"
    advice = attnlib.advise(text, engine="sglang==0.5.23", gpu="h100")
    (here,) = [known.here for known in advice.known if known.here]
    table = advice.short_card().table.set_index("backend")
    told = table.loc["sglang-flash-attn-3-mla@bounded"]
    assert here.nearest == int(told.batches) == 3
    assert float(told.speedup) == round(here.slowdown, 2) == 1.12
