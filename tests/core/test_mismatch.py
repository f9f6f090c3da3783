"""Metadata that does not fit its call: the guard refuses all of it but other lengths.

data/captures/metadata_mismatch.json has what came of each case on an H200, in a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import mismatch as mismatches
from support.library_fakes import SMS
from support.mismatch import BY_NAME, MISMATCHES, build, outcome, run_guarded, run_unguarded

from attnlib.core import backends
from attnlib.core.schedule import library
from attnlib.core.schedule.flash_attn3 import sm_count

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "data" / "captures" / "metadata_mismatch.json").read_text())
RECORDED = {row["name"]: row for row in RECORDED}
HARMLESS = ("none", "lengths-grown", "lengths-shrunk")


def with_guard(name):
    """The recorded outcome with the guard, without the words of its message at the time."""
    return RECORDED[name]["with guard"].partition(":")[0]


def test_every_mismatch_is_on_record_and_says_what_differs():
    assert [*RECORDED] == [mismatch.name for mismatch in MISMATCHES]
    for mismatch in MISMATCHES:
        differs = RECORDED[mismatch.name]["differs"].split(", ")
        assert set(mismatch.metadata) <= {*differs}


@pytest.mark.parametrize("mismatch", MISMATCHES, ids=lambda mismatch: mismatch.name)
def test_the_model_gives_the_splits_and_overruns_on_record(mismatch, fake_fa3):
    splits, overruns = mismatches.predict(build(mismatch, "cpu"))
    row = RECORDED[mismatch.name]
    assert splits == row["splits in metadata"]
    assert overruns == (row["overruns"] == "yes")


@pytest.mark.parametrize("mismatch", MISMATCHES, ids=lambda mismatch: mismatch.name)
def test_the_guard_answers_before_the_launch_as_on_record(mismatch, fake_fa3):
    assert outcome(run_guarded, mismatch, "cpu") == with_guard(mismatch.name)
    assert bool(fake_fa3.launched) == (mismatch.name in HARMLESS)


def test_past_the_guard_the_words_reach_the_kernel_at_the_size_that_it_expects(fake_fa3):
    assert outcome(run_unguarded, BY_NAME["graph-padding"], "cpu") == "output right"
    (call,) = fake_fa3.launched
    assert len(call["scheduler_metadata"]) == 33


def test_an_output_outside_the_budget_is_wrong(fake_fa3, monkeypatch):
    right = fake_fa3.flash_attn_with_kvcache

    def twice(*tensors, **options):
        return right(*tensors, **options) * 2

    monkeypatch.setattr(fake_fa3, "flash_attn_with_kvcache", twice)
    assert outcome(run_unguarded, BY_NAME["window"], "cpu") == "wrong"


def test_a_refusal_of_the_library_is_no_lost_process(fake_fa3, monkeypatch):
    words = "scheduler_metadata must have shape (metadata_size)"

    def fail(*tensors, **options):
        raise RuntimeError(words)

    monkeypatch.setattr(fake_fa3, "flash_attn_with_kvcache", fail)
    assert outcome(run_unguarded, BY_NAME["causal"], "cpu") == "refused by the library"
    words = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match=words):
        outcome(run_unguarded, BY_NAME["causal"], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_NAME)
def test_on_a_gpu_each_mismatch_ends_as_on_record(name):
    if reason := backends.unavailable("flash-attn-3"):
        pytest.skip(reason)
    if library.build() != "upstream" or sm_count(torch.device("cuda:0")) != SMS:
        pytest.skip(f"the record is of upstream's FlashAttention-3 on {SMS} multiprocessors")
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
    # A process of its own: without the guard it may write out of bounds, and die.
    done = subprocess.run(
        [sys.executable, mismatches.__file__, name],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    guarded, *unguarded = done.stdout.splitlines()
    row = RECORDED[name]
    assert guarded == with_guard(name), done.stderr[-2000:]
    # What comes of a write past the buffers depends on what lies behind them.
    if not row["overruns"]:
        assert unguarded == [row["without guard"]], done.stderr[-2000:]
