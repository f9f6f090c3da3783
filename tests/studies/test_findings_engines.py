"""What notebooks 06 to 09 say in words that no table of theirs shows: the records do."""

import numpy as np
import pytest
from support.published import live, pick, published

from attnlib.core.mla import NO_TOKEN
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import plan_splits
from attnlib.core.spec import MLA_TOKEN_BYTES, AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.lengths import sample_page_table, sample_seq_lens
from attnlib.kinds.mla.measure import sample_chosen
from attnlib.run import frame as rows
from attnlib.studies import engine_modes as modes
from attnlib.studies import mla_overflow, one_launch
from attnlib.studies import scheduler_metadata as scheduler
from attnlib.studies import sparse_mla as mla
from attnlib.studies.engine_modes.tables import GRAPH, LIBRARY, PREFIX
from attnlib.studies.sparse_mla.tables import SHAPE

pytestmark = pytest.mark.usefixtures("published_records")
VERIFIED = {"mode": "target_verify", "mask": "causal", "q_len": 4, "batch_size": 32}


def test_one_prepare_a_step_saves_in_a_graph_but_less_than_promised_and_expected():
    steps = published("scheduler_metadata")
    saved = scheduler.savings(steps)
    assert (saved.saved > 0).all()
    deep = pick(saved, layers=64)
    single = deep[(deep.batch_size == 1) & (deep.kv_len <= 8192)].saved
    assert 1.8 * single.max() < scheduler.SGLANG_SAVES_US
    assert not (deep.low >= scheduler.SGLANG_SAVES_US).any()
    accounts = scheduler.accounts(steps)
    assert (accounts.saved / accounts.prepare).median() < scheduler.NEEDED_SHARE
    eager = pick(steps, timer="eager")
    assert eager.kernel_us.max() < eager.run_us.min()


def test_one_launch_saves_alone_and_before_the_layers_nothing():
    alone, step = one_launch.findings(published("one_launch")).splitlines()
    assert "8 shapes, 7 faster, 0 slower" in alone and "8 shapes, 0 faster, 0 slower" in step
    (few,) = one_launch.findings(live("one_launch")).splitlines()
    assert few.startswith("alone: 4 shapes, 4 faster")


def test_a_stale_schedule_takes_more_than_twice_a_fresh_ones_time():
    facts = SchedulerFacts(16, 16, 2, 128, 1, 32768, num_sms=132, page_size=64, causal=True)
    ragged = sample_seq_lens(DecodeCase(AttnSpec(16, 2, 128, 64), 16, 32768, "ragged"))
    fresh, stale = (
        max(tile.end for tile in scheduler.assign_tiles(plan_splits(facts, lengths), ragged))
        for lengths in (ragged, np.full(16, 1024))
    )
    assert stale > 2 * fresh


def test_a_tile_takes_fa3_as_long_whatever_is_in_it_and_fa2s_decode_is_at_the_roof():
    studied = published("engine_modes")
    limit = rows.ceilings(studied)
    times = modes.one_tile(studied, limit).groupby("batch_size").fa3
    assert (times.max() / times.min()).max() < 1.12
    decode = modes.headline(studied, modes.DECODES[1:2], limit)
    assert 0.98 < (decode.fa2 / decode.roof).item() < 1.03  # the roof is of a copy, this reads


