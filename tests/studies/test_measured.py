"""The measured policy on the published records: its regret, its confidence, where it comes from."""

from __future__ import annotations

import numpy as np
import pytest

from attnlib.kinds.lengths import sample_seq_lens
from attnlib.run import store
from attnlib.run.frame import decode_rows
from attnlib.studies.backend_policy import learn as measured
from attnlib.studies.backend_policy.study import (
    FLASHINFER,
    HELD_OUT_CASES,
    KNOWN_CASES,
    SPECS,
    STUDY,
)

POOLS = {"flashinfer": FLASHINFER, "all": (*FLASHINFER, "fa3")}


@pytest.fixture(scope="module")
def frame():
    return store.load(STUDY.name, STUDY.reference_machine)


def test_no_held_out_case_is_a_known_one():
    assert not set(KNOWN_CASES) & set(HELD_OUT_CASES)
    assert {case.spec for case in HELD_OUT_CASES} == {case.spec for case in KNOWN_CASES}


def test_specs_have_odd_groups_and_some_that_cuda_cores_refuse(frame):
    assert {spec.group_size for spec in SPECS} >= {1, 2, 3, 4, 5, 6, 7, 8, 16}
    refused = frame[(frame.backend == "flashinfer-cuda-cores") & (frame.status == "refused")]
    assert set(refused.heads) == {"40/8", "12/2", "28/4", "64/4"}


@pytest.mark.parametrize("pool", POOLS)
def test_the_policy_of_the_known_cases_loses_little_in_the_held_out_ones(frame, pool):
    regret, confidence = held_out(frame, POOLS[pool])
    assert np.log(regret).mean() <= np.log(1.004)
    assert regret.max() <= 1.05
    sure = confidence > 0.99
    assert sure.sum() >= 40 and (regret[sure] == 1).all()


def held_out(frame, backends) -> tuple[np.ndarray, np.ndarray]:
    """Chosen time over best, and the confidence, of each held-out case."""
    policy = measured.policy_of(frame, KNOWN_CASES)
    truths, found = measured.case_times(decode_rows(frame)), []
    for case in HELD_OUT_CASES:
        truth = truths[case]
        lens = sample_seq_lens(case).tolist()
        pick = measured.measured(case.spec, lens, backends=backends, policy=policy)
        best = min(us for name, us in truth.items() if name in backends)
        found.append((truth[pick.backend] / best, pick.confidence))
    regret, confidence = zip(*found, strict=True)
    return np.array(regret), np.array(confidence)


def test_without_a_gpu_the_policy_is_that_of_the_published_machine(without_gpu, monkeypatch):
    monkeypatch.delenv("ATTNLIB_DATA", raising=False)
    policy = measured.current()
    assert policy.gpu_id == STUDY.reference_machine.removeprefix("nvidia-h200-")
    assert set(policy.points) == set(SPECS)
    assert policy.releases == dict.fromkeys(FLASHINFER, "0.6.4")


def test_a_machine_without_records_is_told_how_to_make_them(without_gpu):
    with pytest.raises(RuntimeError, match="python -m attnlib measure backend_policy"):
        measured.current()


def test_a_frame_with_two_releases_of_a_backend_is_refused(frame):
    rows = frame[frame.backend == "flashinfer-fa2"].head(2)
    rows = rows.assign(release=["0.6.3", "0.6.4"])
    with pytest.raises(ValueError, match="two of flashinfer-fa2"):
        measured.policy_of(rows)


def test_every_measured_case_has_one_winner(frame):
    counts = measured.fastest_counts(frame)
    assert {sum(won.values()) for won in counts.values()} == {
        len(KNOWN_CASES + HELD_OUT_CASES) // len(SPECS)
    }
