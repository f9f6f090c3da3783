"""What notebooks 01 to 05 say without a number; the numbers are `house/test_prose.py`'s."""

import pytest
from support.published import published

from attnlib.run import frame as rows
from attnlib.run.bisect import bisect
from attnlib.studies import STUDIES, auto_resolution, roofline
from attnlib.studies import decode_metadata as metadata
from attnlib.studies import fa3_decode_regression as tables
from attnlib.studies import measurement_trust as trust
from attnlib.studies import metadata_in_step as in_step
from attnlib.studies.decode_metadata.tables import FUSED, MERGED, OPS, SERIAL, TODAY, metadata_rows
from attnlib.studies.fa3_decode_regression.study import FIXED, REGRESSED

pytestmark = pytest.mark.usefixtures("published_records")


@pytest.fixture
def built():
    return published("decode_metadata").query("timer == 'graph'")


@pytest.fixture
def builders(built):
    return metadata_rows(built)


def test_01_auto_ran_fa3_in_four_releases_and_no_other():
    seen = auto_resolution.resolution(published("auto_resolution"))
    sixteen = seen[(seen["query"] == "bfloat16") & (seen.kv == "bfloat16")]
    ran = sixteen.groupby("ran").release.apply(list)
    assert ran["fa3"] == ["0.6.0", "0.6.1", "0.6.2", "0.6.3"]
    assert ran["fa2"] == ["0.5.3", "0.6.4", "0.7.2.post1"]


def test_02_fa2_reaches_the_slope_of_the_roof_and_fa3_lies_under_it(wide, limit):
    table = roofline.roofline_table(wide, REGRESSED)
    assert table.intensity.max() < limit.matmul_tflops * 1e3 / limit.copy_gbps / 10
    best = table[~table.in_l2].groupby("family").gbps.max()
    assert best["fa2"] > limit.copy_gbps > best["fa3"]


def test_02_fa3_wins_only_for_multi_head_attention_and_cuda_cores_beat_it(wide, top, limit):
    grid = tables.slowdown_grid(wide, REGRESSED)
    assert set(grid[grid.ratio < 1][["heads", "batch_size"]].apply(tuple, axis=1)) == {("32/32", 4)}
    table = tables.headline(top, limit, REGRESSED)
    assert (table["CUDA cores"] < table.fa3).all() and (table.rounds >= 3).all()


def test_02_auto_takes_fa2s_time_in_every_fixed_release(top):
    summary = tables.release_summary(top)
    fixed = summary[summary.release != REGRESSED]
    assert set(fixed["ran"]) == {"fa2"}
    assert fixed.lowest.min() > 0.97 and fixed.highest.max() < 1.03
    assert set(summary[summary.release == REGRESSED]["ran"]) == {"fa3"}


def test_02_every_published_number_passed_its_oracle(frame):
    decode = frame[frame.heads.notna() & (frame.status == "ok")]
    assert (decode.oracle_error <= decode.oracle_budget).all()
    assert set(frame.status) <= {"ok", "refused"}


def test_03_auto_is_slower_in_all_seven_shapes_and_in_none_when_fixed(top):
    assert not published("measurement_trust").throttled.any()
    for release, words in ((REGRESSED, {"slower"}), (FIXED, {"same", "ambiguous"})):
        judged = trust.verdicts(rows.decode_rows(top, release=release), rows.AUTO, rows.FA2)
        assert len(judged) == 7 and {*judged.verdict} == words


@pytest.mark.parametrize(
    ("good", "bad", "changed"), [("0.5.3", "0.6.3", "0.6.0"), ("0.6.13", "0.6.3", "0.6.4")]
)
def test_04_the_search_finds_the_releases_it_names(good, bad, changed):
    study = STUDIES["fa3_decode_regression"]
    case = study.case_named("32/8,d128,p16,b16,k8192")
    assert bisect(study, case, package="flashinfer-python", good=good, bad=bad).changed == changed


def test_05_with_a_window_ours_is_the_slower_at_page_size_one_alone(built):
    table = metadata.windows(built).set_index("page_size")
    assert table.pop("verdict").eq("slower").pipe(lambda slow: [*slow[slow].index]) == [1]
    assert table[f"{FUSED} / {TODAY}"].is_monotonic_decreasing


def test_05_fused_is_ahead_of_every_rival_and_serial_a_fair_stand_in(builders):
    times = rows.times(builders)
    assert (times[FUSED] < times[[OPS, SERIAL, MERGED, TODAY]].min(axis=1)).all()
    assert rows.over(builders, SERIAL, MERGED).ratio.median() == pytest.approx(1, abs=0.05)


def test_05_the_newest_kernel_loses_from_batch_512_on_earlier_with_larger_pages(builders):
    found = rows.over(builders, TODAY, OPS)
    large = found[found.page_size == 256]
    assert (large[large.batch_size < 512].high < 1).all()
    assert (large[large.batch_size >= 512].low > 1).all() and large.batch_size.max() > 512
    assert (found[(found.page_size < 256) & (found.batch_size == 512)].high < 1).any()


def test_05_behind_another_kernel_one_request_gains_nothing_and_others_do():
    table = in_step.behind(published("metadata_in_step")).set_index("batch_size")
    assert table["fused is"].tolist() == ["ambiguous", *["faster"] * 7]
    assert (table["fused is, copy"] == "faster").all() and table.loc[1, FUSED] > 1.4
    one, *larger = table[f"{FUSED} / {TODAY}"]
    assert one > 1 and max(larger) < 0.7


def test_05_large_steps_are_at_the_power_limit_and_show_no_gain():
    frame = published("metadata_in_step")
    table, steps = in_step.step_table(frame), in_step.step_rows(frame)
    told = table[table["op by op is"] != "ambiguous"]
    assert told[["batch_size", "page_size"]].to_numpy().tolist() == [[1, 16]]
    assert steps[steps.batch_size > 1].power_capped.all() and steps.noise.min() > 0.02
