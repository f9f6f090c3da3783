"""Steps of vLLM: ratios pair the rounds, and a second process of one backend shows the noise."""

import numpy as np
import pytest

from attnlib.studies.engine import vllm_steps


def test_a_ratio_is_the_geometric_mean_over_rounds_that_have_both_backends():
    table = vllm_steps.step_ratios(20).set_index(["batch", "arm", "base"])
    steps = vllm_steps.results("time")
    steps = steps[(steps.layers == 20) & (steps.batch == "40 x 300, one of 7,900")]
    us = steps.pivot(index="round", columns="arm", values="step_us")
    row = table.loc["40 x 300, one of 7,900", "flashinfer-planned", "flashinfer"]
    logs = np.log(us["flashinfer-planned"] / us["flashinfer"])
    assert row.ratio == pytest.approx(np.exp(logs.mean()))
    assert row.rounds == 6
    assert row.low < row.ratio < row.high < 1
    assert row.verdict == "faster"


def test_no_second_process_of_a_backend_differs_from_the_first():
    for layers in (8, 20):
        table = vllm_steps.step_ratios(layers)
        again = table[table.arm.str.endswith("-again")]
        assert len(again) == 3
        assert not again.verdict.isin(["faster", "slower"]).any()


def test_a_round_that_compiled_a_kernel_is_left_out():
    table = vllm_steps.step_ratios(8)
    compiled = table[(table.arm == "triton") & (table.batch == "40 x 300, one of 7,900")]
    assert compiled.rounds.tolist() == [5]
