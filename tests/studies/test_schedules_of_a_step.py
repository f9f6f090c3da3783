"""The tables of a step's schedules and of better splits: what they say of times that are known."""

from dataclasses import replace

import numpy as np
import pytest

from attnlib.core.schedule.splits import plan_splits
from attnlib.run import rows
from attnlib.run.frame import frame_of
from attnlib.studies.metadata import schedules
from attnlib.studies.metadata import step_schedules as study
from attnlib.studies.splits import judged_splits, split_cap
from attnlib.studies.splits.list_schedule import tiles_in_time

LAYER_US, LAUNCH_US = 2.0, 3.0


def prepared(backend):
    """Launches of the library in a step by this backend."""
    way, _, model = backend.partition("-")
    return sum(schedules.MODELS[model].prepared.values()) if way == "each" else 0


def record_of(make_record, job, item):
    layers = prepared(item.backend)
    us = LAUNCH_US + LAYER_US * layers + 0.01 * job.round
    kernels = [{"name": "decode_metadata_kernel", "launches": 1.0, "gpu_us": 2.5}]
    if layers:
        prepare = {
            "name": "prepare_varlen_num_blocks_kernel",
            "launches": float(layers),
            "gpu_us": LAYER_US * layers,
        }
        kernels.append(prepare)
    return make_record(
        study=job.study,
        round=job.round,
        item=item,
        run_us=(us, us, us),
        kernels=tuple(kernels),
    )


def test_a_row_has_the_launches_of_the_trace_and_what_one_launch_saves(make_record):
    records = []
    for job in study.STUDY.jobs(headline=False):
        for item in job.items:
            records.append(record_of(make_record, job, item))
    made = rows.table_of(records)
    table = study.step_table(frame_of(made, rows.items_of(made)))
    assert len(table) == 2 * len(study.DECODE) + len(study.VERIFY)
    launches = dict(zip(table.step, table["launches in each layer"], strict=True))
    assert list(launches.values()) == [20, 62, 33]
    saved = LAYER_US * (table["launches in each layer"] - 1)
    assert np.allclose(table["us saved"], saved)
    assert np.allclose(table["us in one launch"], LAUNCH_US, atol=0.1)


def test_better_splits_were_tried_on_batches_that_taught_nothing():
    table = judged_splits.judged()
    known = {batch.lengths for batch in split_cap.batches()}
    assert not known & {*table.lengths}
    assert table.groupby(["page_size", "layout"]).size().to_dict() == {
        (1, "mla128"): 32,
        (1, "mla16x4"): 32,
        (64, "mla128"): 4,
        (64, "mla16x4"): 4,
    }


@pytest.mark.parametrize(
    "name, layout",
    [("mla128", split_cap.MLA), ("mla16x4", split_cap.MLA_VERIFY)],
)
def test_the_splits_on_record_are_those_of_the_bounded_cap_and_no_split_exceeds_it(name, layout):
    table = judged_splits.judged()
    for row in table[(table.page_size == 1) & (table.layout == name)].itertuples():
        splits = split_cap.splits_of(layout.case(row.lengths), "bounded").tolist()
        assert row.splits["bounded"] == "+".join(map(str, splits))
        assert max(map(int, row.splits["list"].split("+"))) <= row.cap


def test_a_ratio_is_the_geometric_mean_of_its_rounds():
    table = judged_splits.judged()
    first = table.iloc[0].us
    by_hand = np.prod(np.divide(first["bounded"], first["list"])) ** (1 / 3)
    assert judged_splits.ratios(table[:1], "bounded", "list") == pytest.approx([by_hand])
    shown = judged_splits.judged_table()
    assert shown.batches.tolist() == [64, 64, 64, 8]
    assert (shown.least <= shown["median"]).all() and (shown["median"] <= shown.most).all()


def test_in_decode_the_gain_follows_the_idle_time_of_the_model_and_in_verification_some_lose():
    table = judged_splits.judged()
    gains = {}
    for name, layout in (("mla128", split_cap.MLA), ("mla16x4", split_cap.MLA_VERIFY)):
        rows = table[(table.page_size == 1) & (table.layout == name)]
        idle = []
        for row in rows.itertuples():
            case = layout.case(row.lengths)
            facts = replace(split_cap.facts_of(case), num_splits=int(row.cap))
            q_lens, lens = split_cap.lengths_of(case)
            idle.append(tiles_in_time(plan_splits(facts, lens, q_lens)).idle)
        gains[name] = judged_splits.ratios(rows, "bounded-once", "list")
        assert (gains[name] <= 1.02 / (1 - np.array(idle))).sum() >= 31
        if name == "mla128":
            assert np.corrcoef(idle, gains[name])[0, 1] > 0.9
    assert gains["mla128"].min() > 0.98 and gains["mla16x4"].min() < 0.91
