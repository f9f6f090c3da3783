"""Steps of layers in the worker."""

import pytest
import torch
from support.records import measure

from attnlib.core import backends
from attnlib.core.spec import AttnSpec
from attnlib.kinds.base import Bench
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.item import Item
from attnlib.kinds.step.case import EACH, ONCE, StepCase
from attnlib.kinds.step.measure import StepSubject, run_layers

LAYERS_OF = (AttnSpec(16, 2, 128, 16, window=n) for n in (0, 90))
STEP, LOCAL = (StepCase(DecodeCase(spec, 5, 300, "ragged"), 4) for spec in LAYERS_OF)
LAYERS = {"flash-attn-3-step-each": (4, 4), "flash-attn-3-step-once": (4, 1)}
"""Launches of attention, and of the library's preparation."""


def test_without_the_library_a_case_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("attnlib.core.backends.unavailable", lambda name: "install it")
    record = measure(Item("flash-attn-3-step-once", "host", STEP))
    assert (record.status, record.reason) == ("refused", "install it")


@pytest.mark.skipif(torch.cuda.is_available(), reason="stand-in and interpreter run on the CPU")
@pytest.mark.parametrize("case", [STEP, LOCAL], ids=["whole", "window"])
@pytest.mark.parametrize("backend", (EACH, ONCE))
def test_every_way_of_making_a_step_gives_the_right_output(backend, case, fake_fa3):
    work, caches, judge = StepSubject(Bench("cpu", {"l2_mib": 0.01}, {})).prepare(case)
    for _ in range(2):
        assert judge.check(run_layers(backend, work, caches, STEP.layers)).passed
    schedules = 0 if "each" in backend else 2
    assert (len(fake_fa3.scheduled), len(fake_fa3.launched)) == (schedules, 2 * STEP.layers)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", (EACH, ONCE))
def test_a_step_is_right_and_launches_what_its_name_says(backend):
    if reason := backends.unavailable("flash-attn-3"):
        pytest.skip(reason)
    record = measure(Item(backend, "graph", STEP), "cuda")
    assert record.status == "ok", record.reason
    launched = {kernel["name"]: kernel["launches"] for kernel in record.kernels}
    words = ("FlashAttnFwdSm90", "prepare_varlen")
    counts = [sum(n for name, n in launched.items() if word in name) for word in words]
    assert tuple(counts) == LAYERS[backend]
