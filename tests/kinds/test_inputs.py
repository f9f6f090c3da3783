"""Query and cache that do not fit their batch are refused before an oracle reads them."""

import re
from dataclasses import replace

import pytest
import torch

from attnlib.core.batch import DecodeBatch, PagedKV
from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds.check import require_inputs
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import ExtendCase
from attnlib.kinds.extend.measure import attend_extend, build_extend_workload
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.mla.measure import build_mla_workload, require_latent_inputs

SPEC = AttnSpec(8, 2, 16, 4)
BATCH = DecodeBatch.build(SPEC, torch.tensor([4, 4]).int(), torch.tensor([[0], [1]]).int())
Q = torch.zeros(2, 8, 16, dtype=torch.bfloat16)


def cache(*, page_size: int = 4, heads: int = 2, dim: int = 16, dtype: str = "bfloat16"):
    return torch.zeros(3, page_size, heads, dim, dtype=getattr(torch, dtype))


@pytest.mark.parametrize(
    ("argument", "got", "q", "k", "v"),
    [
        ("q", "[8, 2, 16]", Q.transpose(0, 1).reshape(8, 2, 16), cache(), cache()),
        ("q", "[1, 8, 16]", Q[:1], cache(), cache()),
        ("q", "float32", Q.float(), cache(), cache()),
        ("k_cache", "[3, 8, 2, 16]", Q, cache(page_size=8), cache(page_size=8)),
        ("k_cache", "[3, 4, 8, 16]", Q, cache(heads=8), cache(heads=8)),
        ("k_cache", "[3, 4, 2, 32]", Q, cache(dim=32), cache(dim=32)),
        ("k_cache", "float16", Q, cache(dtype="float16"), cache()),
        ("v_cache", "float32", Q, cache(), cache(dtype="float32")),
    ],
)
def test_tensors_that_do_not_fit_the_batch_are_refused(argument, got, q, k, v) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} must be .* got .*{re.escape(got)}"):
        require_inputs(q, PagedKV(k, v), BATCH)


@pytest.mark.parametrize("away", ["q", "k_cache", "v_cache"])
def test_tensors_on_two_devices_are_refused(away) -> None:
    tensors = {"q": Q, "k_cache": cache(), "v_cache": cache()}
    tensors[away] = tensors[away].to("meta")
    with pytest.raises(ValueError, match="must .*one device, got .*meta"):
        require_inputs(tensors["q"], PagedKV(tensors["k_cache"], tensors["v_cache"]), BATCH)


def test_queries_of_another_shape_or_dtype_than_their_requests_have_are_refused() -> None:
    case = ExtendCase(DecodeCase(SPEC, 3, 9, "ragged"), "prefill_paged", 4)
    work = build_extend_workload(case, device="cpu")
    halves = replace(work.kv, k_cache=work.kv.k_cache.half())
    for q, kv, name in ((work.q[1:], work.kv, "q"), (work.q, halves, "k_cache")):
        with pytest.raises(ValueError, match=f"^{name} must be .* bfloat16, got"):
            attend_extend(q, kv, work.batch)


@pytest.mark.parametrize(
    ("kv_format", "words"),
    [
        ("bfloat16", r"cache must be \[\d+, 16, 576\] bfloat16"),
        ("fp8-656", r"cache must be \[\d+, 16, 656\] uint8"),
    ],
)
def test_a_latent_cache_of_another_format_is_refused(kv_format: str, words: str) -> None:
    work = build_mla_workload(MlaCase(MlaSpec(2, 8, 16, kv_format), 2, 40), device="cpu")
    with pytest.raises(ValueError, match=words):
        require_latent_inputs(work.q, work.kv[..., :512], work.batch)
    with pytest.raises(ValueError, match=r"q must be \[2, 2, 576\] bfloat16"):
        require_latent_inputs(work.q[:, :1], work.kv, work.batch)
    with pytest.raises(ValueError, match="up to 5, got 5 pages"):
        require_latent_inputs(work.q, work.kv[:-1], work.batch)
