"""The checks about sparse MLA: never decided without Blackwell, and they say what was compared."""

from itertools import product

import pandas as pd
import pytest
from support.ledger import judged, row

from attnlib.core.spec import MlaSpec
from attnlib.kinds.mla.case import MlaCase
from attnlib.studies.evidence import NOT_HERE, MissingRecordsError
from attnlib.studies.sparse_mla.study import SPARSE_SHAPES

FLASHINFER = ("flashinfer-mla-fa3", "bfloat16")
FLASHMLA = ("flashmla-sparse-fp8", "fp8-656")


def records(ratio):
    """Three rounds of both kernels at each shape: fa3 takes `ratio`, FlashMLA 1 us."""
    found = []
    for (heads, top_k, batch, kv_len), round_ in product(SPARSE_SHAPES, range(3)):
        times = {"0.6.13": ratio(heads, batch), "0.6.4": 100.0, "": 1.0}
        for release, us in times.items():
            backend, kv_format = FLASHINFER if release else FLASHMLA
            case = MlaCase(MlaSpec(heads, top_k, kv_format=kv_format), batch, kv_len)
            found.append(row(case, backend, us, release=release, round=round_))
    return pd.DataFrame(found)


def said(check, frame):
    finding = judged(check, frame)
    assert (finding.verdict, finding.records, finding.measured) == (NOT_HERE, (), "")
    assert "no Blackwell GPU is on record" in finding.reason
    assert "0.6.13's fa3 over a bfloat16 cache with FlashMLA over an FP8 one" in finding.reason
    return finding.reason


@pytest.mark.parametrize(
    ("check", "ratio", "words"),
    [
        ("better-performance", lambda *_: 0.5, "is faster in 40 of 40 shapes."),
        ("better-performance", lambda *_: 2.0, "is slower in 40 of 40 shapes."),
        (
            "pareto",
            lambda heads, _: 2.0 if heads == 64 else 0.5,
            "with 128, 32, 16 heads FlashInfer is faster in 32 of 32 shapes. No model was served.",
        ),
        (
            "tp2-slightly-worse",
            lambda heads, batch: 2.0 if heads == 64 and batch >= 64 else 0.5,
            "64 heads and 64 requests or more FlashInfer is slower in 4 of 4 shapes.",
        ),
        (
            "tp2-unusually-bad",
            lambda heads, _: heads / 100,
            "is 1.28 with 128, 0.64 with 64, 0.32 with 32, 0.16 with 16 heads.",
        ),
    ],
)
def test_the_shapes_that_a_claim_is_about_are_counted_and_nothing_is_decided(check, ratio, words):
    assert words in said(check, records(ratio))


@pytest.mark.parametrize(
    "check", ["better-performance", "pareto", "tp2-slightly-worse", "tp2-unusually-bad"]
)
@pytest.mark.parametrize("backend", [FLASHINFER[0], FLASHMLA[0]])
def test_a_lost_round_or_a_lost_shape_is_missing(check, backend):
    frame = records(lambda heads, batch: 1.0)
    mine = frame[(frame.backend == backend) & (frame.release != "0.6.4")]
    heads = 32 if check == "pareto" else 64
    place = mine[(mine.num_qo_heads == heads) & (mine.batch_size == 64)]
    for lost in (place.index[:1], place.index):
        with pytest.raises(MissingRecordsError, match="one lacks some"):
            judged(check, frame.drop(lost))
