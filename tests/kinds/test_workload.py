"""Workloads: the same seed gives the same step anywhere, and its data is worth attending over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import build_batch, build_workload
from attnlib.kinds.lengths import MODELS, SKEW, model_spec, sample_seq_lens

SPEC = AttnSpec(8, 2, 16, 4)
RAGGED = DecodeCase(SPEC, batch_size=17, kv_len=100, lengths="ragged", seed=7)


def test_the_same_seed_gives_the_same_lengths_pages_and_values() -> None:
    one, other = (build_workload(RAGGED, device="cpu") for _ in range(2))
    assert torch.equal(one.batch.seq_lens, other.batch.seq_lens)
    assert torch.equal(one.batch.page_table, other.batch.page_table)
    assert torch.equal(one.q, other.q)
    assert torch.equal(one.kv.k_cache, other.kv.k_cache)
    assert torch.equal(one.kv.v_cache, other.kv.v_cache)


def test_another_seed_gives_other_lengths_pages_and_values() -> None:
    one, other = (build_workload(replace(RAGGED, seed=seed), device="cpu") for seed in (7, 8))
    assert one.batch.seq_lens.tolist() != other.batch.seq_lens.tolist()
    assert one.batch.kv_indices.tolist() != other.batch.kv_indices.tolist()
    assert not torch.equal(one.q, other.q)


def test_lengths_and_page_order_are_those_that_the_records_were_measured_with() -> None:
    # Literals on purpose: a change of the generator would make old records another workload.
    assert sample_seq_lens(replace(RAGGED, batch_size=5)).tolist() == [100, 63, 69, 90, 58]
    batch = build_batch(replace(RAGGED, batch_size=3, kv_len=9), device="cpu")
    assert batch.seq_lens.tolist() == [9, 6, 7]
    assert batch.kv_indices.tolist() == [3, 0, 6, 5, 1, 2, 4]


@pytest.mark.parametrize("lengths", ["fixed", "ragged", "skewed"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_live_pages_are_distinct_shuffled_and_fill_the_pool(page_size, lengths) -> None:
    case = replace(RAGGED, spec=replace(SPEC, page_size=page_size), lengths=lengths)
    work = build_workload(case, device="cpu")
    pages = work.batch.kv_indices.tolist()
    assert sorted(pages) == list(range(work.kv.num_pages))
    assert pages != sorted(pages)


def test_fixed_lengths_are_all_the_longest() -> None:
    assert sample_seq_lens(replace(RAGGED, lengths="fixed")).tolist() == [100] * 17


def test_ragged_lengths_span_one_to_the_longest_and_hold_it() -> None:
    lens = sample_seq_lens(replace(RAGGED, batch_size=4000))
    assert (lens[0], lens.min(), lens.max()) == (100, 1, 100)
    assert lens[1:].mean() == pytest.approx(50.5, abs=2)


@pytest.mark.parametrize(("kv_len", "short"), [(3200, 100), (SKEW - 1, 1), (1, 1)])
def test_skewed_lengths_are_one_long_request_among_short_ones(kv_len, short) -> None:
    lens = sample_seq_lens(replace(RAGGED, kv_len=kv_len, lengths="skewed"))
    assert lens.tolist() == [kv_len] + [short] * 16


def test_lengths_are_int32_whatever_their_distribution() -> None:
    for lengths in ("fixed", "ragged", "skewed"):
        assert sample_seq_lens(replace(RAGGED, lengths=lengths)).dtype == np.int32


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_values_are_standard_normal_in_the_cases_dtypes_and_never_zeros(dtype, kv_dtype) -> None:
    case = replace(RAGGED, spec=replace(SPEC, dtype=dtype, kv_dtype=kv_dtype), lengths="fixed")
    work = build_workload(case, device="cpu")
    assert str(work.q.dtype) == f"torch.{dtype}"
    assert str(work.kv.k_cache.dtype) == str(work.kv.v_cache.dtype) == f"torch.{kv_dtype}"
    for values in (work.q.float(), work.kv.k_cache.float(), work.kv.v_cache.float()):
        assert values.mean().item() == pytest.approx(0, abs=0.1)
        assert values.std().item() == pytest.approx(1, abs=0.1)
        assert bool(values.flatten(0, -2).any(-1).all())


def test_keys_values_and_queries_are_drawn_apart() -> None:
    work = build_workload(RAGGED, device="cpu")
    k, v = work.kv.k_cache.flatten(), work.kv.v_cache.flatten()
    assert not torch.equal(k, v)
    assert not torch.equal(work.q.flatten(), k[: work.q.numel()])


@pytest.mark.parametrize("model", MODELS)
def test_a_named_model_gives_its_attention_shape(model) -> None:
    spec = model_spec(model, page_size=16, dtype="float16")
    assert (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim) == MODELS[model]
    assert (spec.page_size, spec.dtype) == (16, "float16")


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model must be one of llama-3.1-8b, .+, got 'gpt-5'"):
        model_spec("gpt-5", page_size=16)
