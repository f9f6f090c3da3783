"""The model's splits are those that the GPU recorded, and tables stand with few rows."""

from support.published import live, published

from attnlib.kinds.mismatch.case import MISMATCHES, predict_splits
from attnlib.studies import metadata_mismatch as mismatches
from attnlib.studies import scheduler_metadata as scheduler


def test_the_models_splits_are_those_that_the_gpu_recorded(published_records):
    outcomes = published("metadata_mismatch")
    rows = outcomes[outcomes.reason.str.startswith("splits")]
    assert len(rows) >= 20
    cases = {case.name: case for case in MISMATCHES}
    for row in rows.itertuples():
        splits = predict_splits(cases[row.name], num_sms=132)
        words = f"splits {splits.in_metadata}, right {splits.right}, cap of the call {splits.cap}"
        assert words.startswith(row.reason)


def test_a_mismatch_without_a_guarded_run_says_so(published_records):
    outcomes = published("metadata_mismatch")
    bare = outcomes[(outcomes.name == "head-counts") & ~outcomes.guard.astype(bool)]
    (row,) = mismatches.mismatch_table(bare).to_dict("records")
    assert (row["without guard"], row["with guard"]) == ("wrong", "not run")
    assert (row["overruns"], row["splits in metadata"]) == ("yes", 86)


def test_tables_and_the_figure_stand_with_the_headline_rows_alone(published_records):
    frame = live("scheduler_metadata")
    assert 0 < len(scheduler.savings(frame)) < 10
    assert scheduler.savings(frame, timer="eager").empty
    assert scheduler.savings_chart(frame).axes
