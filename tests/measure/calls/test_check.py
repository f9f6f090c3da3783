"""The oracle can fail: honest rounding passes, every planted mistake is over the budget."""

import math
from dataclasses import replace

import pytest
import torch
from support.workloads import MASKS, exact, extend_case, judge_of, rounded, work_of

from attnlib.core import AttnSpec, DecodeBatch, MlaSpec, PagedKV
from attnlib.measure.calls.check import Judge, OracleCheck, worst_row_error
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.mla.case import MlaCase

FP8 = "float8_e4m3fn"
DTYPES = [
    ("bfloat16", ""),
    ("float16", ""),
    ("bfloat16", FP8),
    (FP8, FP8),
]
CACHED = DecodeCase(AttnSpec(6, 2, 16, 4), 4, 50, "ragged", seed=1)


def decode(dtype="bfloat16", kv_dtype="", kv_len=40):
    return work_of(
        DecodeCase(
            AttnSpec(8, 2, 64, 16, dtype, kv_dtype),
            3,
            kv_len,
            "ragged",
        )
    )


def extended(mode, mask):
    return work_of(extend_case(CACHED, mode, mask))


def latent(top_k=24, kv_format="fp8-656"):
    return work_of(MlaCase(MlaSpec(3, top_k, 16, kv_format), 4, 100, "ragged"))


def filled(work, place, value):
    out = rounded(work)
    out[place] = value
    return out


def last_token_dropped(work):
    batch = work.batch
    shorter = DecodeBatch.build(batch.spec, batch.seq_lens_cpu - 1, batch.page_table)
    return rounded(replace(work, batch=shorter))


def one_page_swapped(work):
    table = work.batch.page_table.clone()
    table[:2, 0] = table[:2, 0].flip(0)
    batch = DecodeBatch.build(work.batch.spec, work.batch.seq_lens_cpu, table)
    return rounded(replace(work, batch=batch))


def kv_heads_swapped(work):
    return rounded(
        replace(
            work,
            kv=PagedKV(
                work.kv.k_cache.flip(2),
                work.kv.v_cache.flip(2),
            ),
        )
    )


def off_by(scale):
    def scaled(work):
        q = work.q.double() * scale
        return rounded(replace(work, q=q.to(work.q.dtype)))

    return scaled


def another_mask(work):
    mask = "full" if work.batch.mask != "full" else "causal"
    return rounded(
        replace(
            work,
            batch=replace(
                work.batch,
                mask=mask,
                custom_mask=None,
            ),
        )
    )


def pages_of_k_swapped(work):
    kv = PagedKV(work.kv.k_cache.flip(0), work.kv.v_cache)
    return rounded(replace(work, kv=kv))


def choosing(work, place):
    chosen = work.batch.chosen.clone()
    chosen[0, 0] = place
    return rounded(replace(work, batch=replace(work.batch, chosen=chosen)))


def with_a_neighbour(work):
    length = int(work.batch.paged.seq_lens_cpu[0])
    others = set(range(length)) - set(work.batch.chosen[0].tolist())
    return choosing(work, min(others))


def without_rotary(work):
    q = work.q.clone()
    q[..., 512:] = 0
    return rounded(replace(work, q=q))


def with_scales_swapped(work):
    cache = work.kv.clone()
    cache[..., 512:516] = work.kv[..., 516:520]
    cache[..., 516:520] = work.kv[..., 512:516]
    return rounded(replace(work, kv=cache))


