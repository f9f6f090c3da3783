"""The numbers in the prose of notebooks and README are those of the committed records."""

import re
from functools import partial

import pytest
from support.published import NOTEBOOKS, prose, published, says

from attnlib.run import frame as rows
from attnlib.run.bisect import bisect
from attnlib.studies import STUDIES, auto_resolution, roofline
from attnlib.studies import fa3_decode_regression as tables
from attnlib.studies import measurement_trust as trust
from attnlib.studies.fa3_decode_regression.study import FIXED, HEADLINE, REGRESSED, WIDE

FP8, BF16 = "float8_e4m3fn", "bfloat16"
says_01, says_02, says_03 = (partial(says, number) for number in ("01", "02", "03"))


pytestmark = pytest.mark.usefixtures("published_records")


@pytest.fixture
def wide(frame):
    return frame[frame.case.isin(WIDE)]


def resolved_us(query: str, kv: str, release: str) -> float:
    seen = auto_resolution.resolution(published("auto_resolution"))
    (row,) = seen[
        (seen["query"] == query) & (seen.kv == kv) & (seen.release == release)
    ].itertuples()
    return row.run_us


def test_notebook_02_places_decode_under_its_roofs(wide, limit):
    table = roofline.roofline_table(wide, REGRESSED)
    ridge = limit.matmul_tflops * 1e3 / limit.copy_gbps
    most = table.intensity.max()
    said = f"does {most:.0f} useful FLOPs a byte at most, and the roofs meet at {ridge:.0f}"
    assert said in prose("02") and most < ridge / 10
    reached = table[~table.in_l2].assign(share=lambda rows: rows.gbps / limit.copy_gbps)
    best = reached.groupby("family").share.max()
    assert best["fa2"] > 1 > best["fa3"]


def test_notebook_03_names_the_verdict_that_lies_nearest_to_its_margin(frame):
    noise = trust.noise_of(published("measurement_trust"))
    broken = rows.decode_rows(frame[frame.case.isin(HEADLINE)], release=REGRESSED)
    words = trust.verdicts(broken, rows.AUTO, rows.FA2, noise=noise)
    assert set(words.verdict) == {"slower"} and (words.low > 1 + words.margin).all()
    nearest = words.loc[words.low.idxmin()]
    says_03(f"the nearest, {nearest.heads} heads, begins at {nearest.low:.2f}")


def test_notebook_01_names_the_price_of_the_resolution():
    before, during = resolved_us(BF16, BF16, "0.5.3"), resolved_us(BF16, BF16, "0.6.3")
    says_01(f"takes {before:.0f} us on 0.5.3 and {during:.0f} us on 0.6.3")


def test_notebook_01_lists_the_releases_that_ran_fa3_and_no_other():
    seen = auto_resolution.resolution(published("auto_resolution"))
    sixteen = seen[(seen["query"] == BF16) & (seen.kv == BF16)]
    fa3 = sixteen[sixteen["ran"] == "fa3"].release.tolist()
    assert fa3 == ["0.6.0", "0.6.1", "0.6.2", "0.6.3"]
    assert set(sixteen[sixteen["ran"] == "fa2"].release) == {"0.5.3", "0.6.4", "0.7.2.post1"}
    says_01("releases 0.6.0 to 0.6.3, and fa2 in 0.5.3, 0.6.4 and 0.7.2.post1")


def test_notebook_02_answers_with_the_grids_median_and_worst(wide):
    grid = tables.slowdown_grid(wide, REGRESSED)
    says_02(
        f"{grid.ratio.median():.1f} times as long as fa2 in the median of {len(grid)} shapes "
        f"and up to {grid.ratio.max():.0f} times at worst",
    )
    wins = grid[grid.ratio < 1]
    says_02(f"in {len(wins)} of the {len(grid)} shapes it wins")
    says_02(f"down to {grid.ratio.min():.2f} of fa2's time")
    assert set(wins.heads) == {"32/32"} and set(wins.batch_size) == {4}


def test_notebook_02_gives_the_range_of_the_headline_shapes(frame, limit):
    table = tables.headline(frame[frame.case.isin(HEADLINE)], limit, REGRESSED)
    low, high = table["fa3 / fa2"].min(), table["fa3 / fa2"].max()
    says_02(f"runs from {low:.2f}, for multi-head attention")
    says_02(f"to {high:.1f}, for one long request")
    beaten = (table["CUDA cores"] < table.fa3).sum()
    says_02(f"beats fa3 in {beaten} of these 7 shapes")
    assert (table.rounds >= 3).all()


