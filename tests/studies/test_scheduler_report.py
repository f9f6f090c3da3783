"""Tables and pictures of FA3's schedule: on made-up steps, with rows missing, and by the model."""

from itertools import chain

import numpy as np
import pytest
from support.published import live, published

from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import plan_splits
from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.item import Item
from attnlib.kinds.mismatch.case import MISMATCHES, call_facts, predict_splits
from attnlib.kinds.step.case import StepCase
from attnlib.run import store
from attnlib.studies import metadata_mismatch as mismatches
from attnlib.studies import scheduler_metadata as scheduler

FACTS = SchedulerFacts(4, 16, 2, 128, 1, 8192, num_sms=132, page_size=64, causal=True)
FORWARD, PREPARE = "FlashAttnFwdSm90", "prepare_varlen_num_blocks_kernel"
ZERO = "vectorized_elementwise_kernel"


@pytest.fixture
def steps(make_record):
    """Two rounds of 4 layers: 100 and 104 us each, 88 and 92 once; prepare alone takes 5."""

    def record(backend, round_, run_us, layers, **kernels):
        case = StepCase(DecodeCase(AttnSpec(16, 2, 128, 64), 1, 512, "ragged"), layers)
        traced = [{"name": k, "launches": float(n), "gpu_us": us} for k, (n, us) in kernels.items()]
        told = {"item": Item(backend, "graph", case), "kernels": tuple(traced)}
        return make_record(round=round_, run_us=(run_us,), **told)

    for round_ in (0, 1):
        late = 4.0 * round_
        each = {FORWARD: (4, 96.0), PREPARE: (4, 20.0)}
        once = {FORWARD: (4, 96.0), PREPARE: (1, 5.0), ZERO: (4, 3.0)}
        store.append(record("flash-attn-3-step-each", round_, 100.0 + late, 4, **each))
        store.append(record("flash-attn-3-step-once", round_, 88.0 + late, 4, **once))
        store.append(record("flash-attn-3-prepare", round_, 5.0, 1, **{PREPARE: (1, 4.0)}))
    (machine,) = store.machines("demo")
    return store.load("demo", machine)


def test_a_saving_pairs_rounds_and_is_set_beside_the_prepare_kernels(steps):
    (row,) = scheduler.savings(steps).itertuples()
    assert (row.layers, row.kv_len, row.saved, row.rounds) == (4, 512, 12.0, 2)
    assert (row.low, row.high) == (12.0, 12.0)
    assert row.share == pytest.approx(12 / (3 * 5)) and row.gain == pytest.approx(100 * 12 / 102)


def test_kernels_of_a_step_are_counted_by_way_and_account_for_the_saving(steps):
    table = scheduler.kernels_per_step(steps).set_index("way")
    assert table.prepare.to_dict() == {"each": 4, "once": 1}
    assert table.zeroing.to_dict() == {"each": 0, "once": 4}
    assert scheduler.one_split_up_to(steps) == 512
    (row,) = scheduler.accounts(steps, layers=4).itertuples()
    assert (row.prepare, row.zeroing, row.others, row.saved) == (15.0, -3.0, 0.0, 12.0)
    assert row.prepare + row.zeroing + row.hidden + row.others == row.saved


def test_tables_and_figures_stand_with_the_headline_rows_alone():
    frame = live("scheduler_metadata")
    assert 0 < len(scheduler.savings_table(frame)) < 10
    assert scheduler.savings_table(frame, timer="eager").empty
    assert len(scheduler.summary(frame)) <= 2 and len(scheduler.kernels_per_step(frame)) <= 4
    assert scheduler.accounts_summary(frame).saved.notna().all()
    assert scheduler.savings_chart(frame).axes and scheduler.share_chart(frame).axes
    table = scheduler.savings_table(frame[frame["round"] == 0])
    assert set(table["interval"]) == {"one round"}


def test_tiles_cover_every_block_once_and_an_sm_does_one_at_a_time():
    plan = plan_splits(FACTS, np.array([8192, 300, 5000, 1]))
    tiles = scheduler.assign_tiles(plan)
    for request, blocks in enumerate(plan.num_n_blocks):
        own = [tile for tile in tiles if (tile.request, tile.head) == (request, 0)]
        seen = [range(tile.first, tile.first + tile.blocks) for tile in own]
        assert sorted(chain(*seen)) == list(range(blocks))
    for sm in range(FACTS.num_sms):
        mine = sorted((t for t in tiles if t.sm == sm), key=lambda tile: tile.start)
        assert all(a.end <= b.start for a, b in zip(mine, mine[1:], strict=False))
    assert 0 < scheduler.balance(tiles, num_sms=FACTS.num_sms) <= 1


def test_a_stale_plan_still_covers_the_lengths_of_the_call():
    told, attended = np.full(4, 64), np.array([8192, 300, 5000, 1])
    tiles = scheduler.assign_tiles(plan_splits(FACTS, told), attended)
    work = sum(tile.blocks for tile in tiles if tile.head == 0)
    assert work == (-(-attended // FACTS.tile[1])).sum()
    shrunk = scheduler.assign_tiles(plan_splits(FACTS, attended), told)
    assert sum(tile.blocks for tile in shrunk if tile.head == 0) == 4
    assert min(tile.blocks for tile in shrunk) == 0


def test_the_pictures_of_the_model_name_what_they_show():
    batches = {"even": [4096] * 4, "one long": [8192, 1, 1, 1]}
    tiles = scheduler.tile_chart(FACTS, batches)
    assert [axis.get_title(loc="left").split(":")[0] for axis in tiles.axes] == list(batches)
    assert "model, not a measurement" in tiles.texts[-1].get_text()
    stale = scheduler.stale_chart(FACTS, [64] * 4, [8192] * 4)
    assert "stale" in stale.axes[1].get_title(loc="left")


def test_splits_fall_with_the_batch_and_never_pass_the_cap():
    table = scheduler.split_table(FACTS)
    falling = table[["cap", 1, 4, 16, 64, 128]].diff(axis=1)
    assert (falling.iloc[:, 1:] <= 0).all(axis=None)


def test_the_models_splits_are_those_that_the_gpu_recorded():
    outcomes = published("metadata_mismatch")
    told = outcomes[outcomes.reason.str.startswith("splits")]
    assert len(told) >= 20
    cases = {case.name: case for case in MISMATCHES}
    for row in told.itertuples():
        splits = predict_splits(cases[row.name], num_sms=132)
        words = f"splits {splits.in_metadata}, right {splits.right}, cap of the call {splits.cap}"
        assert words.startswith(row.reason)
    some = outcomes[(outcomes.name == "head-counts") & ~outcomes.guard.astype(bool)]
    (row,) = mismatches.mismatch_table(some).to_dict("records")
    assert (row["past the guard"], row["with the guard"]) == ("wrong", "not run")
    assert (row["overruns"], row["splits in metadata"]) == ("yes", 86)
    refused = some.assign(oracle_error=None, reported_backend="", status="refused")
    assert mismatches.mismatch_table(refused)["relative error"].isna().all()
    assert call_facts(cases["none"], num_sms=132).split_cap == 29
    assert not predict_splits(cases["none"], num_sms=132).overrun


def test_the_vectors_are_the_projects_whatever_folder_holds_the_records(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNLIB_DATA", str(tmp_path))
    assert scheduler.model_agreement().calls.sum() > 0
