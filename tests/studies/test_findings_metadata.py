"""The numbers in the prose of the notebook on decode metadata are those of the records."""

from functools import partial

import pytest
from support.published import prose, published, says

from attnlib.run import frame as rows
from attnlib.studies import decode_metadata as metadata
from attnlib.studies.decode_metadata.tables import (
    ALONE,
    FUSED,
    MERGED,
    OPS,
    RIVALS,
    SERIAL,
    SIZES,
    TODAY,
)

pytestmark = pytest.mark.usefixtures("published_records")
tells = partial(says, "05")
SOURCE, ONE_REQUEST, LARGEST = (32, 1, 8192), (1, 1, 8192), (4096, 16, 32768)


@pytest.fixture
def studied():
    frame = published("decode_metadata")
    return frame[frame.timer == "graph"]


@pytest.fixture
def bounds(studied):
    return rows.ceilings(studied, ("copy",))


@pytest.fixture
def best(studied):
    return metadata.against_best(metadata.metadata_rows(studied))


def test_notebook_05_answers_with_the_sources_case(studied, bounds):
    row = metadata.side_by_side(studied, metadata.METADATA, bounds).set_index(SIZES).loc[SOURCE]
    tells(
        f"in {row[FUSED]:.2f} us, where op by op takes {row[OPS]:.1f} us and SGLang 0.5.23 takes "
        f"{row[TODAY]:.2f} us (batch 32, page size 1, 8,192 tokens, in a graph)"
    )


def test_notebook_05_is_ahead_at_every_size_and_says_where_it_is_not_certain(studied, best):
    times = rows.times(metadata.metadata_rows(studied))
    assert (times[FUSED] < times[[OPS, *RIVALS]].min(axis=1)).all()
    tells(f"no rival's median is shorter at any of {len(best)} sizes")
    clear = (best.high < 1).sum()
    tells(f"at {clear} of {len(best)} the interval lies below 1")
    tells(f"at {len(best) - clear} it reaches past 1")
    tells(f"{best.ratio.median():.2f} in the median of all {len(best)} sizes")
    tells(f"The worst ratio is {metadata.worst(studied).ratio[0]:.2f}.")


def test_notebook_05_says_where_the_map_of_the_newest_kernel_turns(studied):
    found = rows.over(metadata.metadata_rows(studied), TODAY, OPS)
    large = found[found.page_size == 256]
    assert (large[large.batch_size < 512].high < 1).all()
    assert (large[large.batch_size >= 512].low > 1).all() and large.batch_size.max() > 512
    tells("at page size 256 it loses from batch 512 on, whatever the context")
    earlier = found[(found.page_size < 256) & (found.batch_size == 512)]
    assert (earlier.high < 1).any() and "Larger pages make shorter tables" in prose("05")


def test_notebook_05_counts_launches_as_traced(studied, bounds):
    table = metadata.launch_table(studied).set_index(["builder", "design"])
    pages, arrays = table.loc[("page table", OPS)], table.loc[("page arrays", OPS)]
    tells(f"a page table is {pages.fewest} to {pages.most} launches")
    tells(f"page arrays {arrays.most}. All fused designs have one")
    assert arrays.fewest == arrays.most
    assert set(table.drop(index=OPS, level="design").most) == {1}
    tells(f"A launch costs {bounds.launch_us:.2f} us")


def test_notebook_05_counts_bytes(bounds):
    table = metadata.counted(metadata.METADATA, bounds).set_index(SIZES)
    row = table.loc[LARGEST]
    times = row.fetched / row.needed
    tells(f"needs {row.needed:.0f} MiB and fetches {row.fetched:.0f}, {times:.1f} times")
    assert table.loc[SOURCE].floor > 3 * table.loc[SOURCE]["fetched / copy"]
    assert table.loc[(128, 1, 8192)].floor == pytest.approx(bounds.launch_us, rel=0.25)


def test_notebook_05_says_how_near_the_floor_fused_is(studied, bounds):
    near = metadata.side_by_side(studied, metadata.METADATA, bounds)["fused / floor"]
    tells(f"Fused takes {near.min():.2f} to {near.max():.2f} times the floor")


def test_notebook_05_says_where_fusing_loses(studied, best):
    decode = metadata.metadata_rows(studied)
    lost = {name: rows.over(decode, name, OPS) for name in RIVALS}
    count = {name: (found.low > 1).sum() for name, found in lost.items()}
    tells(
        f"at {count[MERGED]} of {len(best)} sizes as merged and at {count[TODAY]} of them today, "
        f"by up to {lost[MERGED].ratio.max():.0f} times; `serial` at {count[SERIAL]}"
    )
    shortest = metadata.crossovers(studied).query("max_ctx == 128")
    assert set(shortest[list(RIVALS)].to_numpy().ravel()) == {"512"}
    serial = rows.over(decode, SERIAL, MERGED)
    assert serial.ratio.median() == pytest.approx(1, abs=0.05), "a fair stand-in, in a graph"


