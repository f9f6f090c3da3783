"""Tables and figures of metadata: right where all is there, and whole where designs are missing."""

import pandas as pd
import pytest
from support.published import live, published

from attnlib.kinds.cost import Ceilings
from attnlib.run import frame as rows
from attnlib.studies import decode_metadata as metadata
from attnlib.studies import metadata_in_step as in_step
from attnlib.studies.decode_metadata.tables import FUSED, OPS, SERIAL, SIZES

LIMIT = Ceilings(copy_gbps=4000.0, matmul_tflops=1.0, num_sms=132, launch_us=1.0)


@pytest.fixture(params=[published, live])
def frames(request):
    return request.param("decode_metadata"), request.param("decode_metadata_eager")


def test_every_table_and_figure_stands_on_what_a_live_notebook_measures(frames):
    frame, eager = frames
    limit = rows.ceilings(frame, ("copy",))
    for table in (
        metadata.launch_table(frame),
        metadata.side_by_side(frame, metadata.METADATA, limit),
        metadata.speedups(frame, metadata.METADATA),
        metadata.crossovers(frame),
        metadata.worst(frame),
        metadata.strided(frame, limit),
        metadata.windows(frame),
        metadata.eager_table(eager),
    ):
        assert len(table) and not table.isna().all().any()
    assert isinstance(metadata.other_builders(frame), pd.DataFrame)
    assert metadata.designs_chart(frame, limit).axes and metadata.advantage_heatmap(frame).axes
    title = metadata.crossover_map(frame, metadata.TODAY)._suptitle.get_text()
    measured = metadata.TODAY in set(metadata.metadata_rows(frame).backend)
    assert title.startswith(f"Time of {metadata.TODAY if measured else SERIAL} / op by op")


def test_a_design_without_a_round_beside_fused_has_no_ratio():
    eager = published("decode_metadata_eager")
    alone = eager[(eager["round"] == 0) != (eager.backend == "metadata-eager")]
    table = metadata.eager_table(alone).set_index("design")
    assert table["wall / fused"].isna().to_dict() == {
        name: name == metadata.OPS for name in table.index
    }
    told = table[["interval", "margin, %", "verdict"]]
    assert {*told.loc[[metadata.OPS, FUSED]].to_numpy().flat} == {""}
    assert "" not in {*told.loc[SERIAL]}


def test_a_call_in_a_step_is_told_behind_a_foreign_kernel_and_beside_one_behind_itself():
    frame = live("metadata_in_step")
    table = in_step.behind(frame)
    words = [
        f"{FUSED} / {SERIAL}",
        "interval",
        "rounds",
        "fused is",
        f"{FUSED} / {SERIAL}, copy",
        "fused is, copy",
    ]
    assert list(table) == [*SIZES, OPS, SERIAL, FUSED, *words] and len(table) == 6
    assert not table[FUSED].isna().any() and in_step.step_rows(frame).empty
    assert in_step.step_table(frame).empty and in_step.overlap(frame).empty


def test_the_floor_is_a_launch_until_bytes_take_longer():
    short, long = metadata.METADATA[0], metadata.METADATA[6]
    assert metadata.floor_us(short, LIMIT) == LIMIT.launch_us
    assert metadata.floor_us(long, LIMIT) == metadata.fetch_us(long, LIMIT) > 50
    counted = metadata.counted([short, long], LIMIT)[["needed", "sectors", "fetched"]]
    assert (counted.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)


def test_the_best_rival_is_the_one_that_comes_closest_and_releases_are_designs_of_their_own():
    names = set(metadata.metadata_rows(published("decode_metadata")).backend)
    assert names == {OPS, SERIAL, FUSED, "SGLang 0.5.14", "SGLang 0.5.23"}
    found = metadata.metadata_rows(live("decode_metadata"))
    best = metadata.against_best(found).set_index(SIZES)
    each = {n: rows.over(found, FUSED, n).set_index(SIZES).ratio for n in (OPS, SERIAL)}
    assert (best.ratio == pd.DataFrame(each).max(axis=1)).all()
