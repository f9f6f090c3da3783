"""The measured policy: its regret and confidence, and a fit that finds the rates of its times."""

import numpy as np
import pandas as pd
import pytest
from support.frames import frame as frame_of
from support.frames import row

from attnlib.core.policy.plans import PLANS
from attnlib.core.policy.times import Calls, Gpu, Rates, planned_load, predict
from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.run import store
from attnlib.studies import layer_policy, more_layers, other_kernels, other_layers
from attnlib.studies.layer_policy import learn as measured
from attnlib.studies.layer_policy.study import CASES, STUDY

SPEC, SMS = AttnSpec(16, 8, 128, 16), 132
H200 = Gpu(num_sms=SMS, l2_mib=60.0)


@pytest.fixture(scope="module")
def frame():
    return store.load(STUDY.name, STUDY.reference_machine)


def test_without_a_gpu_the_policy_is_that_of_the_published_machine(without_gpu, monkeypatch):
    with pytest.raises(RuntimeError, match="python -m attnlib measure layer_policy"):
        measured.current()
    monkeypatch.delenv("ATTNLIB_DATA")
    policy = measured.current()
    taught = (layer_policy, more_layers, other_layers, other_kernels)
    machines = sorted(each.STUDY.reference_machine for each in taught)
    assert policy.gpu_id == ", ".join(name.removeprefix("nvidia-h200-") for name in machines)
    assert (policy.study, policy.timer) == (", ".join(measured.TAUGHT_BY), "graph-cold")
    assert set(policy.points) == {spec for each in taught for spec in each.LAYERS}
    assert policy.l2_mib == 0
    assert policy.releases == dict.fromkeys(layer_policy.FLASHINFER, "0.7.2")


def test_gpus_of_one_kind_teach_together_and_no_two_are_compared(frame):
    rows, other = (frame[frame.case.isin(cases)] for cases in (CASES[:6], CASES[6:12]))
    both = pd.concat([rows, other.assign(gpu_id="another")])
    found = measured.policy_of(both)
    assert found.gpu_id == f"{rows.gpu_id.iloc[0]}, another"
    assert sum(map(len, found.points.values())) == 12
    with pytest.raises(ValueError, match="gpu_id must be the same in all rows of a comparison"):
        measured.case_times(both)
    with pytest.raises(ValueError, match="gpu_id must be the same.* got 'NVIDIA H200' and 'A100'"):
        measured.policy_of(pd.concat([rows, other.assign(gpu="A100")]))


def test_a_frame_with_two_releases_of_a_backend_is_refused(frame):
    rows = frame[frame.backend == "flashinfer-fa2"].head(2)
    with pytest.raises(ValueError, match="two of flashinfer-fa2"):
        measured.policy_of(rows.assign(release=["0.6.3", "0.6.4"]))


SLOW = {"start_us": 6.0, "merge_us": 1.5, "item_us": 0.01, "split_us": 0.02}
TRUTH = Rates(**SLOW, memory_gbps=4000.0, token_ns=(12.0, 12.0, 13.0, 14.0, 16.0, 20.0))


def test_what_was_measured_teaches_points_and_rates():
    sizes = [(3, 50), (9, 4000), (1, 700), (2, 90_000)]
    cases = [DecodeCase(SPEC, *size) for size in sizes]
    rows = [
        row(case, name, 0, us, l2_mib=60.0)
        for case, size in zip(cases, sizes, strict=True)
        for name, us in times_of([size[1]] * size[0]).items()
        if (name, size) != ("fa3", sizes[2])
    ]
    policy = measured.policy_of(frame_of(*rows))
    (points,) = policy.points.values()
    ran = {(p.batch_size, p.longest): len(p.run_us) for p in points}
    assert ran == dict.fromkeys(sizes, 2) | {sizes[2]: 1}
    assert {name: list(kernels) for name, kernels in policy.rates.items()} == dict.fromkeys(
        ("fa3", "flashinfer-fa2"), [(1, 128, "bfloat16", "bfloat16")]
    )
    assert max(abs(p.log_error(name)) for p in points for name in p.run_us) < 0.1


def times_of(lens):
    """What `TRUTH` says of two backends."""
    names = ("fa3", "flashinfer-fa2")
    return {name: float(predict(TRUTH, [load(name, lens)])[0]) for name in names}


def load(backend, lens):
    return planned_load(backend, SPEC, np.asarray(lens).tobytes(), H200)


@pytest.mark.parametrize("backend", ["fa3", "flashinfer-cuda-cores"])
def test_slopes_are_the_differences_of_log_times_that_a_small_step_makes(backend):
    lens = [[1000] * 4, [50] * 3, [9000, *[300] * 60], [*range(200, 8000, 20)]]
    calls, at, step = Calls([load(backend, each) for each in lens], 6), TRUTH.logs, 1e-5
    up, down = (
        np.transpose([np.log(calls.run_us(at + each)) for each in sign * step * np.eye(len(at))])
        for sign in (1, -1)
    )
    wanted = (up - down) / (2 * step)
    assert measured.log_slopes(calls, at) == pytest.approx(wanted, abs=1e-7)
    assert (np.abs(wanted[:, :5]).max(axis=0) > 1e-3).all()


@pytest.mark.parametrize("backend", list(PLANS))
def test_a_fit_finds_the_times_that_rates_made(backend):
    rng = np.random.default_rng(3)
    ends = [(2 ** rng.integers(7, 15), 2 ** rng.integers(0, 8)) for _ in range(120)]
    loads = [load(backend, rng.integers(1, *each).tolist()) for each in ends]
    times = predict(TRUTH, loads)
    found = predict(measured.fit(loads, times), loads)
    assert np.abs(np.log(found / times)).max() < 0.06
    assert np.sqrt(np.mean(np.log(found / times) ** 2)) < 0.02


def test_a_fit_of_few_calls_stays_near_what_is_usual():
    lens = [[1000] * 4, [50] * 3]
    loads = [load("fa3", each) for each in lens]
    found = measured.fit(loads, [14.0, 11.0])
    assert 1 < found.start_us < 15 and 2000 < found.memory_gbps < 9000
    assert predict(found, loads) == pytest.approx([14.0, 11.0], rel=0.1)
    for wrong, times in ((loads, [14.0]), ([], [])):
        with pytest.raises(ValueError, match="must have a time for each of one or more loads"):
            measured.fit(wrong, times)
