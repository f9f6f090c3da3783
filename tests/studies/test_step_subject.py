"""Steps of layers in the worker."""

import pytest
import torch
from support.records import measure

from attnlib.core import AttnSpec, backends
from attnlib.measure.calls.base import Bench
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.form import Item
from attnlib.studies.step import scheduler_metadata
from attnlib.studies.step.case import EACH, ONCE, StepCase
from attnlib.studies.step.measure import StepSubject, run_layers

WHOLE = AttnSpec(16, 2, 128, 16)
WINDOW = AttnSpec(16, 2, 128, 16, window=90)
STEP = StepCase(DecodeCase(WHOLE, 5, 300, "ragged"), layers=4)
LOCAL = StepCase(DecodeCase(WINDOW, 5, 300, "ragged"), layers=4)
LAYERS = {"flash-attn-3-step-each": (4, 4), "flash-attn-3-step-once": (4, 1)}
"""Launches of attention, and of the library's preparation."""


def test_without_the_library_a_case_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("attnlib.core.backends.unavailable", lambda name: "install it")
    record = measure(Item("flash-attn-3-step-once", "host", STEP))
    assert record.status == "refused"
    assert record.reason == "install it"


@pytest.mark.skipif(torch.cuda.is_available(), reason="stand-in and interpreter run on the CPU")
@pytest.mark.parametrize("case", [STEP, LOCAL], ids=["whole", "window"])
@pytest.mark.parametrize("backend", (EACH, ONCE))
def test_every_way_of_making_a_step_gives_the_right_output(backend, case, fake_fa3):
    bench = Bench("cpu", {"l2_mib": 0.01}, {})
    work, caches, judge = StepSubject(bench).prepare(case)
    for _ in range(2):
        assert judge.check(run_layers(backend, work, caches, STEP.layers)).passed
    schedules = 0 if "each" in backend else 2
    assert len(fake_fa3.scheduled) == schedules
    assert len(fake_fa3.launched) == 2 * STEP.layers


@pytest.mark.gpu
@pytest.mark.parametrize("backend", (EACH, ONCE))
def test_a_step_is_right_and_launches_what_its_name_says(backend):
    if reason := backends.unavailable("flash-attn-3"):
        pytest.skip(reason)
    record = measure(Item(backend, "graph", STEP), "cuda")
    assert record.status == "ok", record.reason
    counts = [launches(record, word) for word in ("FlashAttnFwdSm90", "prepare_varlen")]
    assert tuple(counts) == LAYERS[backend]


def launches(record, word):
    """Launches of kernels whose name has the word."""
    return sum(kernel["launches"] for kernel in record.kernels if word in kernel["name"])


def test_a_mismatch_says_what_the_schedule_was_made_for_and_what_it_was_used_for():
    table = scheduler_metadata.mismatch_table()
    sides = table[["the calls differ in", "made for -> used for", "output without guard"]]
    rows = set(map(tuple, sides.to_numpy()))
    assert ("batch_size", "5 -> 8", "wrong") in rows
    assert ("batch_size", "8 -> 5", "right") in rows
    assert ("num_splits", "29 -> 2", "wrong") in rows
    assert ("num_qo_heads, num_kv_heads", "4, 1 -> 16, 4", "wrong") in rows
    assert set(table[table["made for -> used for"] == "-"]["the calls differ in"]) == {"nothing"}
    assert table["error of the worst row"][0] == "22 x the row"
