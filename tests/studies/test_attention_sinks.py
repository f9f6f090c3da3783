"""What sinks and windows cost, of records made to be so."""

import pandas as pd
from support.frames import row

from attnlib.studies import attention_sinks as sunk
from attnlib.studies.attention_sinks.study import CASES, COLD, FLASH_ATTENTION, XQA


def made(us_of, backends=(*XQA, *FLASH_ATTENTION)):
    return pd.DataFrame(
        row(case, name, round_, us_of(case.spec, name), release="", timer=COLD[0])
        for case in CASES
        for name in backends
        for round_ in range(4)
    )


def test_sinks_are_priced_with_and_without_a_window_and_a_window_with_and_without_sinks():
    slow = FLASH_ATTENTION[0]
    frame = made(
        lambda spec, name: (2 if spec.sinks and name == slow else 1) * (spec.window or 512)
    )
    sinks, window = sunk.price(frame, "sinks"), sunk.price(frame, "window")
    assert len(sinks) == len(window) == 12 and {*sinks.window} == {0, 128}
    assert sinks.groupby("kernel").ratio.unique().map(list).to_dict() == {
        "FlashAttention-3, precomputed": [2.0],
        "XQA": [1.0],
    }
    assert {*window.ratio} == {0.25} and {*window.verdict} == {"faster"}
    assert {*window.sinks} == {True, False}
