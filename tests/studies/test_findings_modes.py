"""The numbers in the prose of the notebook on backends and modes are those of the records."""

from functools import partial

import pytest
from support.published import pick, prose, published, says, span

from attnlib.run import frame as rows
from attnlib.studies import STUDIES, claims
from attnlib.studies import engine_modes as modes
from attnlib.studies.engine_modes.tables import FA2, FA3, FEW, GRAPH, LIBRARY, MANY, PREFIX

pytestmark = pytest.mark.usefixtures("published_records")
tells = partial(says, "08")
MACHINE = STUDIES["engine_modes"].reference_machine
SOURCE = {"mode": "target_verify", "mask": "causal", "q_len": 4, "batch_size": 32}


@pytest.fixture
def studied():
    return published("engine_modes")


@pytest.fixture
def bounds(studied):
    return rows.ceilings(studied)


@pytest.fixture
def ratio(studied):
    return modes.over(modes.plain(modes.mode_rows(studied)), FA2, FA3)


def test_notebook_08_answers_with_shapes_and_what_prefill_pays(studied, ratio):
    counts = modes.summary(studied).set_index("group")
    few, many = counts.loc[list(FEW)], counts.loc[list(MANY)]
    prefill = ratio[ratio.group.isin(MANY)].ratio
    tells(
        f"faster than fa3 at {few['fa2 faster'].sum()} of {few.shapes.sum()} shapes, and wrong for "
        f"prefill, where it is slower at {many['fa2 slower'].sum()} of {many.shapes.sum()} and "
        f"takes {prefill.median():.2f} times as long in the median; in decode"
    )
    tells(f"More shapes than {len(ratio)}.")
    assert counts["fa2 same"].sum() == 0
    slow = 1 / ratio[ratio.group.isin(FEW)].ratio
    tells(f"takes up to {slow.max():.0f} times as long as fa2, {slow.median():.1f} times in the")
    tells(f"In prefill fa2 takes up to {prefill.max():.1f} times as long as fa3")


def test_notebook_08_says_how_near_the_oracle_all_of_it_is(studied):
    worst = (studied.oracle_error / studied.oracle_budget).max()
    tells(f"the largest error is {worst:.2f} of its budget")
    assert (studied.status == "ok").all() and set(studied["round"]) == {0, 1, 2}
    assert not studied.throttled.any()


def test_notebook_08_counts_before_it_measures(bounds):
    words = bounds.matmul_tflops * 1e3 / bounds.copy_gbps
    tells(f"Above {words:.0f} useful FLOPs a byte")
    cases = (modes.DECODES[1], *modes.ONE_OF_EACH, *modes.PREFILLS[2::11])
    table = modes.counted(cases, bounds)
    few = table["mode"].isin(FEW)
    assert (table.bound == few.map({True: "memory", False: "matmul"})).all()
    tail = modes.PREFILLS[2]
    assert tail.cached.batch_size * tail.spec.num_qo_heads == 32 and tail.q_len == 128
    tells("128 new tokens of one request are 32 tiles for 132 SMs")


def test_notebook_08_gives_verification_at_three_lengths(studied, bounds):
    table = modes.headline(studied, modes.VERIFIES[3:6], bounds)
    tells(f"fa2 takes {span(table['fa2 / fa3'], 2)} of fa3's time")
    decode = modes.headline(studied, modes.DECODES[1:2], bounds)
    (alone,) = decode.fa2 / decode.roof
    said = f"takes {span(table.fa2 / table.roof, 1)} times the roof, where its decode takes "
    tells(f"{said}{alone:.2f} (batch 32, 8,192 tokens)")


