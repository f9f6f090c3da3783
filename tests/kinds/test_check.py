"""The check tells right from wrong: honest rounding passes, every planted mistake fails."""

import math
from collections.abc import Callable

import pytest
import torch

from attnlib.core.backends import create
from attnlib.core.batch import DecodeBatch, PagedKV
from attnlib.core.spec import AttnSpec
from attnlib.kinds.call import Workload
from attnlib.kinds.check import BUDGET_FACTOR, OracleCheck, worst_row_error
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import Oracle, build_workload

FP8 = "float8_e4m3fn"
DTYPES = [("bfloat16", ""), ("float16", ""), ("bfloat16", FP8), (FP8, FP8)]


def build(dtype: str, kv_dtype: str = "", *, kv_len: int = 40) -> Workload:
    spec = AttnSpec(8, 2, 64, 16, dtype, kv_dtype)
    return build_workload(DecodeCase(spec, 3, kv_len, "ragged"), device="cpu")


def kernel(
    work: Workload,
    *,
    kv: PagedKV | None = None,
    batch: DecodeBatch | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """An honest kernel in float32, its output rounded once; the options make it dishonest."""
    batch, kv, spec = batch or work.batch, kv or work.kv, work.batch.spec
    rows = []
    for i, length in enumerate(batch.seq_lens.tolist()):
        pages = batch.page_table[i].long()
        k, v = (c.float()[pages].flatten(0, 1)[:length] for c in (kv.k_cache, kv.v_cache))
        k, v = (t.repeat_interleave(spec.group_size, 1).transpose(0, 1) for t in (k, v))
        scores = (k @ work.q[i].float()[:, :, None])[..., 0] * spec.softmax_scale * scale
        rows.append((torch.softmax(scores, -1)[:, None] @ v)[:, 0])
    return torch.stack(rows).to(getattr(torch, spec.out_dtype))


def changed(work: Workload, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    out = kernel(work)
    change(out)
    return out


def last_token_dropped(work: Workload) -> torch.Tensor:
    batch = work.batch
    shorter = DecodeBatch.build(batch.spec, batch.seq_lens_cpu - 1, batch.page_table)
    return kernel(work, batch=shorter)


def one_page_swapped(work: Workload) -> torch.Tensor:
    table = work.batch.page_table.clone()
    table[0, 0], table[1, 0] = work.batch.page_table[1, 0], work.batch.page_table[0, 0]
    return kernel(work, batch=DecodeBatch.build(work.batch.spec, work.batch.seq_lens_cpu, table))


def kv_heads_swapped(work: Workload) -> torch.Tensor:
    return kernel(work, kv=PagedKV(work.kv.k_cache.flip(2), work.kv.v_cache.flip(2)))


PLANTED = {
    "last token dropped": last_token_dropped,
    "one page swapped": one_page_swapped,
    "KV heads swapped": kv_heads_swapped,
    "scale off by 2 %": lambda work: kernel(work, scale=1.02),
    "row of zeros": lambda work: changed(work, lambda out: out[2, 5].zero_()),
    "NaN": lambda work: changed(work, lambda out: out[1, 2, :1].fill_(math.nan)),
    "infinity": lambda work: changed(work, lambda out: out[1, 2, :1].fill_(math.inf)),
    "another's head": lambda work: changed(work, lambda out: out[0, 3].copy_(out[1, 3])),
}
# Where even the probabilities are FP8, 2 % drowns in their rounding.
SEEN = [(d, name) for d in DTYPES for name in PLANTED if (d[0], name) != (FP8, "scale off by 2 %")]


def judge(work: Workload, out: torch.Tensor) -> OracleCheck:
    return Oracle(work.q, work.kv, work.batch).check(out)


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("kv_len", [1, 40, 1000])
def test_an_honest_kernel_passes(kv_len, dtype, kv_dtype) -> None:
    work = build(dtype, kv_dtype, kv_len=kv_len)
    verdict = judge(work, kernel(work))
    assert verdict.passed, verdict
    assert verdict.rows == 3 * 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_real_kernel_passes(dtype) -> None:
    work = build(dtype)
    sdpa = create("sdpa", work.batch.spec, device="cpu")
    verdict = judge(work, sdpa.run(work.q, work.kv, sdpa.plan(work.batch)))
    assert verdict.passed, verdict


@pytest.mark.parametrize(("dtypes", "mistake"), SEEN, ids=str)
def test_a_planted_mistake_fails(dtypes, mistake) -> None:
    work = build(*dtypes)
    verdict = judge(work, PLANTED[mistake](work))
    assert not verdict.passed, verdict


def test_one_token_of_four_thousand_is_missed_by_a_kernel_and_seen_by_the_check() -> None:
    spec = AttnSpec(8, 1, 128, 16)
    work = build_workload(DecodeCase(spec, 1, 4096), device="cpu")
    assert judge(work, kernel(work)).passed
    assert not judge(work, last_token_dropped(work)).passed


@pytest.mark.parametrize("kv_len", [2, 40, 1000])
def test_the_budget_lies_between_unavoidable_rounding_and_five_percent(kv_len) -> None:
    work = build("bfloat16", kv_len=kv_len)
    oracle = Oracle(work.q, work.kv, work.batch)
    rounding = worst_row_error(oracle.reference.bfloat16(), oracle.reference)
    assert BUDGET_FACTOR > 1
    assert rounding < oracle.budget < 0.05


def test_a_finer_dtype_has_a_smaller_budget() -> None:
    works = [build(dtype) for dtype in (FP8, "bfloat16", "float16")]
    budgets = [Oracle(w.q, w.kv, w.batch).budget for w in works]
    assert budgets == sorted(budgets, reverse=True)


def test_the_error_is_that_of_the_worst_row() -> None:
    reference = torch.ones(2, 3, 4, dtype=torch.float64)
    out = reference.clone()
    out[1, 2] = 1.25
    out[0, 0, 0] = 1.1
    assert worst_row_error(out, reference) == 0.25


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_error_of_an_output_that_is_not_finite_is_infinite(value) -> None:
    reference = torch.ones(2, 3, 4, dtype=torch.float64)
    out = reference.clone()
    out[0, 1, 2] = value
    assert worst_row_error(out, reference) == math.inf


def test_nothing_infinite_passes_whatever_the_budget() -> None:
    assert not OracleCheck(error=math.inf, budget=math.inf, rows=1).passed
    assert not OracleCheck(error=math.nan, budget=1.0, rows=1).passed


def test_a_cache_that_makes_the_oracle_nan_lets_nothing_pass() -> None:
    work = build("bfloat16")
    work.kv.v_cache.fill_(math.nan)
    assert not judge(work, kernel(work)).passed


def test_an_output_of_another_shape_is_an_error_and_no_verdict() -> None:
    work = build("bfloat16")
    with pytest.raises(ValueError, match=r"out must be \[3, 8, 64\], got \[3, 64, 8\]"):
        judge(work, kernel(work).transpose(1, 2))
