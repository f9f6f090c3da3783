"""What the promise of equal queries gives, of records made to be so."""

import pandas as pd
from support.frames import row

from attnlib.studies import engine_modes as modes
from attnlib.studies import equal_queries as equal
from attnlib.studies.equal_queries.study import STUDY

MANY, ONE = modes.VERIFIES[4], modes.BLOCKS[0]


def made(times):
    return pd.DataFrame(
        row(case, backend, round_, us, release=modes.NOW)
        for (case, backend), us in times.items()
        for round_ in range(4)
    )


def test_a_smaller_tile_is_told_from_one_that_stays():
    (fa2,), (promised,) = equal.PIN_FA2, equal.PROMISED
    times = {(MANY, fa2): 4.0, (MANY, promised): 1.0, (ONE, fa2): 2.0, (ONE, promised): 2.0}
    frame = made(times | {(MANY, "flash-attn-3-extend"): 3.0})
    shown = equal.promised(frame).set_index("mode")
    assert shown.tile.to_dict() == {"target_verify": "128 to 16", "dllm_extend": "128"}
    assert shown.loc["target_verify", ["fa2", "promised", "library"]].tolist() == [4, 1, 3]
    assert shown.verdict.to_dict() == {"target_verify": "faster", "dllm_extend": "same"}
    smaller, same = sorted(equal.findings(frame).splitlines())
    assert smaller.startswith("tile smaller: 1 shapes, 1 faster, 0 slower, 0 same")
    assert smaller.endswith("0.25 to 0.25 of the time")
    assert same.startswith("tile the same: 1 shapes, 0 faster")


def test_every_case_has_equal_queries_which_the_backend_asks_for():
    assert {case.mode for case in STUDY.cases} == {"target_verify", "dllm_extend"}
