"""The exact record comes first, else the nearest."""

from dataclasses import replace

import pandas as pd
import pytest

from attnlib.core import AttnSpec, MlaSpec
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.mla.case import MlaCase
from attnlib.run.look_up import (
    GROUP_WEIGHT,
    LONGEST_WEIGHT,
    OTHER_KERNEL,
    SLOTS_WEIGHT,
    UNITS_WEIGHT,
    look_up,
    nearest_calls,
    plain,
    sizes_of,
)

CALL = DecodeCase(AttnSpec(32, 8, 128, 16), 4, 1024)


def nearest(call, *cases):
    """Recorded cases and their distance, nearest first."""
    rows = pd.DataFrame([sizes_of(case) for case in cases]).assign(case=cases)
    found = nearest_calls(call, rows)
    return list(zip(found.case, found.distance, strict=True))


def test_the_first_distance_decides_and_ties_are_for_the_next_then_as_they_stand():
    rows = pd.DataFrame({"name": ["a", "b", "c", "d"]})
    assert look_up(
        rows,
        [2, 1, 1, 1],
        [0, 5, 3, 3],
    ).name.tolist() == ["c", "d", "b", "a"]


def test_the_call_itself_comes_before_another_at_no_distance():
    alike = replace(CALL, spec=replace(CALL.spec, page_size=1))
    assert nearest(CALL, alike, CALL) == [(CALL, 0.0), (alike, 0.0)]


@pytest.mark.parametrize(
    "other, distance",
    [
        (replace(CALL, kv_len=2048), 1 + LONGEST_WEIGHT),
        (replace(CALL, batch_size=8), 1 + UNITS_WEIGHT),
        (replace(CALL, spec=AttnSpec(64, 8, 128, 16)), GROUP_WEIGHT),
        (replace(CALL, spec=AttnSpec(32, 8, 64, 16)), OTHER_KERNEL),
    ],
)
def test_a_factor_of_two_is_three_and_another_kernel_is_more(other, distance):
    assert nearest(CALL, other) == [(other, distance)]


def test_past_the_gpus_slots_calls_are_further_apart():
    within, past = (replace(CALL, batch_size=batch) for batch in (32, 40))
    apart = nearest(within, past)[0][1]
    as_far = nearest(past, replace(CALL, batch_size=50))[0][1]  # the same ratio, both past
    assert apart == pytest.approx(as_far + SLOTS_WEIGHT, abs=0.001)


def test_modes_and_formats_have_kernels_of_their_own():
    verify = ExtendCase(CALL, "target_verify", 4)
    prefill = ExtendCase(CALL, "prefill_paged", 4)
    assert nearest(verify, prefill, verify) == [(verify, 0.0), (prefill, OTHER_KERNEL)]
    latent = MlaCase(MlaSpec(128), 4, 1024)
    sparse = MlaCase(MlaSpec(128, top_k=64), 4, 1024)
    assert nearest(latent, sparse) == [(sparse, OTHER_KERNEL)]


def test_lengths_written_one_by_one_and_a_wide_page_table_are_the_same_call():
    written = DecodeCase(CALL.spec, 4, 1024, "1024+1024+1024+1024", context=4096)
    assert plain(written) == CALL
    assert plain(replace(CALL, lengths="ragged")) == replace(CALL, lengths="ragged")
