"""The numbers in the prose of the notebook on sparse MLA are those of the committed records."""

from functools import partial

import pytest
from support.published import prose, published, says, span

from attnlib.core.mla import NO_TOKEN
from attnlib.core.spec import MLA_TOKEN_BYTES
from attnlib.kinds.lengths import sample_page_table
from attnlib.kinds.mla.measure import sample_chosen
from attnlib.run import frame as rows
from attnlib.studies import mla_overflow
from attnlib.studies import sparse_mla as mla
from attnlib.studies.sparse_mla.tables import FA2, FA3, FLASHMLA, FLASHMLA_DENSE, SHAPE

pytestmark = pytest.mark.usefixtures("published_records")
tells = partial(says, "09")
KEY = ["heads", "top_k", "batch", "kv_len"]
BOUND = "{}: of bound, %"


@pytest.fixture
def studied():
    return published("sparse_mla")


@pytest.fixture
def bounds(studied):
    return rows.ceilings(studied, ("copy", "read", "matmul"))


@pytest.fixture
def verdicts(studied):
    return rows.over(mla.sparse_rows(studied), FA3, FLASHMLA)


@pytest.fixture
def headline(studied, bounds):
    return mla.side_by_side(studied, mla.HEADLINE, bounds).set_index("heads")


@pytest.fixture
def kernels(studied):
    return mla.parts(studied).set_index(KEY)


@pytest.fixture
def wrong(studied):
    found = mla.mla_records(studied)
    return found[found.status == "incorrect"]


def test_notebook_09_answers_with_the_shapes_that_flashinfer_wins(verdicts, wrong):
    faster = (verdicts.verdict == "faster").sum()
    sizes = MLA_TOKEN_BYTES["bfloat16"] / MLA_TOKEN_BYTES["fp8-656"]
    tells(
        f"in {faster} of {len(verdicts)} shapes, {verdicts.ratio.median():.2f} of its time in the "
        f"median, although it reads {sizes:.2f} times the bytes"
    )
    (tokens,) = (wrong.batch_size * wrong.kv_len).unique()
    tells(f"silently wrong on caches of {tokens / 1e6:.1f} million tokens")


def test_notebook_09_counts_the_wrong_records(studied, wrong):
    assert set(wrong.backend) == {"fa2 0.6.4", "fa3 0.6.4"}
    assert set(studied.status) == {"ok", "incorrect"}
    tells(f"{len(wrong)} records of FlashInfer 0.6.4 are `incorrect`")
    right = studied[(studied.release == "0.6.4") & (studied.status == "ok")]
    tells(f"{len(wrong)} of {len(wrong)} records of 0.6.4 are wrong, its {len(right)} others right")


def test_notebook_09_predicts_from_the_bounds(bounds):
    table = mla.counted(mla.HEADLINE, bounds).set_index("heads")
    gains = table["FP8 gains"]
    tells(f"can be {span(gains[gains.index <= 64], 2)} times as fast")
    assert gains[128] == 1 and "FP8 gains nothing" in prose("09")
    few = table.loc[[16, 32, 64]]
    assert (few["memory bf16"] > few["tensor cores"]).all()
    assert (few["tensor cores"] > few["memory FP8"]).all()
    both = table["bound bf16"]
    tells(f"where the bounds are {both[64]:.1f} and {both[16]:.1f}")


def test_notebook_09_measures_the_headline_shapes(headline):
    ratio = headline["fa3 / FlashMLA"]
    tells(f"fa3 takes {span(ratio, 2)} of FlashMLA's time")
    own, theirs = headline[BOUND.format(FA3)], headline[BOUND.format(FLASHMLA)]
    tells(f"comes to {span(own)} % of its bound, FlashMLA to {span(theirs)} %")
    times = headline[FA3]
    tells(f"{times[64]:.1f} us with 64 heads and {times[16]:.1f} with 16")
    assert (headline[FLASHMLA][[16, 32]] > headline[FLASHMLA][64]).all()


def test_notebook_09_says_where_flashmla_wins(studied, verdicts):
    counts = verdicts.verdict.value_counts()
    said = (
        f"{counts.faster} of {len(verdicts)} shapes are faster with fa3, down to "
        f"{verdicts.ratio.min():.2f} of FlashMLA's time, {counts.slower} are slower and "
        f"{counts.ambiguous} undecided"
    )
    assert said in prose("09") and counts.sum() == counts.faster + counts.slower + counts.ambiguous
    lost = verdicts[verdicts.verdict == "slower"]
    assert set(lost.num_qo_heads) == {64, 128} and set(lost.top_k) == {512}
    assert lost.batch_size.max() == 8
    table = rows.times(mla.sparse_rows(studied)).merge(lost[SHAPE])
    calls = table[[FA3, FLASHMLA]].to_numpy()
    tells(f"by up to {lost.ratio.max():.2f} times: calls of {span(calls)} us")


