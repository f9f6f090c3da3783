"""The model's splits are those that the GPU recorded."""

from attnlib import load
from attnlib.kinds.mismatch.case import MISMATCHES, predict_splits
from attnlib.studies import metadata_mismatch as mismatches


def test_the_models_splits_are_those_that_the_gpu_recorded(published_records):
    outcomes = load("metadata_mismatch", mismatches.STUDY.reference_machine)
    rows = outcomes[outcomes.reason.str.startswith("splits")]
    assert len(rows) >= 20
    cases = {case.name: case for case in MISMATCHES}
    for row in rows.itertuples():
        splits = predict_splits(cases[row.name], num_sms=132)
        words = f"splits {splits.in_metadata}, right {splits.right}, cap of the call {splits.cap}"
        assert words.startswith(row.reason)
    bare = outcomes[(outcomes.name == "head-counts") & ~outcomes.guard.astype(bool)]
    (row,) = mismatches.mismatch_table(bare).to_dict("records")
    assert (row["without guard"], row["with guard"]) == ("wrong", "not run")
