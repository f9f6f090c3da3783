"""Injected failures: each case differs as it says, and the guard refuses all but the harmless."""

from dataclasses import replace

import pytest

from attnlib.core import backends
from attnlib.kinds.mismatch import measure as mismatch
from attnlib.kinds.mismatch.measure import MISMATCHES, run_one

HARMLESS = ("none", "lengths-grown", "lengths-shrunk")
NAMES = [case.name for case in MISMATCHES]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The same cases over at most 2048 tokens: the oracle runs on the CPU here."""
    shrunk = tuple(
        replace(case, case=replace(case.case, kv_len=min(case.case.kv_len, 2048)))
        for case in MISMATCHES
    )
    monkeypatch.setattr(mismatch, "MISMATCHES", shrunk)


@pytest.mark.parametrize("name", NAMES)
def test_the_guard_refuses_all_but_changed_lengths_before_the_launch(fake_fa3, name):
    found = run_one(name, guard=True, device="cpu")
    if name in HARMLESS:
        assert (found["outcome"], found["reason"]) == ("harmless", "")
        assert found["relative_error"] <= found["budget"]
    else:
        assert (found["outcome"], fake_fa3.launched) == ("refused by the guard", [])
        assert "must be" in found["reason"]


@pytest.mark.parametrize("name", NAMES)
def test_past_the_guard_the_metadata_reaches_the_kernel(fake_fa3, name):
    run_one(name, guard=False, device="cpu")
    (launched,) = fake_fa3.launched
    if name == "graph-padding":  # the graph's buffer has the size that the call expects
        assert len(launched["scheduler_metadata"]) == 33
    assert launched["scheduler_metadata"] is not None


def test_names_are_unique_and_an_unknown_one_lists_them():
    assert len(set(NAMES)) == len(NAMES)
    with pytest.raises(ValueError, match=r"name must be one of none, lengths-grown.*got 'typo'"):
        run_one("typo", guard=True, device="cpu")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "crashed"),
        (RuntimeError("scheduler_metadata must have shape (metadata_size)"), "refused by the libr"),
    ],
)
def test_an_error_of_the_call_is_told_apart_from_a_lost_process(
    fake_fa3, monkeypatch, error, outcome
):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(fake_fa3, "flash_attn_with_kvcache", fail)
    found = run_one("head-counts", guard=False, device="cpu")
    assert found["outcome"].startswith(outcome) and str(error) in found["reason"]


def test_a_finite_but_wrong_output_is_wrong(fake_fa3, monkeypatch):
    right = fake_fa3.flash_attn_with_kvcache
    monkeypatch.setattr(fake_fa3, "flash_attn_with_kvcache", lambda *a, **k: right(*a, **k) * 2)
    found = run_one("head-counts", guard=False, device="cpu")
    assert found["outcome"] == "wrong" and found["relative_error"] > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_the_guard_refuses_every_mismatch_and_costs_no_right_call(name):
    if reason := backends.unavailable("flash-attn-3"):
        pytest.skip(reason)
    found = run_one(name, guard=True)
    expected = "harmless" if name in HARMLESS else "refused by the guard"
    assert found["outcome"] == expected, found