def test_notebook_09_takes_flashmlas_call_apart(studied, kernels, headline):
    few = kernels.loc[[16, 32, 64]].xs((2048, 64, 32768), level=KEY[1:])
    tells(f"with 16 or 32 heads as with 64, {span(few.attention, 1)} us")
    copies = kernels[kernels["query copy"] > 0]["query copy"]
    assert set(copies.index.get_level_values("heads")) == {16, 32}
    tells(f"a copy of the query, {span(copies, 1)} us")
    tells(f"a combine of up to {kernels['combine'].max():.1f} us here")
    alone = few.attention[64]
    said = f"alone, {alone:.1f} us, takes longer than fa3's whole call, {headline[FA3][64]:.1f} us"
    assert said in prose("09") and alone > headline[FA3][64]


def test_notebook_09_says_what_bounds_each_kernel(studied, bounds):
    table = mla.reached(studied, bounds).set_index(["design", "heads"])
    read, matmul = table["of read, %"], table["of matmul, %"]
    tells(f"reads at {span(read[FA3][[16, 32, 64]])} % of read speed")
    said = (
        f"reaches {read[FLASHMLA].max()} % of read speed at best, and {matmul[FLASHMLA].max()} % "
        f"of the matmul rate; with 128 heads that is {table['TFLOP/s, padded'][FLASHMLA, 128]} "
    )
    assert said + "TFLOP/s" in prose("09")
    least = rows.times(mla.sparse_rows(studied))[[FA3, FLASHMLA]].min().min()
    tells(f"A call takes at least {least:.1f} us")


def test_notebook_09_says_what_fewer_heads_buy(studied, kernels):
    table = mla.by_heads(studied).set_index("design")["16 / 128"]
    tells(f"fa3 takes {span(table[FA3], 2)} of the time and FlashMLA {span(table[FLASHMLA], 2)}.")
    wide = mla.by_heads(studied).set_index(["design", "top_k", "batch"])
    row = wide.loc[FLASHMLA, 512, 64]
    tells(f"{row[128]:.1f} us with 128, {row[16]:.1f} with 16")
    assert row["16 / 128"] == table[FLASHMLA].max()
    combine = kernels["combine"].xs((512, 64, 32768), level=KEY[1:])
    tells(f"({combine[128]:.1f} us, then {combine[16]:.1f})")


def test_notebook_09_compares_tensor_with_data_parallelism(studied):
    table = mla.tensor_or_data(studied).set_index(["GPUs", "requests", "top_k"])
    ratios = {name: table[f"{name}: TP / DP"] for name in (FA3, FLASHMLA)}
    four, eight, short = (4, 256, 2048), (8, 64, 2048), (8, 64, 512)
    tells(f"TP takes fa3 {ratios[FA3][four]:.2f} and FlashMLA {ratios[FLASHMLA][four]:.2f} times")
    tells(f"it is {ratios[FA3][eight]:.2f} and {ratios[FLASHMLA][eight]:.2f}, of which")
    tells(f"fa3 gains from TP there ({ratios[FA3][short]:.2f})")


def test_notebook_09_finds_no_effect_of_the_context(studied):
    table = mla.by_context(studied).set_index(["library", "heads", "batch"])
    assert len(table) == 8
    sparse = table[[name for name in table if name.startswith("sparse")]]
    times = rows.times(mla.sparse_rows(studied))
    times = times[(times.top_k == 2048) & times.num_qo_heads.isin((16, 128))]
    times = times[times.batch_size.isin((1, 64))].groupby(["num_qo_heads", "batch_size"])
    apart = (times[[FA3, FLASHMLA]].max() / times[[FA3, FLASHMLA]].min()).max().max()
    assert 1.02 < apart < 1.03 and "the same time within 3 %" in prose("09")
    dense, short = table["dense 8k"], sparse["sparse 8k"]
    fa3, flashmla = ("fa3", 16, 64), ("FlashMLA", 16, 64)
    tells(f"{dense[fa3]:.1f} us fa3 and {dense[flashmla]:.1f} us FlashMLA")
    saved = 100 * (1 - short / dense)
    tells(
        f"saves fa3 {saved[fa3]:.0f} % of that, and FlashMLA, which changes to its FP8 kernel, "
        f"{saved[flashmla]:.0f} %"
    )
    assert FLASHMLA_DENSE in set(mla.mla_rows(studied).backend)