def test_notebook_02_says_how_well_the_schedule_predicts(frame, limit):
    low, high = tables.predictions(frame, limit, REGRESSED).error.quantile([0.1, 0.9])
    says_02(f"lies between {low:.2f} and {high:.2f} for 80 % of them")


def test_notebook_02_says_how_far_the_clocks_fell(wide):
    slow = tables.clocks(wide, REGRESSED)["below 1900 MHz, %"]
    says_02(f"{slow['fa3']} % of fa3's measurements end below 1900 MHz, {slow['fa2']} % of fa2's")


def test_notebook_02_says_what_fp8_still_costs():
    slow, fast = resolved_us(FP8, FP8, "0.6.4"), resolved_us(BF16, FP8, "0.6.4")
    says_02(f"{slow:.0f} us, where a bf16 query")
    says_02(f"fa2 in {fast:.0f} us")


def test_auto_takes_fa2s_time_in_every_fixed_release(frame):
    summary = tables.release_summary(frame[frame.case.isin(HEADLINE)])
    fixed = summary[summary.release != REGRESSED]
    assert set(fixed["ran"]) == {"fa2"}
    assert fixed.lowest.min() > 0.97 and fixed.highest.max() < 1.03
    assert set(summary[summary.release == REGRESSED]["ran"]) == {"fa3"}


def test_every_published_number_passed_its_oracle(frame):
    decode = frame[frame.heads.notna() & (frame.status == "ok")]
    assert (decode.oracle_error <= decode.oracle_budget).all()
    assert set(frame.status) <= {"ok", "refused"}


def test_the_prose_has_no_unfilled_placeholder():
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert not re.search(r"@\w+@", prose(path.stem))


@pytest.fixture
def trusted():
    return published("measurement_trust")


def test_notebook_03_answers_with_the_aa_noise_and_its_pairs(trusted):
    pairs, noise = trust.aa_pairs(trusted), trust.noise_of(trusted)
    says_03(f"differs by less than {100 * noise:.1f} % in 95 % of {len(pairs)} pairs")
    assert (pairs.ratio - 1).abs().median() < 0.01


def test_notebook_03_says_how_often_graph_and_profiler_agree(trusted):
    table = trust.agreement(trusted)
    agree = table["within 2 %"]
    says_03(f"on {agree['flashinfer-fa3']} of {table.cases['flashinfer-fa3']} of fa3")
    for name in ("flashinfer-fa2", "flashinfer-cuda-cores"):
        assert agree[name] == table.cases[name]


def test_notebook_03_says_what_graph_mode_costs_the_cuda_cores(trusted):
    table = trust.timer_table(trusted).set_index(["backend", "heads", "batch_size"])
    row = table.loc[("flashinfer-cuda-cores", "32/8", 1)]
    says_03(f"take {row.graph:.1f} us in a graph and {row.profiler:.1f} in the")


def test_notebook_03_says_what_a_cold_cache_costs_fa2(trusted):
    table = trust.cold_table(trusted)
    fa2 = table[table.backend == "flashinfer-fa2"].set_index("mib").ratio
    says_03(f"costs fa2 {100 * (fa2[16.0] - 1):.0f} % at 16 MiB")
    assert (fa2[fa2.index >= 128] <= 1.02).all()


def test_notebook_03_gives_the_ceilings_gain_and_launch(trusted):
    limit = rows.ceilings(trusted)
    says_03(f"reaches {100 * (limit.read_gbps / limit.copy_gbps - 1):.0f} % more")
    says_03(f"costs {limit.launch_us:.2f} us in a graph")


def test_notebook_03_judges_the_regression_and_its_fix(frame, trusted):
    noise, top = trust.noise_of(trusted), frame[frame.case.isin(HEADLINE)]
    for release, word in ((REGRESSED, "slower"), (FIXED, "same")):
        judged = trust.verdicts(
            rows.decode_rows(top, release=release), rows.AUTO, rows.FA2, noise=noise
        )
        assert set(judged.verdict) == {word}
        says_03(f"{word} in {len(judged)} of 7 shapes")


def test_aa_noise_has_no_throttled_record(trusted):
    assert not trusted.throttled.any()


@pytest.mark.parametrize(
    ("good", "bad", "changed"), [("0.5.3", "0.6.3", "0.6.0"), ("0.6.13", "0.6.3", "0.6.4")]
)
def test_notebook_04_names_the_releases_that_the_search_finds(good, bad, changed, monkeypatch):
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    study = STUDIES["fa3_decode_regression"]
    case = study.case_named("32/8,d128,p16,b16,k8192")
    found = bisect(study, case, package="flashinfer-python", good=good, bad=bad)
    assert found.changed == changed
    says("04", f"{changed} as the first")
