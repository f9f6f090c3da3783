"""The checks about sparse MLA: never decided without Blackwell, and they say what was compared."""

from collections.abc import Callable
from itertools import product

import pandas as pd
import pytest
from support.ledger import judged, row

from attnlib.core.spec import MlaSpec
from attnlib.kinds.mla.case import MlaCase
from attnlib.studies.evidence import NOT_HERE, MissingRecordsError
from attnlib.studies.sparse_mla.study import SPARSE_SHAPES

Ratio = Callable[[int, int], float]


def records(ratio: Ratio) -> pd.DataFrame:
    """Three rounds of both kernels at each shape: fa3 takes `ratio`, FlashMLA 1 us."""
    found = []
    for (heads, top_k, batch, kv_len), round_ in product(SPARSE_SHAPES, range(3)):
        for backend, release, kv_format, us in (
            ("flashinfer-mla-fa3", "0.6.13", "bfloat16", ratio(heads, batch)),
            ("flashinfer-mla-fa3", "0.6.4", "bfloat16", 100.0),
            ("flashmla-sparse-fp8", "", "fp8-656", 1.0),
        ):
            case = MlaCase(MlaSpec(heads, top_k, kv_format=kv_format), batch, kv_len)
            found.append(row(case, backend, us, release=release, round=round_))
    return pd.DataFrame(found)


def said(check: str, frame: pd.DataFrame) -> str:
    finding = judged(check, frame)
    assert (finding.verdict, finding.records, finding.measured) == (NOT_HERE, (), "")
    assert "no Blackwell GPU is on record" in finding.reason
    assert "0.6.13's fa3 over a bfloat16 cache with FlashMLA over an FP8 one" in finding.reason
    return finding.reason


@pytest.mark.parametrize(("us", "word"), [(0.5, "faster"), (2.0, "slower"), (1.0, "same")])
def test_every_shape_is_counted_and_nothing_is_decided(us, word):
    frame = records(lambda heads, batch: us)
    assert f"FlashInfer is {word} in 40 of 40 shapes." in said("better-performance", frame)


def test_each_degree_of_parallelism_stands_on_its_own_heads():
    frame = records(lambda heads, batch: 2.0 if heads == 64 else 0.5)
    others = said("pareto", frame)
    assert "with 128, 32, 16 heads FlashInfer is faster in 32 of 32 shapes." in others
    assert "slower in 8, " not in others and "No model was served." in others


def test_many_requests_are_judged_without_the_few():
    frame = records(lambda heads, batch: 2.0 if heads == 64 and batch >= 64 else 0.5)
    reason = said("tp2-slightly-worse", frame)
    assert "64 heads and 64 requests or more FlashInfer is slower in 4 of 4 shapes." in reason


def test_the_medians_stand_by_heads():
    frame = records(lambda heads, batch: heads / 100)
    reason = said("tp2-unusually-bad", frame)
    assert "is 1.28 with 128, 0.64 with 64, 0.32 with 32, 0.16 with 16 heads." in reason


@pytest.mark.parametrize(
    "check", ["better-performance", "pareto", "tp2-slightly-worse", "tp2-unusually-bad"]
)
@pytest.mark.parametrize("backend", ["flashinfer-mla-fa3", "flashmla-sparse-fp8"])
def test_a_lost_round_or_a_lost_shape_is_missing(check, backend):
    frame = records(lambda heads, batch: 1.0)
    mine = frame[(frame.backend == backend) & (frame.release != "0.6.4")]
    place = mine[(mine.num_qo_heads == 64) & (mine.batch_size == 64)]
    if check == "pareto":
        place = mine[mine.num_qo_heads == 32]
    for lost in (place.index[:1], place.index):
        with pytest.raises(MissingRecordsError, match="one lacks some"):
            judged(check, frame.drop(lost))