def test_notebook_08_lists_what_is_against_its_mode(studied, ratio):
    against = modes.exceptions(studied)
    assert len(against) == 6 and "Six shapes are against their mode." in prose("08")
    tails = pick(against, group=PREFIX)
    assert set(tails.q_len) == {128} and set(tails.batch_size) == {1} and len(tails) == 3
    tells(f"where fa2 takes {span(tails['fa2 / fa3'], 2)} of fa3's time")
    behind = pick(ratio, group=PREFIX)
    heads = behind.heads.str.split("/").str[0].astype(int)
    tiles = behind.batch_size * heads * -(-behind.q_len // 128)
    assert sorted(set(tiles[behind.high < 1])) == [8, 32]
    assert (behind[tiles >= 64].low > 1).all() and tiles[tiles > 32].min() == 64
    (short,) = pick(against, group="prefill_paged").itertuples()
    assert (short.q_len, short.kv_len, short.batch_size) == (128, 128, 8)
    undecided, block = pick(against, group="dllm_extend").itertuples()
    assert undecided.batch_size == 1 and (block.batch_size, block.kv_len) == (8, 1024)
    (value,) = pick(against, group="dllm_extend", batch_size=8)["fa2 / fa3"]
    tells(f"is faster with fa3 ({value:.2f})")
    tells(f"a cache of {8 * 1024 * 2 * 2 * 8 * 128 / 1e6:.0f} MB that fits the L2")
    assert "It has 256 tiles, a quarter full" in prose("08") and 8 * 32 == 256


def test_notebook_08_says_what_a_pin_costs(studied):
    lost = modes.regrets(studied)
    fa2, auto, rule = lost["fa2 everywhere"], lost["auto of 0.6.4"], lost["fa3 for prefill"]
    tells(
        f"costs {fa2['prefill_paged']:.2f} in paged prefill of new prompts, {fa2[PREFIX]:.2f} "
        f"behind a prefix and {fa2['prefill_ragged']:.2f} in ragged prefill"
    )
    assert lost.loc["prefill_ragged", "as #18364 left it"] == 1
    assert auto[["decode", "prefill_paged", "prefill_ragged"]].tolist() == [1, 1, 1]
    between = auto[["target_verify", "draft_extend", "dllm_extend"]]
    tells(f"costs {span(between, 1)} in the three modes between")
    said = f"costs {rule[PREFIX]:.2f} behind a prefix, all of it in the short tails "
    rest = rule.drop([PREFIX, "worst"]).max()
    said += f"({rule['worst']:.2f} at worst), and at most {rest:.2f} elsewhere"
    assert said in prose("08")


def test_notebook_08_says_that_a_tile_costs_the_same_full_or_empty(studied, bounds):
    table = modes.one_tile(studied, bounds)
    one = pick(table, batch_size=1).set_index("q_len")
    tells(
        f"fa3 takes {one.fa3[1]:.0f} us for one query of one request, {one.fa3[4]:.0f} for 4 and "
        f"{one.fa3[32]:.0f} for 32"
    )
    apart = table.groupby("batch_size").fa3.agg(lambda times: times.max() / times.min() - 1)
    tells(f"of a batch size lie at most {100 * apart.max():.0f} %")
    tells(f"is met within {span(table['fa3 / predicted'], 2)}")
    tells(f"fa2 grows from {one.fa2[1]:.0f} to {one.fa2[32]:.0f} us")


def test_notebook_08_says_how_near_the_roof_prefill_comes(studied, bounds):
    table = modes.shares(studied, bounds).loc[list(MANY)]
    tells(f"in no prefill does fa2 get past {table['fa2 most'].max():.0f} %")
    tells(f"fa3 reaches {table['fa3 most'].max():.0f} %")


def test_notebook_08_says_what_auto_is_since_the_fix(studied):
    table = modes.resolved(studied)
    assert set(pick(table, mode="decode").ran) == {"fa2"}
    middle = table[table["mode"].isin(FEW[1:]) & (table["mask"] != "tree")]
    assert set(middle.ran) == {"fa3"}
    graph = pick(middle, planned="for a graph")["auto / fa2"]
    eager = pick(middle, planned="for eager")["auto / fa2"]
    tells(
        f"takes {span(graph, 2)} times as long as fa2 in a graph, "
        f"{span(eager, 2)} planned for eager"
    )
    tree = pick(table, mask="tree")
    assert set(tree.ran) == {"fa2"} and tree["auto / fa2"].between(0.98, 1.02).all()


def test_notebook_08_says_what_a_graph_costs_fa2(studied):
    table = modes.plans(studied)
    fa2, fa3 = pick(table, backend=FA2), pick(table, backend=FA3)
    larger = fa2["tile for a graph"] > fa2["tile for eager"]
    tells(
        f"Where the graph's tile is larger, fa2 takes {span(fa2[larger].ratio, 2)} times as long; "
        f"where the tile is the same, {span(fa2[~larger].ratio, 2)}"
    )
    tells(f"moves by {span(fa3.ratio, 2)}: that much is order and power limit")
    (source,) = pick(fa2, **SOURCE).to_dict("records")
    assert (source["tile for a graph"], source["tile for eager"]) == (128, 16)
    tells(f"the 32 requests take {source['for eager']:.0f} us, as long as the roof")
    graph, eager = (modes.times(modes.mode_rows(studied, t)) for t in (GRAPH, "profiler"))
    where = {**SOURCE, "heads": "32/8", "page_size": 1, "kv_len": 8192}
    two_timers = pick(graph, **where).fa2.item() / pick(eager, **where).fa2.item()
    tells(f"would give {two_timers:.2f} and contain two timers")


def test_where_the_tile_is_the_same_the_graph_costs_most_where_only_it_merges(studied):
    fa2 = studied[studied.backend == "flashinfer-prefill-fa2"]
    blocks = fa2[(fa2["mode"] == "dllm_extend") & (fa2.heads == "32/8") & (fa2.kv_len == 8192)]
    merges = (rows.launches(blocks, "MergeStates") > 0).groupby([blocks.batch_size, blocks.timer])
    assert merges.all().to_dict() == {
        (1, GRAPH): True,
        (1, "profiler"): True,
        (8, GRAPH): True,
        (8, "profiler"): True,
        (32, GRAPH): True,
        (32, "profiler"): False,
    }
    fa2 = pick(modes.plans(studied), backend=FA2, mode="dllm_extend").set_index("batch_size")
    assert fa2.ratio.idxmax() == 32


def test_notebook_08_says_what_a_mask_costs(studied):
    table = modes.masks(studied).set_index("batch_size")
    price = table["chain / causal"].loc[[32, 128]]
    tells(f"32 and 128 requests take {span(price, 1)} times as long with the mask")
    apart = (table.tree / table.chain - 1).abs().max()
    tells(f"tree and chain take the same time within {100 * apart + 0.5:.0f} %")
    (tree,) = pick(modes.plans(studied), mask="tree").to_dict("records")
    tells(f"takes {tree['for eager']:.0f} us instead of {tree['for a graph']:,.0f}, traced")


def test_notebook_08_says_where_the_library_is_first(studied):
    table = modes.library(studied)
    tells(f"the library is first at {table['library first'].sum()} of {table.shapes.sum()} shapes")
    times = modes.times(modes.plain(modes.mode_rows(studied)))
    times = times[times[LIBRARY].notna() & times["mode"].isin(("target_verify", "draft_extend"))]
    first = times[LIBRARY] < times[[FA2, FA3]].min(axis=1)
    assert first[times.batch_size > 1].all() and set(times.batch_size) == {1, 32, 128}
    assert first[times.batch_size == 1].mean() < 0.5
    of_it = studied[(studied.backend == "fa3-extend") & (studied.timer == GRAPH)]
    assert (rows.launches(of_it, "FlashAttnFwdCombine") > 0).all()
    ragged = table.set_index("group").loc["prefill_ragged", "median"]
    assert 0.95 < ragged < 1.05


def test_notebook_08_says_what_zeroing_costs_flashinfer(studied):
    ran = studied[studied["mode"].str.startswith("prefill", na=False)]
    ran = ran[ran.backend.str.startswith("flashinfer")]
    zeroing = ran.kernels.map(
        lambda kernels: sum(k.gpu_us for k in kernels if k.name == "vectorized_elementwise_kernel")
    )
    share = 100 * zeroing / ran.kernel_us
    assert (share[ran["mode"] == "prefill_ragged"] == 0).all()
    long, short = share[ran.kernel_us > 100].max(), share.max()
    tells(f"up to {long:.1f} % of the kernel time of prefills over 100 us and up to {short:.0f} %")


def test_notebook_08_says_that_fa2_loses_verification_by_its_plan(studied):
    (eager,) = pick(modes.plans(studied), backend=FA2, **SOURCE)["for eager"]
    where = {**SOURCE, "heads": "32/8", "page_size": 1, "kv_len": 8192}
    traced = modes.times(modes.mode_rows(studied, GRAPH), "kernel_us")
    its = pick(traced, **where)[LIBRARY].item()
    said = f"its kernels take {eager:.0f} us for 32 requests and 4 drafts, where the library's take"
    tells(f"{said} {its:.0f}, traced alike")


def test_notebook_08_says_of_the_claims_what_their_verdicts_are():
    (everywhere,) = claims.verdicts(ids=["sglang-18364-all-prefill-backends"])
    assert "draft_extend 9 of 9" in everywhere.finding.reason
