"""The numbers in the prose of notebooks 06 and 07 are those of the committed records."""

from functools import partial

import numpy as np
import pytest
from support.published import prose, published, says, span

from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import plan_splits
from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.lengths import sample_seq_lens
from attnlib.kinds.mismatch.case import MISMATCHES, call_facts, predict_splits, told_facts
from attnlib.studies import STUDIES
from attnlib.studies import metadata_mismatch as mismatches
from attnlib.studies import scheduler_metadata as scheduler

SGLANG_TOKENS_PER_S = 131.41
FACTS = SchedulerFacts(16, 16, 2, 128, 1, 32768, num_sms=132, page_size=64, causal=True)

says_06, says_07 = partial(says, "06"), partial(says, "07")

pytestmark = pytest.mark.usefixtures("published_records")


@pytest.fixture
def steps():
    return published("scheduler_metadata")


@pytest.fixture
def saved(steps):
    return scheduler.savings(steps)


@pytest.fixture
def deep(saved):
    """Steps of 64 layers."""
    return saved[saved.layers == 64]


@pytest.fixture
def bare():
    """Mismatches with their outcomes."""
    return mismatches.mismatch_table(published("metadata_mismatch"))


def test_notebook_06_answers_with_the_saving_of_64_layers(deep):
    says_06(
        f"saves {span(deep.saved)} us of a step of 64 attention layers in a CUDA graph, "
        f"{deep.saved.median():.0f} us in the median of {len(deep)} shapes",
    )
    assert (STUDIES["scheduler_metadata"].reference_machine) == "nvidia-h200-d167867c"


def test_notebook_06_counts_the_kernels_of_a_step(steps):
    table = scheduler.kernels_per_step(steps)
    assert (table.prepare[table.way == "each"] == table.layers[table.way == "each"]).all()
    assert (table.prepare[table.way == "once"] == 1).all()
    says_06("64 prepare kernels a step become 1, and so for 32 and 80 layers")
    zeroing = table[table.zeroing > 0]
    assert set(zeroing.way) == {"once"} and (zeroing["combine"] == 0).all()


def test_notebook_06_says_where_the_zeroing_kernel_runs(steps, deep):
    longest = scheduler.one_split_up_to(steps)
    assert longest == 512
    few, rest = deep[deep.kv_len <= longest], deep[deep.kv_len > longest]
    says_06(
        f"{len(few)} shapes with the zeroing kernel save {span(few.saved)} us, "
        f"the other {len(rest)} of 64 layers {span(rest.saved)} us",
    )


def test_notebook_06_says_how_many_shapes_get_faster_beyond_doubt(steps, saved):
    sure, slower = (saved.low > 0).sum(), (saved.high < 0).sum()
    says_06(f"Of {len(saved)} shapes, {sure} get faster beyond doubt, {slower} get slower")
    graph = steps[(steps.timer == "graph") & steps.backend.isin((scheduler.EACH, scheduler.ONCE))]
    wide = graph.pivot_table(index=[*scheduler.STEP, "round"], columns="backend", values="run_us")
    gap = wide[scheduler.EACH] - wide[scheduler.ONCE]
    assert (gap.groupby(level=scheduler.STEP).median() > 0).all() and (saved.saved > 0).all()


def test_notebook_06_gives_the_gain_in_percent_of_the_attention(deep):
    says_06(f"the gain is {span(deep.gain, 1)} %, {deep.gain.median():.1f} % in the median")
    best = deep.nlargest(5, "gain")
    assert set(best.kv_len) == {2048}


def test_notebook_06_sets_the_saving_beside_sglangs(deep):
    single = deep[(deep.batch_size == 1) & (deep.kv_len <= 8192)].saved
    step_us = 1e6 / SGLANG_TOKENS_PER_S
    says_06(f"Here that saves {span(single)} us, not 215")
    says_06(f"takes {step_us / 1e3:.1f} ms, of which {span(single)} us")
    says_06(f"would be {span(100 * single / step_us, 1)} %")
    (best,) = deep[deep.saved >= scheduler.SGLANG_SAVES_US].itertuples()
    assert (best.batch_size, best.kv_len, best.page_size) == (128, 2048, 64)
    says_06(f"Of the {len(deep)} shapes with 64 layers 1 reaches 215 us")


def test_notebook_06_gives_the_prepare_kernels_own_time(steps):
    alone = scheduler.prepare_us(steps)
    one, many = alone[1], alone[128]
    says_06(f"costs {one:.2f} us for one request and {many:.2f} us for 128")
    says_06(f"63 of them are worth {63 * one:.0f} to {63 * many:.0f} us")


def test_notebook_06_refutes_the_expected_share(saved, steps):
    share = 100 * saved.share
    low, high = share.quantile([0.25, 0.75])
    says_06(
        f"It is {span(share)} %, {share.median():.0f} % in the median, half of the shapes "
        f"between {low:.0f} and {high:.0f} %, and in none of them 90 %",
    )
    assert (saved.share < scheduler.NEEDED_SHARE).all()
    accounts = scheduler.accounts(steps)
    traced = 100 * (accounts.saved / accounts.prepare).max()
    says_06(f"the largest share with 64 layers is {traced:.0f} %")


