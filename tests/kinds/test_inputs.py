"""Query and cache that do not fit their batch are refused before an oracle reads them."""

import re
from dataclasses import replace

import pytest
import torch
from support.workloads import exact, work_of

from attnlib.core.batch import PagedKV
from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import ExtendCase
from attnlib.kinds.mla.case import MlaCase

WORK = work_of(DecodeCase(AttnSpec(8, 2, 16, 4), 2, 4))
Q = WORK.q


def cache(*, page_size=4, heads=2, dim=16, dtype="bfloat16"):
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
def test_tensors_that_do_not_fit_the_batch_are_refused(argument, got, q, k, v):
    with pytest.raises(ValueError, match=rf"^{argument} must be .* got .*{re.escape(got)}"):
        exact(replace(WORK, q=q, kv=PagedKV(k, v)))


def test_queries_of_another_shape_or_dtype_than_their_requests_have_are_refused():
    cached = replace(WORK.case, batch_size=3, kv_len=9, lengths="ragged")
    work = work_of(ExtendCase(cached, "prefill_paged", 4))
    halves = replace(work.kv, k_cache=work.kv.k_cache.half())
    for wrong, name in (({"q": work.q[1:]}, "q"), ({"kv": halves}, "k_cache")):
        with pytest.raises(ValueError, match=f"^{name} must be .* bfloat16, got"):
            exact(replace(work, **wrong))


@pytest.mark.parametrize(
    ("kv_format", "words"), [("bfloat16", "576] bfloat16"), ("fp8-656", "656] uint8")]
)
def test_a_latent_cache_of_another_format_is_refused(kv_format, words):
    work = work_of(MlaCase(MlaSpec(2, 8, 16, kv_format), 2, 40))
    for wrong, said in (
        ({"kv": work.kv[..., :512]}, rf"cache must be \[any, 16, {words}"),
        ({"q": work.q[:, :1]}, r"q must be \[2, 2, 576\] bfloat16"),
        ({"kv": work.kv[:-1]}, "up to 5, got 5 pages"),
    ):
        with pytest.raises(ValueError, match=said):
            exact(replace(work, **wrong))