def test_behind_a_prefix_fa2_wins_only_with_fewer_tiles_than_sms():
    shapes = modes.plain(modes.mode_rows(published("engine_modes")))
    ratio = pick(modes.over(shapes, "fa2", "fa3"), group=PREFIX)
    heads = ratio.heads.str.split("/").str[0].astype(int)
    tiles = ratio.batch_size * heads * -(-ratio.q_len // 128)
    assert set(tiles[ratio.high < 1]) == {8, 32}
    assert (ratio[tiles > 32].low > 1).all()


def test_where_the_tile_is_the_same_the_graph_costs_most_where_only_it_merges():
    studied = published("engine_modes")
    fa2 = pick(studied, backend="flashinfer-prefill-fa2", mode="dllm_extend", heads="32/8")
    fa2 = pick(fa2, kv_len=8192)
    merges = (rows.launches(fa2, "MergeStates") > 0).groupby([fa2.batch_size, fa2.timer]).all()
    assert merges[~merges].index.tolist() == [(32, "profiler")] and len(merges) == 6
    plans = pick(modes.plans(studied), backend="fa2", mode="dllm_extend").set_index("batch_size")
    assert plans.ratio.idxmax() == 32


def test_the_library_is_first_with_many_requests_but_not_before_fa2_planned_for_eager():
    studied = published("engine_modes")
    times = modes.times(modes.plain(modes.mode_rows(studied)))
    times = times[times[LIBRARY].notna() & times["mode"].isin(("target_verify", "draft_extend"))]
    first = times[LIBRARY] < times[["fa2", "fa3"]].min(axis=1)
    assert first[times.batch_size > 1].all() and first[times.batch_size == 1].mean() < 0.5
    graphs = pick(studied, backend="flash-attn-3-extend", timer=GRAPH)
    assert (rows.launches(graphs, "FlashAttnFwdCombine") > 0).all()
    (eager,) = pick(modes.plans(studied), backend="fa2", **VERIFIED)["for eager"]
    traced = modes.times(modes.mode_rows(studied, GRAPH), "kernel_us")
    (its,) = pick(traced, **VERIFIED, heads="32/8", page_size=1, kv_len=8192)[LIBRARY]
    assert eager < its


def test_zeroing_its_output_costs_flashinfer_a_fifth_of_the_shortest_prefills():
    studied = published("engine_modes")
    ran = studied[studied.backend.str.startswith("flashinfer-prefill")]
    ran = ran[ran["mode"].str.startswith("prefill")]
    zeroing = [
        sum(k.gpu_us for k in kernels if k.name == "vectorized_elementwise_kernel")
        for kernels in ran.kernels
    ] / ran.kernel_us
    assert (zeroing[ran["mode"] == "prefill_ragged"] == 0).all()
    assert 0.2 < zeroing.max() < 0.25 and zeroing[ran.kernel_us > 100].max() < 0.07


def test_the_wrong_records_are_those_that_32_bit_offsets_predict():
    old = pick(mla.mla_records(published("sparse_mla")), release="0.6.4")
    assert ((old.case.map(mla.lost_share) > 0) == (old.status == "incorrect")).all()
    within, beyond = mla.overflow(published("mla_overflow")).tokens
    assert within < mla.first_lost_token() < beyond == within + mla_overflow.KV_LEN


def test_every_request_of_a_wrong_record_reads_the_same_wrong_tokens():
    wrong = pick(mla.mla_records(published("sparse_mla")), status="incorrect")
    for case in wrong.case.drop_duplicates():
        chosen, table = sample_chosen(case), sample_page_table(case).astype("int64")
        assert (chosen != NO_TOKEN).all()
        pages = np.take_along_axis(table, chosen // case.spec.page_size, axis=1)
        slots = pages * case.spec.page_size + chosen % case.spec.page_size
        assert (slots >= mla.first_lost_token()).any(axis=1).all()
    errors = wrong.groupby([*SHAPE, "backend"]).oracle_error.unique().unstack()
    assert errors.map(len).eq(1).all(axis=None)
    assert (errors["fa3 0.6.4"].str[0] / errors["fa2 0.6.4"].str[0] - 1).abs().max() < 4e-4


def test_the_caches_said_to_fit_the_l2_do_and_the_others_do_not():
    table = mla.mla_records(published("sparse_mla"))
    table = table[table.top_k > 0]
    mib = table.top_k * table.batch_size * table.kv_format.map(MLA_TOKEN_BYTES) / 2**20
    few = (table.batch_size <= 8) | ((table.batch_size == 64) & (table.top_k == 512))
    assert ((mib < table.l2_mib) == few).all()
