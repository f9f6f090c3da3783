"""A policy: near cases decide, refusals are kept apart, the file is whole or not there."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.batch import AttnSpec
from attnlib.policy import Point, Policy, load, save

SPEC, MHA, APART = (AttnSpec(32, kv_heads, 128, 16) for kv_heads in (8, 32, 16))
FAST_UP_TO = 1024
"""`short` is the fastest up to this many tokens, `long` beyond."""


def times(batch: int, kv_len: int) -> dict[str, float]:
    ratio = (kv_len / FAST_UP_TO) ** 0.5
    return {"short": 10.0 * batch * ratio, "long": 10.0 * batch}


def policy(**changes: object) -> Policy:
    points = tuple(
        Point(batch, float(kv_len), kv_len, times(batch, kv_len))
        for batch, kv_len in product((1, 4, 16, 64), (128, 512, 2048, 8192, 32768))
    )
    refused = tuple(Point(p.batch_size, p.mean_len, p.longest, {"long": 1.0}) for p in points)
    apart = (Point(1, 1.0, 1, {"long": 1.0}), Point(1, 2.0, 2, {"short": 1.0}))
    told = {"gpu": "Test GPU", "gpu_id": "0badcafe", "study": "s", "timer": "graph"}
    told |= {"releases": {"long": "1.0"}, "points": {SPEC: points, MHA: refused, APART: apart}}
    return Policy(**(told | changes))


@pytest.mark.parametrize(("kv_len", "chosen"), [(200, "short"), (800, "short"), (1300, "long")])
def test_the_side_of_the_crossover_decides(kv_len, chosen):
    assert policy().choose(SPEC, [kv_len] * 7).backend == chosen


def test_slowdowns_are_those_of_the_law_that_made_the_times():
    pick = policy().choose(SPEC, [4096] * 8)
    assert pick.slowdown["long"] == 1.0
    assert pick.slowdown["short"] == pytest.approx(2.0, rel=0.05)


def test_a_choice_near_the_crossover_is_less_sure_than_one_far_from_it():
    near, far = (policy().choose(SPEC, [n] * 4).confidence for n in (1030, 16000))
    assert 0.5 <= near < 0.9 < far <= 1.0


def test_a_backend_that_ran_the_spec_nowhere_is_refused_and_not_chosen():
    pick = policy().choose(MHA, [100])
    assert (pick.backend, pick.refused, pick.confidence) == ("long", ("short",), 1.0)


def test_a_case_that_a_backend_failed_in_is_not_held_against_it():
    broken = Point(16, 2048.0, 2048, {"short": 20.0})
    points = tuple(
        broken if (p.batch_size, p.longest) == (16, 2048) else p for p in policy().points[SPEC]
    )
    pick = policy(points={SPEC: points}).choose(SPEC, [2048] * 16)
    assert pick.backend == "long" and broken not in pick.nearest


def test_only_the_backends_asked_for_are_considered():
    pick = policy().choose(SPEC, [200], backends=["long"])
    assert (pick.backend, dict(pick.slowdown)) == ("long", {"long": 1.0})


def test_a_batch_beyond_the_measured_ones_says_so():
    assert policy().choose(SPEC, [1000] * 8).inside
    assert not policy().choose(SPEC, [1000] * 512).inside
    assert not policy().choose(SPEC, [100_000]).inside


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=300))
def test_any_lengths_get_a_finite_choice_with_the_chosen_first(lens):
    pick = policy().choose(SPEC, lens)
    assert next(iter(pick.slowdown.items())) == (pick.backend, 1.0)
    assert all(np.isfinite(value) and value >= 1 for value in pick.slowdown.values())
    assert len(pick.nearest) == 6


@pytest.mark.parametrize(
    ("spec", "lens", "backends", "message"),
    [
        (SPEC, [], (), "seq_lens must hold lengths >= 1"),
        (SPEC, [5, 0], (), "seq_lens must hold lengths >= 1"),
        (SPEC, [5], ("fast",), "backends must be of long, short, got fast"),
        (MHA, [5], ("short",), "backends must hold one that ran"),
        (APART, [5], (), "backends must share a case that all ran, long, short do not"),
        (AttnSpec(8, 1, 64, 1), [5], (), "spec must be one that was measured: 32/8 d128 page 16"),
    ],
)
def test_what_cannot_be_chosen_from_raises(spec, lens, backends, message):
    with pytest.raises(ValueError, match=message):
        policy().choose(spec, lens, backends=backends)


def test_a_saved_policy_loads_as_it_was(tmp_path):
    path = save(policy(), tmp_path / "policy.json")
    assert load(path) == policy()
    assert [each.name for each in tmp_path.iterdir()] == ["policy.json"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind": "attnlib decode policy", "schema": 2}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json must be a 'attnlib decode policy'"):
        load(path)


def test_an_engine_can_choose_without_torch_or_pandas(tmp_path):
    path = save(policy(), tmp_path / "policy.json")
    code = (
        "import sys; from pathlib import Path; from attnlib.batch import AttnSpec\n"
        "from attnlib.policy import load\n"
        f"found = load(Path({str(path)!r})).choose(AttnSpec(32, 8, 128, 16), [200] * 7)\n"
        "print(found.backend, sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "short []"
    assert json.loads(path.read_text())["gpu_id"] == "0badcafe"
