"""The tables of sparse MLA, from the published records."""

import pytest

import attnlib
from attnlib.studies import sparse_mla as study


@pytest.fixture
def frame(published_records):
    return attnlib.load(study.STUDY.name, study.STUDY.reference_machine)


@pytest.mark.parametrize("top_k", study.TOP_K)
def test_the_fastest_kernels_of_both_caches_are_judged_in_every_shape(frame, top_k):
    table = study.fp8_over_bf16(frame, top_k)
    assert len(table) == len(study.HEADS) * len(study.SPARSE_BATCHES)
    ratio = table["FP8, us"] / table["bf16, us"]
    assert table.ratio.tolist() == pytest.approx(ratio.tolist(), rel=0.03)
    assert set(table["fastest, FP8"]) == {"FlashMLA"}


def test_the_engines_default_over_bfloat16_has_its_own_times(frame):
    table = study.fp8_over_bf16(frame)
    name = "FlashAttention-3"
    default = table[f"{name}, bf16, us"]
    is_fastest = table["fastest, bf16"] == name
    assert (default[is_fastest] == table["bf16, us"][is_fastest]).all()
    assert (default[~is_fastest] > table["bf16, us"][~is_fastest]).all()
    assert (default / table["bf16, us"]).max() == pytest.approx(1.17, abs=0.005)


def test_the_chart_has_a_row_per_shape(frame):
    (axis,) = study.shape_chart(frame, 512).axes
    assert len(axis.get_yticklabels()) == len(study.HEADS) * len(study.SPARSE_BATCHES)


def test_half_the_bytes_hold_twice_the_tokens():
    table = study.cache_sizes(gib=1, layers=1).set_index("cache")["million tokens"]
    assert table["fp8-576"] == 2 * table["bfloat16"]
    assert table["bfloat16"] == pytest.approx(2**30 / 1152 / 1e6)


def test_every_sparse_kernel_has_an_error(frame):
    table = study.errors(frame)
    assert len(table) == 5 and (table["largest error, %"] < 1).all()


def test_one_release_is_wrong_on_one_side_alone(published_records):
    table = study.overflow().set_index(["FlashInfer", "tokens"])
    assert table.wrong[table.wrong > 0].to_dict() == {("0.6.4", 7471104): 6}