PLANTED = {
    "last token dropped": last_token_dropped,
    "one page swapped": one_page_swapped,
    "KV heads swapped": kv_heads_swapped,
    "scale off by 2 %": off_by(1.02),
    "row of zeros": lambda work: filled(work, (2, 5), 0),
    "NaN": lambda work: filled(work, (1, 2, 0), math.nan),
    "infinity": lambda work: filled(work, (1, 2, 0), math.inf),
    "another's head": lambda work: filled(
        work,
        (0, 3),
        rounded(work)[1, 3],
    ),
}
PLANTED_EXTEND = {
    "another mask": another_mask,
    "a wrong cache": pages_of_k_swapped,
    "a neighbour's row": lambda work: rounded(work).roll(1, 0),
    "a missing row": lambda work: filled(work, -1, math.nan),
}
PLANTED_MLA = {
    "without a token": lambda work: choosing(work, -1),
    "with a neighbour": with_a_neighbour,
    "scale of 576": off_by((192 / 576) ** 0.5),
    "without rotary": without_rotary,
    "scales swapped": with_scales_swapped,
    "the unquantised cache": lambda _: rounded(latent(kv_format="bfloat16")),
    "heads swapped": lambda work: rounded(work).flip(1),
}
HONEST = [
    *((decode, (*dtypes, kv_len)) for dtypes in DTYPES for kv_len in (1, 40, 1000)),
    *((extended, pair) for pair in MASKS),
    *((latent, (top_k, form)) for top_k in (0, 24) for form in ("bfloat16", "fp8-576", "fp8-656")),
]
MISTAKES = [
    # Where even the probabilities are FP8, 2 % drowns in their rounding.
    *((decode, d, m) for d in DTYPES for m in PLANTED if (d[0], m) != (FP8, "scale off by 2 %")),
    *((extended, pair, mistake) for pair in MASKS for mistake in PLANTED_EXTEND),
    *((latent, (), mistake) for mistake in PLANTED_MLA),
]


def named(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("build, arguments", HONEST, ids=named)
def test_an_output_rounded_as_a_kernel_must_passes(build, arguments):
    work = build(*arguments)
    verdict = judge_of(work).check(rounded(work))
    assert verdict.passed, verdict
    assert verdict.budget < 0.05 or arguments[0] == FP8
    assert verdict.rows == len(work.q) * work.q.shape[1]


@pytest.mark.parametrize("build, arguments, mistake", MISTAKES, ids=named)
def test_a_planted_mistake_fails(build, arguments, mistake):
    work = build(*arguments)
    verdict = judge_of(work).check((PLANTED | PLANTED_EXTEND | PLANTED_MLA)[mistake](work))
    assert not verdict.passed, verdict


def test_one_token_of_four_thousand_is_missed_by_a_kernel_and_seen_by_the_check():
    work = work_of(DecodeCase(AttnSpec(8, 1, 128, 16), 1, 4096))
    judge = judge_of(work)
    assert judge.check(rounded(work)).passed
    assert not judge.check(last_token_dropped(work)).passed


def test_the_error_is_that_of_the_worst_row_and_infinite_if_an_output_is_not_finite():
    reference = torch.ones(2, 3, 4, dtype=torch.float64)
    out = reference.clone()
    out[1, 2], out[0, 0, 0] = 1.25, 1.1
    assert worst_row_error(out, reference) == 0.25
    for value in (math.nan, math.inf, -math.inf):
        out[0, 1, 2] = value
        assert worst_row_error(out, reference) == math.inf


def test_half_a_bit_of_the_output_is_allowed_where_the_oracle_itself_rounds_nothing():
    ones = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    judge = Judge(lambda *_, **__: ones.double(), ones, None, None)
    assert judge.budget == 2**-8


def test_nothing_infinite_passes_whatever_the_budget():
    assert not OracleCheck(error=math.inf, budget=math.inf, rows=1).passed
    assert not OracleCheck(error=math.nan, budget=1.0, rows=1).passed
    work = decode()
    out = rounded(work)
    work.kv.v_cache.fill_(math.nan)  # the oracle is NaN, the output is not
    assert not judge_of(work).check(out).passed


def test_an_output_of_another_shape_is_an_error_and_no_verdict():
    work = decode()
    with pytest.raises(ValueError, match=r"out must be \[3, 8, 64\], got \[3, 64, 8\]"):
        judge_of(work).check(exact(work).transpose(1, 2))
