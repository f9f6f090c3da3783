"""Planning of fa2 in the worker, held to every word."""

from dataclasses import replace

import numpy as np
import pytest
from support.records import measure

from attnlib.core import AttnSpec, PlanShape
from attnlib.measure.calls.base import Bench
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.form import Item
from attnlib.studies.plan import measure as module
from attnlib.studies.plan.case import PlanCase
from attnlib.studies.plan.measure import ALONE, PlanSubject

DECODE = DecodeCase(AttnSpec(8, 2, 64, 16), 5, 900, "retrieval")
CASE = PlanCase(DECODE)
SMALL = PlanSubject(Bench("cpu", {"num_sms": 4}, {}))


@pytest.mark.parametrize("page_size", [1, 16])
def test_planning_alone_is_held_to_every_word(page_size):
    case = PlanCase(replace(DECODE, spec=replace(DECODE.spec, page_size=page_size)), 2)
    fields = SMALL.measure(Item(ALONE, "host", case))
    assert fields["status"] == "ok" and fields["run_us"]
    assert fields["oracle_error"] == 0.0
    assert fields["oracle_budget"] == 0.0
    assert fields["oracle_rows"] == 5


def test_a_plan_for_a_window_is_made_for_what_its_blocks_see():
    case = PlanCase(replace(DECODE, spec=replace(DECODE.spec, window=800)))
    assert SMALL.measure(Item(ALONE, "host", case))["status"] == "ok"
    shapes = [PlanShape.of(layer.spec, np.array([900]), 4) for layer in (case, DECODE)]
    assert [(shape.window, shape.most_seen) for shape in shapes] == [(799, 815), (-1, 2**31 - 1)]


@pytest.mark.parametrize("output", ["words", "kv_indptr", "kv_indices", "kv_last_page_len"])
def test_one_wrong_word_of_a_plan_is_incorrect(output, monkeypatch):
    honest = module.build_fa2_plan

    def wrong(**call):
        honest(**call)
        if output in call:
            call[output][0] += 1

    monkeypatch.setattr(module, "build_fa2_plan", wrong)
    fields = SMALL.measure(Item(ALONE, "host", CASE))
    assert fields["status"] == "incorrect"
    assert fields["reason"] == "wrong words 1 over budget 0"
    assert "run_us" not in fields


@pytest.mark.parametrize(
    "backend, timer, words",
    [
        ("fa2", "host", "backend of a plan must be one of fa2-plan-alone, got"),
        (ALONE, "graph-cold", "timer must not need copies"),
    ],
)
def test_what_measures_no_plan_is_refused(backend, timer, words):
    record = measure(Item(backend, timer, CASE))
    assert record.status == "error" and words in record.reason


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
def test_on_a_gpu_every_plan_is_right_and_planning_is_one_launch(q_len):
    case = PlanCase(DecodeCase(AttnSpec(32, 8, 128, 16), 40, 20000, "one_long"), q_len)
    record = measure(Item(ALONE, "graph", case), "cuda")
    assert record.status == "ok", record.reason
    assert sum(kernel["launches"] for kernel in record.kernels) == 1
