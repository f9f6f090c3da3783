"""What fixed splits cost, of records made to be so."""

import pandas as pd
from support.frames import row

from attnlib.studies import fixed_splits as fixed
from attnlib.studies.fixed_splits.study import CAPPED, CASES, COLD, FIXED, FREE, FREE_3, ONE


def test_each_rule_is_priced_over_the_same_kernel_without_it():
    us = {FREE: 10.0, FIXED: 30.0, FREE_3: 20.0, CAPPED: 20.0, ONE: 10.0}
    frame = pd.DataFrame(
        row(case, name, round_, time, release="", timer=COLD[0])
        for case in CASES
        for name, time in us.items()
        for round_ in range(4)
    )
    shown = fixed.price(frame)
    assert len(shown) == 3 * len(CASES)
    by_kernel = shown.groupby("kernel", sort=False)
    assert by_kernel.ratio.unique().map(list).tolist() == [[3.0], [1.0], [0.5]]
    assert by_kernel.verdict.unique().map(list).tolist() == [["slower"], ["same"], ["faster"]]
    few = fixed.price(frame[frame.backend.isin((FREE, FIXED))])
    assert few[["by rule", "free"]].to_numpy().tolist() == [[30.0, 10.0]] * len(CASES)
