"""The context's width: what the tables say of times that are known."""

from attnlib.run import rows
from attnlib.run.frame import frame_of
from attnlib.studies.metadata import context_width as study

WIDE_US = {"0.5.14": 8.0, "0.5.16": 64.0, "0.5.17": 32.0, "0.5.23": 32.0, "": 4.0}
"""By release, of a context of 131,072; of any other every release takes 8 us, and ours 4."""
SHOWN = ["geometric mean", "median", "worst", "faster", "slower", "widest", "verdict"]


def us_of(item):
    us = WIDE_US[item.release]
    return us if item.case.context == 131_072 else min(us, 8.0)


def test_means_tails_and_the_widest_case_are_of_the_pair_that_is_named(make_record):
    records = []
    for job in study.STUDY.jobs(headline=False):
        for item in job.items:
            us = us_of(item) * (1 + 1e-3 * job.round)
            record = make_record(
                study=job.study,
                round=job.round,
                item=item,
                run_us=(us, us, us),
            )
            records.append(record)
    rows_of_all = rows.table_of(records)
    frame = frame_of(rows_of_all, rows.items_of(rows_of_all))

    assert len(study.CASES) == 18
    # Two rounds are on record, which give no verdict.
    assert max(grid.rounds for grid in study.STUDY.grids) == 2
    table = study.width_ratios(frame).set_index(["time of", "over"])[SHOWN]
    unguarded = table.loc["SGLang 0.5.16", "SGLang 0.5.14"]
    assert unguarded.tolist() == [2.0, 1.0, 8.0, 0, 0, 8.0, "inconclusive"]
    guarded = table.loc["SGLang 0.5.17", "SGLang 0.5.16"]
    assert guarded.tolist() == [0.794, 1.0, 1.0, 0, 0, 0.5, "inconclusive"]
    ours = table.loc[study.ALONE, "SGLang 0.5.14"]
    assert ours.tolist() == [0.5, 0.5, 0.5, 0, 0, 0.5, "inconclusive"]
    panels = study.width_chart(frame).axes
    assert [len(axis.lines) for axis in panels] == [4, 4, 4]
    unguarded_line = panels[0].lines[1].get_ydata()
    assert unguarded_line.round().tolist() == [8, 8, 64]