def test_notebook_06_says_where_the_rest_goes(steps):
    table = scheduler.accounts_summary(steps).set_index("kv_len")
    split, whole = table.loc[2048], table.loc[512]
    says_06(f"the trace shows {split.prepare:.0f} us less of prepare kernels")
    says_06(f"But {-split.hidden:.0f} us of that time ran beside other kernels")
    rest = (
        f"{-whole.zeroing:.0f} us besides, and of {whole.prepare:.0f} us {whole.saved:.0f} remain"
    )
    says_06(f"the zeroing kernels take {rest}")
    parts = scheduler.time_by_kernel(steps)
    one = parts[(parts.batch_size == 1) & (parts.page_size == 64)].set_index(["way", "kv_len"])
    assert (one.loc["each"].hidden > 0).all() and one.hidden["once", 512] < 0


def test_notebook_06_says_that_eager_steps_get_no_faster(steps):
    eager = scheduler.savings(steps, timer="eager").set_index("batch_size")
    many, some = eager.loc[128], eager.loc[16]
    low, high = -many.high, -many.low
    says_06(f"128 requests take {-many.saved:.0f} us more ({low:.0f} to {high:.0f})")
    says_06(f"about {-many.saved / 64:.0f} us a layer")
    says_06(f"16 requests {-some.saved:.0f} us more")
    assert some.high > 0 and eager.low[1] < 0 < eager.high[1]
    times_ms = eager[["each", "once"]].to_numpy() / 1e3
    says_06(f"The host takes {span(times_ms, 1)} ms for 64 layers")
    gpu_us = steps[(steps.timer == "eager")].kernel_us
    assert gpu_us.max() < 1e3 * times_ms.min()


def test_notebook_07_answers_with_the_outcomes(bare):
    outcome = bare["past the guard"].value_counts()
    refused = (bare["with the guard"] == "refused by the guard").sum()
    error = bare.set_index("name")["relative error"]["head-counts"]
    claim = f"{outcome['wrong']} of {len(bare)} calls with metadata of other facts gave a wrong"
    assert claim in prose("07") and f"(relative error {error:.0f})" in prose("07")
    says_07(f"the library itself refused {outcome['refused by the library']}")
    says_07(f"the guard refuses all {refused} in which anything but a length")
    passed = bare[bare["with the guard"] == "harmless"].name
    assert passed.tolist() == ["none", "lengths-grown", "lengths-shrunk"]


def test_notebook_07_counts_calls_that_overrun_their_buffers(bare):
    over, wrong = bare.overruns == "yes", bare["past the guard"] == "wrong"
    says_07(f"`overruns` marks {over.sum()} calls")
    says_07(f"{(over & wrong).sum()} gave a wrong output and {(over & ~wrong).sum()} a right one")
    says_07(f"And {(~over & wrong).sum()} are wrong without overrunning")
    narrow = bare.set_index("name").loc["narrower-table"]
    held, cap = narrow["splits in metadata"], narrow["cap of the call"]
    assert narrow["past the guard"] == "harmless"
    says_07(f"`narrower-table`, {held} splits in buffers for {cap}")


def test_notebook_07_says_that_no_process_died():
    frame = published("metadata_mismatch")
    assert set(frame.status) == {"ok", "incorrect", "error", "refused"}
    assert not frame.reported_backend.eq("crashed").any() and "No process died" in prose("07")


def test_notebook_07_explains_the_head_counts():
    case = next(case for case in MISMATCHES if case.name == "head-counts")
    call = call_facts(case, num_sms=132)
    differ, splits = told_facts(case, call).differences(call), predict_splits(case, num_sms=132)
    assert set(differ) == {"num_qo_heads", "num_kv_heads", "num_splits"}
    told, own = differ["num_splits"]
    says_07(f"has a cap of {told}; the call with 16 and 4 has {own}")
    says_07(f"into {splits.in_metadata} splits, and the call has buffers for {own}")
    says_07(f"writes {splits.in_metadata - own} partial outputs behind them")


def test_notebook_07_says_what_the_guard_refuses_beyond_need(bare):
    refused = bare["with the guard"] == "refused by the guard"
    strict = (refused & (bare["past the guard"] == "harmless")).sum()
    says_07(f"It also refuses {strict} cases that were right past it")


def test_notebook_07_says_how_exact_the_model_is():
    words = scheduler.model_agreement().loc["specified"]
    assert words["contradict it"] == 0
    says_07(f"for {words.calls:,} random calls an H200's library wrote {words.words:,} words")


def test_notebook_07_says_what_stale_lengths_cost_by_the_model():
    case = DecodeCase(AttnSpec(16, 2, 128, 64), 16, 32768, "ragged")
    ragged = sample_seq_lens(case)
    fresh, stale = (
        max(tile.end for tile in scheduler.assign_tiles(plan_splits(FACTS, lengths), ragged))
        for lengths in (ragged, np.full(16, 1024))
    )
    says_07(f"in {stale} blocks' time where a fresh schedule takes {fresh}")
