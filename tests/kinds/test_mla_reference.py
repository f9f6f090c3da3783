"""The oracle of MLA: against a dense formula, and able to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnlib.core.mla import MlaBatch
from attnlib.core.spec import MlaSpec
from attnlib.kinds.call import Workload
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.mla.format import dequantize
from attnlib.kinds.mla.measure import MlaOracle, attend_mla, build_mla_workload

FORMATS = ("bfloat16", "fp8-656")


def workload(top_k: int = 24, kv_format: str = "fp8-656", **changes) -> Workload:
    sizes = {"batch_size": 4, "kv_len": 100, "lengths": "ragged"} | changes
    return build_mla_workload(MlaCase(MlaSpec(3, top_k, 16, kv_format), **sizes), device="cpu")


def masked_softmax(work: Workload) -> torch.Tensor:
    """The same attention with every slot of the cache a column, dead ones masked: float64."""
    cache = work.kv.flatten(0, 1)
    keys = (dequantize(cache) if cache.dtype == torch.uint8 else cache).double()
    mask = torch.full((work.batch.batch_size, len(keys)), float("-inf"), dtype=torch.float64)
    for i, length in enumerate(work.batch.paged.seq_lens_cpu.tolist()):
        places = range(length) if work.batch.chosen is None else work.batch.chosen[i].tolist()
        for place in (p for p in places if p >= 0):
            page = int(work.batch.paged.page_table[i, place // 16])
            mask[i, page * 16 + place % 16] = 0
    scores = torch.einsum("bhd,nd->bhn", work.q.double(), keys) / 192**0.5
    return torch.softmax(scores + mask[:, None], -1) @ keys[:, :512]


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("top_k", [0, 1, 24, 200])
def test_the_oracle_is_masked_softmax_over_the_whole_cache(top_k: int, kv_format: str) -> None:
    work = workload(top_k, kv_format)
    out = attend_mla(work.q, work.kv, work.batch)
    assert (out.shape, out.dtype) == ((4, 3, 512), torch.float64)
    torch.testing.assert_close(out, masked_softmax(work), rtol=1e-12, atol=1e-12)


def test_choosing_every_token_is_dense_attention() -> None:
    sparse = workload(100, "bfloat16")
    dense = workload(0, "bfloat16")
    assert torch.equal(sparse.kv, dense.kv)
    torch.testing.assert_close(
        attend_mla(sparse.q, sparse.kv, sparse.batch),
        attend_mla(dense.q, dense.kv, dense.batch),
        rtol=1e-12,
        atol=1e-12,
    )


def as_bfloat16(work: Workload, batch: MlaBatch | None = None) -> torch.Tensor:
    return attend_mla(work.q, work.kv, batch or work.batch).bfloat16()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("top_k", [0, 24])
def test_an_output_rounded_as_a_kernel_must_passes(top_k: int, kv_format: str) -> None:
    work = workload(top_k, kv_format)
    verdict = MlaOracle(work.q, work.kv, work.batch).check(as_bfloat16(work))
    assert verdict.passed and verdict.rows == 12
    assert 0.002 < verdict.budget < 0.02


def without_a_token(work: Workload) -> torch.Tensor:
    chosen = work.batch.chosen.clone()
    chosen[0, 0] = -1
    return as_bfloat16(work, replace(work.batch, chosen=chosen))


def with_a_neighbour(work: Workload) -> torch.Tensor:
    chosen = work.batch.chosen.clone()
    free = set(range(int(work.batch.paged.seq_lens_cpu[0]))) - set(chosen[0].tolist())
    chosen[0, 0] = min(free)
    return as_bfloat16(work, replace(work.batch, chosen=chosen))


def with_scale_of_576(work: Workload) -> torch.Tensor:
    q = (work.q.double() * (192 / 576) ** 0.5).bfloat16()
    return attend_mla(q, work.kv, work.batch).bfloat16()


def without_rotary(work: Workload) -> torch.Tensor:
    q = work.q.clone()
    q[..., 512:] = 0
    return attend_mla(q, work.kv, work.batch).bfloat16()


def with_scales_swapped(work: Workload) -> torch.Tensor:
    cache = work.kv.clone()
    cache[..., 512:516], cache[..., 516:520] = work.kv[..., 516:520], work.kv[..., 512:516]
    return attend_mla(work.q, cache, work.batch).bfloat16()


def from_the_unquantised_cache(work: Workload) -> torch.Tensor:
    return as_bfloat16(workload(kv_format="bfloat16"))


def with_heads_swapped(work: Workload) -> torch.Tensor:
    return as_bfloat16(work).flip(1)


def with_an_unwritten_row(work: Workload) -> torch.Tensor:
    out = as_bfloat16(work)
    out[2, 1] = 0
    return out


def with_a_nan(work: Workload) -> torch.Tensor:
    out = as_bfloat16(work)
    out[3, 2, 511] = float("nan")
    return out


MUTATIONS = (
    without_a_token,
    with_a_neighbour,
    with_scale_of_576,
    without_rotary,
    with_scales_swapped,
    from_the_unquantised_cache,
    with_heads_swapped,
    with_an_unwritten_row,
    with_a_nan,
)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_wrong_output_is_over_budget(mutate: Callable[[Workload], torch.Tensor]) -> None:
    work = workload()
    assert not MlaOracle(work.q, work.kv, work.batch).check(mutate(work)).passed


def test_what_lies_in_tokens_that_nobody_attends_to_never_reaches_the_oracle() -> None:
    work = workload(24, "bfloat16")
    read = torch.zeros(work.kv.shape[:2], dtype=torch.bool).flatten()
    slots = work.batch.slots()
    read[slots[slots >= 0].long()] = True
    cache = work.kv.clone()
    cache.flatten(0, 1)[~read] = float("nan")
    out = attend_mla(work.q, cache, work.batch)
    assert torch.equal(out, attend_mla(work.q, work.kv, work.batch))


def test_an_output_of_another_shape_is_an_error_not_a_verdict() -> None:
    work = workload()
    with pytest.raises(ValueError, match=r"out must be \[4, 3, 512\], got \[4, 3, 576\]"):
        MlaOracle(work.q, work.kv, work.batch).check(work.q)
