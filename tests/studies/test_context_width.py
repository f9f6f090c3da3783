"""The context's width: what the tables say of times that are known."""

from attnlib.run import rows
from attnlib.run.frame import frame_of
from attnlib.studies import context_width as study

US = {"0.5.14": 8.0, "0.5.16": 64.0, "0.5.17": 32.0, "0.5.23": 32.0, "": 4.0}
"""By release, of a context of 131,072; of any other every release takes 8 us, and ours 4."""


def test_means_tails_and_the_widest_case_are_of_the_pair_that_is_named(make_record):
    records = []
    for job in study.STUDY.jobs(headline=False):
        for item in job.items:
            us = US[item.release] if item.case.context == 131_072 else min(US[item.release], 8.0)
            named = {"study": job.study, "round": job.round, "item": item}
            records.append(make_record(**named, run_us=(us * (1 + 1e-3 * job.round),) * 3))
    rows_of_all = rows.table_of(records)
    frame = frame_of(rows_of_all, rows.items_of(rows_of_all))
    assert len(study.CASES) == 18
    table = study.width_ratios(frame).set_index(["time of", "over"])
    wanted = ["geometric mean", "median", "worst", "faster", "slower", "widest", "verdict"]
    assert table.loc[study.PAIRS[0], wanted].tolist() == [2.0, 1.0, 8.0, 0, 6, 8.0, "slower"]
    assert table.loc[study.PAIRS[1], wanted].tolist() == [0.794, 1.0, 1.0, 6, 0, 0.5, "faster"]
    ours = table.loc[(study.ALONE, "SGLang 0.5.14"), wanted].tolist()
    assert ours == [0.5, 0.5, 0.5, 18, 0, 0.5, "faster"]
    panels = study.width_chart(frame).axes
    assert [len(axis.lines) for axis in panels] == [6, 6, 6]
    assert panels[0].lines[1].get_ydata().round().tolist() == [8, 8, 64]
