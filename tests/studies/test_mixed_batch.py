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


def test_two_calls_are_the_fastest_of_either_part():
    case = mixed.both(8, 512)
    times = {(case, MANY[0]): 9.0, (case, MANY[2]): 4.0}
    times |= {(decodes(8), DECODE[0]): 3.0, (decodes(8), DECODE[1]): 2.0}
    times |= {(chunk(512), MANY[0]): 5.0, (chunk(512), MANY[1]): 1.0}
    shown = mixed.one_or_two(made(times)).set_index("backend")
    assert shown["two calls"].tolist() == [3.0, 3.0]
    assert shown.ratio.to_dict() == {"fa2": 3.0, "library": 1.33}
    assert shown.verdict.to_dict() == {"fa2": "slower", "library": "slower"}
    assert shown[["decodes", "chunk"]].to_numpy().tolist() == [[8, 512]] * 2


def test_a_part_that_is_missing_leaves_nothing_to_compare():
    case = mixed.both(8, 512)
    assert mixed.one_or_two(made({(case, MANY[0]): 9.0, (decodes(8), DECODE[0]): 3.0})).empty


def test_a_mixed_batch_is_its_parts_in_one():
    for case, (requests, tokens) in MIXED.items():
        queries, lens = sample_extend_lens(case)
        assert queries.tolist() == [1] * requests + [tokens] and {*lens.tolist()} == {8192}
    assert len(CASES) == 15
