"""Injected failures: each case differs as it says, and the guard refuses all but the harmless."""

from dataclasses import replace

import pytest

from attnlib.core import backends
from attnlib.kinds.base import Bench
from attnlib.kinds.item import Item
from attnlib.kinds.mismatch import measure as mismatch
from attnlib.kinds.mismatch.case import MISMATCHES, MismatchCase

NEED_LENGTH = ("window", "wider-table")
HARMLESS = ("none", "lengths-grown", "lengths-shrunk")
NAMES = [case.name for case in MISMATCHES]


@pytest.fixture
def run(monkeypatch, fake_fa3):
    """Measure a mismatch of few tokens: the oracle runs on the CPU here."""
    shrunk = tuple(
        replace(case, case=replace(case.case, kv_len=min(case.case.kv_len, tokens)))
        for case in MISMATCHES
        for tokens in [2048 if case.name in NEED_LENGTH else 512]
    )
    monkeypatch.setattr(mismatch, "MISMATCHES", shrunk)
    monkeypatch.setattr(backends, "unavailable", lambda name: "")
    return lambda name, guard: measured(name, guard, "host", "cpu")


def measured(name, guard, timer, device):
    item = Item("flash-attn-3", timer, MismatchCase(name, guard))
    return mismatch.MismatchSubject(Bench(device, {}, {})).measure(item)


@pytest.mark.parametrize("name", NAMES)
def test_the_guard_refuses_all_but_changed_lengths_before_the_launch(run, fake_fa3, name):
    record = run(name, True)
    if name in HARMLESS:
        assert (record["status"], record["reported_backend"]) == ("ok", "harmless")
        assert record["oracle_error"] <= record["oracle_budget"] and record["run_us"]
    else:
        outcome = (record["status"], record["reported_backend"], fake_fa3.launched)
        assert outcome == ("refused", "refused by the guard", [])
        assert "must be" in record["reason"]


@pytest.mark.parametrize("name", NAMES)
def test_past_the_guard_the_metadata_reaches_the_kernel(run, fake_fa3, name):
    run(name, False)
    words = fake_fa3.launched[0]["scheduler_metadata"]
    assert len(words) == 33 or name != "graph-padding", "the size that the call expects"


def test_names_are_unique_and_an_unknown_one_lists_them(run):
    assert len(set(NAMES)) == len(NAMES)
    with pytest.raises(ValueError, match=r"name must be one of none, lengths-grown.*got 'typo'"):
        run("typo", True)


def test_an_error_of_the_call_is_not_a_lost_process(run, fake_fa3, monkeypatch):
    words = "scheduler_metadata must have shape (metadata_size)"

    def fail(*arguments, **options):
        raise RuntimeError(words)

    monkeypatch.setattr(fake_fa3, "flash_attn_with_kvcache", fail)
    record = run("head-counts", False)
    assert (record["status"], record["reported_backend"]) == ("error", "refused by the library")
    assert record["reason"] == words
    words = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match=f"CUDA error: {words}"):
        run("head-counts", False)


def test_a_finite_but_wrong_output_is_wrong(run, fake_fa3, monkeypatch):
    right = fake_fa3.flash_attn_with_kvcache
    monkeypatch.setattr(fake_fa3, "flash_attn_with_kvcache", lambda *a, **k: right(*a, **k) * 2)
    record = run("head-counts", False)
    assert (record["status"], record["reported_backend"]) == ("incorrect", "wrong")
    assert record["oracle_error"] > 0.9 and "cap of the call" in record["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_the_guard_refuses_every_mismatch_and_costs_no_right_call(name):
    if reason := backends.unavailable("flash-attn-3"):
        pytest.skip(reason)
    record = measured(name, True, "eager", "cuda")
    expected = "harmless" if name in HARMLESS else "refused by the guard"
    assert record["reported_backend"] == expected, record
    if name == "head-counts":
        assert "num_qo_heads must be 4, got 16" in record["reason"]