def test_notebook_05_says_what_the_overlap_gives(studied):
    table = metadata.overlap(studied).set_index(SIZES)
    row = table.loc[ONE_REQUEST]
    tells(
        f"without it the call takes {row['without / with']:.2f} times as long, {row[ALONE]:.2f} "
        f"us, where SGLang's merged kernel takes {row[MERGED]:.2f}, in rounds too far apart"
    )
    decode = metadata.metadata_rows(studied)
    even = rows.over(decode, ALONE, MERGED).set_index(SIZES).loc[ONE_REQUEST]
    assert even.low < 1 < even.high
    larger = table.drop(index=[ONE_REQUEST])
    today = rows.times(decode).set_index(SIZES)[TODAY]
    assert (larger[ALONE] < larger[MERGED]).all()
    assert (larger[ALONE] < today.loc[larger.index]).all()


def test_notebook_05_says_how_far_strided_gathers_are_from_memory(studied, bounds):
    table = metadata.strided(studied, bounds)
    sixteen, wide = table[table.page_size == 16], table[table.page_size == 256]
    copy, gather = sixteen["fused / copy"], sixteen["fused / gather"]
    tells(f"fused takes {copy.min():.2f} to {copy.max():.2f} times what its fetched bytes take")
    tells(f"It takes {gather.min():.2f} to {gather.max():.2f} of a bare gather")
    tells(f"it takes {wide['fused / copy'].item():.2f} times the fetched bytes")


def test_notebook_05_gives_the_other_builders(studied):
    table = metadata.other_builders(studied).set_index("builder")
    arrays, draft, verify = table["median"]
    tells(
        f"{arrays:.0f}, {draft:.0f} and {verify:.1f} times in the median, at least "
        f"{table.least.min():.1f} everywhere"
    )


def test_notebook_05_gives_eager_wall_times():
    table = metadata.eager_table(published("decode_metadata_eager")).set_index("design")
    wall, gpu = table.wall, table["GPU, traced"]
    tells(
        f"fused takes {wall[FUSED]:.1f} us of it for {gpu[FUSED]:.1f} us of GPU work, "
        f"op by op {wall[OPS]:.1f} us for {gpu[OPS]:.1f}"
    )
    tells(f"launch path takes SGLang {wall[MERGED]:.1f} us")
    tells(f"slower one to launch, {wall[TODAY]:.1f} us")
    tells(f"takes {wall[SERIAL]:.1f} us: it also looks its checks up")


def test_notebook_05_says_what_a_step_gains_and_where_it_does_not(studied):
    table = metadata.step_table(studied)
    name = "op by op / fused"
    gains = 100 * (table[table.batch_size == 1][name] - 1)
    rest = table[table.batch_size > 1]
    tells(f"worth {gains.min():.1f} to {gains.max():.1f} % at batch 1")
    tells(f"step is {gains.min():.1f} to {gains.max():.1f} % longer")
    tells(f"runs from {rest[name].min():.3f} to {rest[name].max():.3f}")
    assert "slower" not in set(rest["op by op is"])
    slow = rest.loc[rest[name].idxmin()]
    shape = f"batch {slow.batch_size} at page size {slow.page_size}"
    longer = f"took {(slow[FUSED] - slow[OPS]) / 1e3:.1f} ms longer of {slow[OPS] / 1e3:.1f} ms"
    assert shape in prose("05") and longer in prose("05")
    clocks = rest["SM MHz"]
    tells(f"{clocks.min():.0f} to {clocks.max():.0f} MHz instead of 1980")


def test_in_large_steps_the_gpu_is_at_its_power_limit_and_metadata_takes_a_tenth_of_a_ms(studied):
    steps = metadata.step_rows(studied)
    large = steps[steps.batch_size > 1]
    assert large.power_capped.all()
    wide = large[(large.batch_size == 512) & (large.page_size == 1)]
    times = wide.pivot_table(index="round", columns="backend", values="run_us")
    assert (times[FUSED] > times[OPS]).all()
    alone = rows.times(metadata.metadata_rows(studied)).set_index(SIZES)
    assert 90 < alone.loc[(512, 1, 8192), OPS] < 110
