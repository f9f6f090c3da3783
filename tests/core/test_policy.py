"""A policy: rates choose, near cases correct them, the file is whole or not there."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.core.policy import buckets
from attnlib.core.policy.policy import Point, Policy, kernel_of, load, save
from attnlib.core.policy.times import Gpu, Rates, planned_load, predict
from attnlib.core.spec import AttnSpec

SPEC, MHA, APART = (AttnSpec(32, kv_heads, 128, 16) for kv_heads in (8, 32, 16))
FA2, FA3 = "flashinfer-fa2", "flashinfer-fa3"
RATES = {
    FA2: Rates(7.0, 1.0, 0.01, 0.01, 4200.0, (13.0,) * 6),
    FA3: Rates(4.0, 1.0, 0.001, 0.01, 9000.0, (13.0,) * 5),
}
H200 = Gpu(num_sms=132, l2_mib=60.0)


def by_rates(spec, lens):
    loads = {name: [planned_load(name, spec, np.array(lens).tobytes(), H200)] for name in RATES}
    return {name: float(predict(rates, loads[name])[0]) for name, rates in RATES.items()}


def point(batch, kv_len, **factors):
    """A measured case of equal lengths whose times are `factors` of those by rates."""
    predicted = by_rates(SPEC, [kv_len] * batch)
    measured = {n: us * factors.get(n.split("-")[1], 1.0) for n, us in predicted.items()}
    return Point(batch, float(kv_len), kv_len, measured, predicted)


def only(point, *names):
    return replace(point, run_us={name: point.run_us[name] for name in names})


POINTS = tuple(
    point(batch, kv_len) for batch, kv_len in product((1, 4, 16, 64), (128, 512, 2048, 8192, 32768))
)


def policy(**changes):
    refused = tuple(only(each, FA2) for each in POINTS)
    apart = (only(point(1, 100), FA2), only(point(1, 200), FA3))
    told = {"gpu": "Test GPU", "gpu_id": "0badcafe", "num_sms": 132, "l2_mib": 60.0}
    told |= {"study": "s", "timer": "graph"}
    told |= {"releases": {FA2: "1.0"}, "points": {SPEC: POINTS, MHA: refused, APART: apart}}
    told |= {"rates": {name: {kernel_of(name, SPEC): rates} for name, rates in RATES.items()}}
    return Policy(**(told | changes))


@pytest.mark.parametrize("lens", [[60] * 2, [90, 40], [4096] * 8, [9000] + [10] * 30])
def test_rates_decide_where_cases_agree_with_them(lens):
    times = by_rates(SPEC, lens)
    pick, told = policy().choose(SPEC, lens), policy().predict(SPEC, lens)
    assert {name: each.us for name, each in told.items()} == pytest.approx(times)
    best = min(times, key=times.get)
    assert pick.backend == best
    assert pick.slowdown == pytest.approx({n: us / times[best] for n, us in times.items()})


def test_near_cases_correct_the_rates_and_far_ones_do_not():
    slow = tuple(point(p.batch_size, p.longest, fa2=4.0) if p.longest <= 512 else p for p in POINTS)
    plain, corrected = policy(), policy(points={SPEC: slow})
    near, far = [300] * 8, [20_000] * 8
    assert plain.choose(SPEC, near).backend == plain.choose(SPEC, far).backend == FA2
    assert corrected.choose(SPEC, near).backend == FA3
    assert corrected.choose(SPEC, far).backend == FA2


def test_a_choice_is_less_sure_the_closer_the_second_and_the_more_cases_differ():
    tied, ahead = (policy().choose(SPEC, lens) for lens in ([110], [16_000] * 4))
    assert tied.slowdown[FA2] == pytest.approx(1, abs=0.5) and ahead.confidence > 0.99
    factors = np.random.default_rng(1).uniform(0.5, 2, len(POINTS))
    mixed = tuple(
        point(p.batch_size, p.longest, fa2=f) for p, f in zip(POINTS, factors, strict=True)
    )
    doubtful = policy(points={SPEC: mixed}).choose(SPEC, [16_000] * 4)
    assert 0.5 <= doubtful.confidence < ahead.confidence


def test_a_backend_that_ran_the_spec_nowhere_is_refused_and_one_not_asked_for_left_out():
    pick = policy().choose(MHA, [100])
    assert (pick.backend, pick.refused, pick.confidence) == (FA2, (FA3,), 1.0)
    asked = policy().choose(SPEC, [200], backends=[FA2])
    assert (asked.backend, asked.slowdown, asked.refused) == (FA2, {FA2: 1.0}, ())


def test_a_case_that_a_backend_failed_in_is_not_held_against_it():
    broken = only(point(16, 2048), FA3)
    points = tuple(broken if (p.batch_size, p.longest) == (16, 2048) else p for p in POINTS)
    found = policy(points={SPEC: points}).predict(SPEC, [2048] * 16)
    assert {n: each.us for n, each in found.items()} == pytest.approx(by_rates(SPEC, [2048] * 16))


def test_a_batch_beyond_the_measured_ones_says_so():
    batches = ([1000] * 8, [1000] * 512, [100_000])
    assert [policy().choose(SPEC, lens).inside for lens in batches] == [True, False, False]


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=300))
def test_any_lengths_get_a_finite_choice_with_the_chosen_first(lens):
    pick = policy().choose(SPEC, lens)
    assert next(iter(pick.slowdown.items())) == (pick.backend, 1.0)
    assert all(np.isfinite(value) and value >= 1 for value in pick.slowdown.values())


@pytest.mark.parametrize(
    ("spec", "lens", "backends", "message"),
    [
        (SPEC, [5, 0], (), "seq_lens must hold lengths >= 1"),
        (SPEC, [5], ("fast",), f"backends must be of {FA2}, {FA3}, got fast"),
        (MHA, [5], (FA3,), "backends must hold one that ran"),
        (replace(SPEC, window=64), [5], (), "must hold one that ran .*window=64"),
        (replace(SPEC, sinks=True), [5], (), "must hold one that ran .*sinks=True"),
        (AttnSpec(8, 1, 64, 1, "bfloat16", "float8_e4m3fn"), [5], (FA3,), "must hold one that ran"),
    ],
)
def test_what_cannot_be_chosen_from_raises(spec, lens, backends, message):
    if "one that ran" in message:
        assert policy().predict(spec, lens, backends=backends) == {}
    with pytest.raises(ValueError, match=message):
        policy().choose(spec, lens, backends=backends)


def test_a_layer_that_was_not_measured_is_answered_with_its_own_plan_by_its_kernels_or_kin():
    lens, found = [3000] * 20, policy(points={SPEC: POINTS})
    specs = [AttnSpec(*sizes) for sizes in ((16, 4, 128, 16), (28, 4, 128, 1), (32, 8, 64, 16))]
    picks = [found.choose(spec, lens) for spec in specs]
    assert [pick.apart for pick in picks] == [0, 0, 6], "a group of heads changes no rate"
    for spec, pick in zip(specs, picks, strict=True):
        times = by_rates(spec, lens)
        wanted = {name: us / min(times.values()) for name, us in times.items()}
        assert pick.slowdown == pytest.approx(wanted)
        assert pick.backend == min(times, key=times.get)
    sure = [found.choose(AttnSpec(32, 8, dim, 16), [110]).confidence for dim in (128, 64)]
    assert 1 >= sure[0] > sure[1] >= 0.5
    fp8 = found.choose(AttnSpec(32, 8, 128, 16, "bfloat16", "float8_e4m3fn"), lens)
    assert (fp8.backend, fp8.refused) == (FA2, (FA3,)), "fa3 takes no FP8 cache"


def test_the_nearest_kernels_answer_together_for_one_that_was_not_measured():
    slow = {name: replace(each, start_us=each.start_us + 40) for name, each in RATES.items()}
    dims = {64: RATES, 256: slow}
    rates = {
        n: {(1, dim, "bfloat16", "bfloat16"): of[n] for dim, of in dims.items()} for n in RATES
    }
    known = {replace(SPEC, head_dim=64): POINTS}
    found, spec = policy(points=known, rates=rates), replace(SPEC, head_dim=128)
    kin = found.kin(FA2, kernel_of(FA2, spec))
    assert [away for away, _ in kin] == [6, 6] and found.choose(spec, [100]).apart == 6
    times = {dim: found.choose(replace(SPEC, head_dim=dim), [100]) for dim in (64, 256)}
    assert times[64].apart == times[256].apart == 0
    assert times[256].slowdown[FA2] < found.choose(spec, [100]).slowdown[FA2]


def test_a_table_of_buckets_says_what_the_policy_says_at_their_middles(monkeypatch):
    for name, value in (("BATCHES", (1, 4, 8)), ("LENGTHS", 18), ("SKEWS", 2)):
        monkeypatch.setattr(buckets, name, value)
    found = policy(points={SPEC: POINTS})
    table = buckets.table_of(found, SPEC)
    for lens in ([38], [152] * 8, [152] * 7, [1218] * 4, [9742] * 3):
        up = lens + lens[:1] * ((len(lens) in (3, 7)) * 1)
        chosen = found.choose(SPEC, up).backend
        assert buckets.look_up(table, len(lens), sum(lens), max(lens)) == chosen
    assert buckets.look_up(table, 10**6, 10**12, 10**9) in (FA2, FA3), "the last bucket is open"
    assert buckets.look_up(table, 0, 0, 0) == buckets.look_up(table, 1, 1, 1)


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind": "attnlib decode policy", "schema": 1}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json must be a 'attnlib decode policy'"):
        load(path)


def test_a_saved_policy_loads_as_it_was_and_an_engine_can_choose_without_torch_or_pandas(tmp_path):
    path = save(policy(), str(tmp_path / "policy.json"))
    assert load(path) == policy()
    assert [each.name for each in tmp_path.iterdir()] == ["policy.json"]
    code = f"""if True:
        import sys; from attnlib.core.spec import AttnSpec
        from attnlib.core.policy.policy import load
        found = load({str(path)!r}).choose(AttnSpec(32, 8, 128, 16), [4096] * 8)
        print(found.backend, sorted({{'torch', 'pandas', 'matplotlib'}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "flashinfer-fa2 []"
