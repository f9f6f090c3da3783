"""The resolution rules, as the releases' sources have them."""

from __future__ import annotations

import pytest

from attnlib.batch import AttnSpec
from attnlib.select import ANY_GPU, flashinfer_decode_auto

BF16 = AttnSpec(32, 8, 128, 16)
FP8 = AttnSpec(32, 8, 128, 16, "float8_e4m3fn")
FP8_CACHE = AttnSpec(32, 8, 128, 16, "bfloat16", "float8_e4m3fn")
AFFECTED = ("0.6.0", "0.6.1", "0.6.2", "0.6.3")
HEALTHY = ("0.2.0", "0.5.3", "0.6.4", "0.6.13", "0.7.0", "0.7.2.post1")


@pytest.mark.parametrize("release", AFFECTED)
def test_sixteen_bit_decode_on_hopper_is_fa3_in_the_affected_releases(release):
    assert flashinfer_decode_auto(release, 9, BF16).backend == "fa3"


@pytest.mark.parametrize("release", HEALTHY)
def test_sixteen_bit_decode_on_hopper_is_fa2_in_every_other_release(release):
    assert flashinfer_decode_auto(release, 9, BF16).backend == "fa2"


@pytest.mark.parametrize("release", (*AFFECTED, *HEALTHY))
@pytest.mark.parametrize("major", [major for major in ANY_GPU if major != 9])
@pytest.mark.parametrize("spec", [BF16, FP8, FP8_CACHE])
def test_no_gpu_but_hopper_ever_gets_fa3(release, major, spec):
    assert flashinfer_decode_auto(release, major, spec).backend == "fa2"


@pytest.mark.parametrize(
    ("release", "backend"), [("0.5.3", "fa2"), ("0.6.3", "fa3"), ("0.7.1", "fa3")]
)
def test_fp8_queries_on_hopper_keep_fa3_after_the_fix(release, backend):
    assert flashinfer_decode_auto(release, 9, FP8).backend == backend


@pytest.mark.parametrize(("release", "backend"), [("0.6.3", "fa3"), ("0.6.4", "fa2")])
def test_an_fp8_cache_with_a_16_bit_query_left_fa3_in_0_6_4(release, backend):
    assert flashinfer_decode_auto(release, 9, FP8_CACHE).backend == backend


def test_every_rule_names_its_source_or_reason():
    reasons = {flashinfer_decode_auto(r, m, BF16).reason for r in HEALTHY for m in ANY_GPU}
    assert all(reasons)


@pytest.mark.parametrize("release", ["0.1.9", "0.8.0"])
def test_a_release_nobody_read_is_refused(release):
    with pytest.raises(
        ValueError, match=rf"release must be in 0.2.0..0.7.2.post1, got '{release}'"
    ):
        flashinfer_decode_auto(release, 9, BF16)


def test_an_unknown_gpu_generation_is_refused():
    with pytest.raises(ValueError, match=r"major must be one of .*got 7"):
        flashinfer_decode_auto("0.6.3", 7, BF16)
