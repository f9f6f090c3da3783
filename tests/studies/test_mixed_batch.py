"""One call or two over a mixed batch, of records made to be so."""

import pandas as pd
from support.frames import row

from attnlib.kinds.lengths import sample_extend_lens
from attnlib.studies import mixed_batch as mixed
from attnlib.studies.mixed_batch.study import CASES, DECODE, EAGER, MANY, MIXED, chunk, decodes


def made(times, rounds=4):
    return pd.DataFrame(
        row(case, backend, round_, us, release="", timer=EAGER[0])
        for (case, backend), us in times.items()
        for round_ in range(rounds)
    )


def test_two_calls_are_of_the_same_kernel_and_beside_fa3_fa2_decodes():
    case = mixed.both(8, 512)
    times = dict(zip(((case, name) for name in MANY), (9.0, 5.0, 3.0), strict=True))
    times |= {(decodes(8), DECODE[0]): 3.0, (decodes(8), DECODE[1]): 2.0}
    times |= dict(zip(((chunk(512), name) for name in MANY), (5.0, 1.0, 2.0), strict=True))
    shown = mixed.one_or_two(made(times)).set_index("backend")
    assert shown["two calls"].to_dict() == {"fa2": 8.0, "fa3": 4.0, "library": 4.0}
    assert shown.ratio.to_dict() == {"fa2": 1.12, "fa3": 1.25, "library": 0.75}
    assert shown.verdict.to_dict() == {"fa2": "slower", "fa3": "slower", "library": "faster"}
    assert shown[["decodes", "chunk"]].to_numpy().tolist() == [[8, 512]] * 3


def test_a_part_that_is_missing_leaves_nothing_to_compare():
    case = mixed.both(8, 512)
    assert mixed.one_or_two(made({(case, MANY[0]): 9.0, (decodes(8), DECODE[0]): 3.0})).empty


def test_a_mixed_batch_is_its_parts_in_one():
    for case, (requests, tokens) in MIXED.items():
        queries, lens = sample_extend_lens(case)
        assert queries.tolist() == [1] * requests + [tokens] and {*lens.tolist()} == {8192}
    assert len(CASES) == 15