def test_the_wrong_records_are_those_that_32_bit_offsets_predict(studied, wrong):
    old = mla.mla_records(studied)
    old = old[old.release == "0.6.4"]
    shares = [mla.lost_share(case) for case in old.case]
    assert [share > 0 for share in shares] == (old.status == "incorrect").tolist()
    tells(f"{100 * max(shares):.1f} % of them are lost")
    tells(f"from token {mla.first_lost_token():,} on the product wraps at 2^32")
    assert mla.OFFSETS * 2 == 8 * 2**30 and "cache exceeds 8 GiB" in prose("09")


def test_every_request_of_a_wrong_record_has_lost_tokens(wrong):
    for case in wrong.drop_duplicates([*SHAPE[1:]]).case:
        chosen, table = sample_chosen(case), sample_page_table(case).astype("int64")
        assert (chosen != NO_TOKEN).all()
        pages = table[[[i] for i in range(len(table))], chosen // case.spec.page_size]
        slots = pages * case.spec.page_size + chosen % case.spec.page_size
        assert (slots >= mla.first_lost_token()).any(axis=1).all()


def test_notebook_09_says_how_wrong_the_rows_are(wrong):
    tells(f"off by {span(wrong.oracle_error, 1)} times their own length")
    by_case = wrong.groupby([*SHAPE, "backend"]).oracle_error
    assert (by_case.nunique() == 1).all() and (by_case.size() == 3).all()
    wide = by_case.first().unstack("backend")
    apart = 100 * (wide["fa3 0.6.4"] / wide["fa2 0.6.4"] - 1).abs().max()
    tells(f"fa2 and fa3 within {apart:.2f} %")


def test_notebook_09_says_what_the_fix_costs(studied):
    table = mla.release_counts(studied).set_index("kernel")
    fa2, fa3 = table.loc["fa2"], table.loc["fa3"]
    assert fa3.slower == 0 and fa2.slower == 1
    tells(f"its ratios run from {fa3.lowest:.2f} to {fa3.highest:.2f} around {fa3['median']:.2f}")
    found = rows.over(mla.sparse_rows(studied), FA2, mla.OLD_FA2)
    slower = found[found.verdict == "slower"].ratio
    assert f"One of {len(found)} shapes of fa2 did, by {100 * (slower.max() - 1):.0f} %" in prose(
        "09"
    )


def test_notebook_09_sets_fa3_beside_fa2(studied):
    found = rows.over(mla.sparse_rows(studied), FA3, FA2)
    faster = (found.verdict == "faster").sum()
    tells(f"{span(found.ratio, 2)} of fa2's time, faster in {faster} of {len(found)} shapes")


def test_notebook_09_says_which_caches_fit_the_l2(studied):
    assert studied.l2_mib.max() == 60 and "the L2 of 60 MiB" in prose("09")
    table = mla.mla_records(studied)
    table = table[table.top_k > 0]
    mib = table.top_k * table.batch_size * table.kv_format.map(MLA_TOKEN_BYTES) / 2**20
    fits = (table.batch_size <= 8) | ((table.batch_size == 64) & (table.top_k == 512))
    assert (mib[fits] < 60).all() and (mib[~fits] > 60).all()


def test_notebook_09_leaves_the_claims_of_blackwell_undecided(verdicts):
    medians = verdicts.groupby("num_qo_heads").ratio.median()
    assert medians.idxmax() == 64 and "At 64 heads FlashInfer's lead is smallest" in prose("09")
    many = verdicts[(verdicts.num_qo_heads == 64) & (verdicts.batch_size >= 64)]
    assert set(many.verdict) == {"faster"}


def test_notebook_09_meets_the_limit_within_one_request():
    within, beyond = mla.overflow(published("mla_overflow")).to_dict("records")
    assert within["tokens"] < mla.first_lost_token() < beyond["tokens"]
    assert beyond["tokens"] - within["tokens"] == mla_overflow.KV_LEN
    assert (within["0.6.4"], beyond["0.6.4"]) == ("0 of 6", "6 of 6")
    assert (within["0.6.13"], beyond["0.6.13"]) == ("0 of 6", "0 of 6")
    tells(
        f"right in 6 of 6 records with {within['tokens']:,} tokens, and wrong in 6 of 6 with "
        f"{beyond['tokens']:,}, of which {beyond['lost, %']:.1f} % lie behind the limit. The worst "
        f"row is off by {beyond['worst row']:.2f}"
    )
