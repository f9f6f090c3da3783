"""The numbers in the prose of the notebook on sparse MLA are those of the committed records."""

from __future__ import annotations

import pytest
from test_findings import prose

from attnlib.core.mla import NO_TOKEN
from attnlib.core.spec import MLA_TOKEN_BYTES
from attnlib.kinds.lengths import sample_page_table
from attnlib.kinds.mla.measure import sample_chosen
from attnlib.run import frame as rows
from attnlib.run import store
from attnlib.studies.mla_overflow import study as mla_overflow
from attnlib.studies.sparse_mla import tables as mla
from attnlib.studies.sparse_mla.model import OFFSETS, first_lost_token, lost_share
from attnlib.studies.sparse_mla.study import HEADLINE, STUDY
from attnlib.studies.sparse_mla.tables import FA2, FA3, FLASHMLA, FLASHMLA_DENSE, SHAPE

pytestmark = pytest.mark.usefixtures("published_records")
KEY = ["heads", "top_k", "batch", "kv_len"]
BOUND = "{}: of bound, %"


@pytest.fixture
def studied(published_records):
    return store.load(STUDY.name, STUDY.reference_machine)


@pytest.fixture
def bounds(studied):
    return rows.ceilings(studied, ("copy", "read", "matmul"))


@pytest.fixture
def verdicts(studied):
    return rows.over(mla.sparse_rows(studied), FA3, FLASHMLA)


@pytest.fixture
def headline(studied, bounds):
    return mla.side_by_side(studied, HEADLINE, bounds).set_index("heads")


@pytest.fixture
def kernels(studied):
    return mla.parts(studied).set_index(KEY)


@pytest.fixture
def wrong(studied):
    found = mla.mla_records(studied)
    return found[found.status == "incorrect"]


def span(values, digits=0):
    return f"{values.min():.{digits}f} to {values.max():.{digits}f}"


def test_notebook_09_answers_with_the_shapes_that_flashinfer_wins(verdicts, wrong):
    faster = (verdicts.verdict == "faster").sum()
    sizes = MLA_TOKEN_BYTES["bfloat16"] / MLA_TOKEN_BYTES["fp8-656"]
    answer = (
        f"in {faster} of {len(verdicts)} shapes, {verdicts.ratio.median():.2f} of its time in the "
        f"median, although it reads {sizes:.2f} times the bytes"
    )
    assert answer in prose("09")
    (tokens,) = (wrong.batch_size * wrong.kv_len).unique()
    assert f"silently wrong on caches of {tokens / 1e6:.1f} million tokens" in prose("09")


def test_notebook_09_counts_the_wrong_records(studied, wrong):
    assert set(wrong.backend) == {"fa2 0.6.4", "fa3 0.6.4"}
    assert set(studied.status) == {"ok", "incorrect"}
    assert f"{len(wrong)} records of FlashInfer 0.6.4 are `incorrect`" in prose("09")
    right = studied[(studied.release == "0.6.4") & (studied.status == "ok")]
    said = f"{len(wrong)} of {len(wrong)} records of 0.6.4 are wrong, its {len(right)} others right"
    assert said in prose("09")


def test_notebook_09_predicts_from_the_bounds(bounds):
    table = mla.counted(HEADLINE, bounds).set_index("heads")
    gains = table["FP8 gains"]
    assert f"can be {span(gains[gains.index <= 64], 2)} times as fast" in prose("09")
    assert gains[128] == 1 and "FP8 gains nothing" in prose("09")
    few = table.loc[[16, 32, 64]]
    assert (few["memory bf16"] > few["tensor cores"]).all()
    assert (few["tensor cores"] > few["memory FP8"]).all()
    both = table["bound bf16"]
    assert f"where the bounds are {both[64]:.1f} and {both[16]:.1f}" in prose("09")


def test_notebook_09_measures_the_headline_shapes(headline):
    ratio = headline["fa3 / FlashMLA"]
    assert f"fa3 takes {span(ratio, 2)} of FlashMLA's time" in prose("09")
    own, theirs = headline[BOUND.format(FA3)], headline[BOUND.format(FLASHMLA)]
    assert f"comes to {span(own)} % of its bound, FlashMLA to {span(theirs)} %" in prose("09")
    times = headline[FA3]
    assert f"{times[64]:.1f} us with 64 heads and {times[16]:.1f} with 16" in prose("09")
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
    said = f"by up to {lost.ratio.max():.2f} times: calls of {span(calls)} us"
    assert said in prose("09")


def test_notebook_09_takes_flashmlas_call_apart(studied, kernels, headline):
    few = kernels.loc[[16, 32, 64]].xs((2048, 64, 32768), level=KEY[1:])
    assert f"with 16 or 32 heads as with 64, {span(few.attention, 1)} us" in prose("09")
    copies = kernels[kernels["query copy"] > 0]["query copy"]
    assert set(copies.index.get_level_values("heads")) == {16, 32}
    assert f"a copy of the query, {span(copies, 1)} us" in prose("09")
    assert f"a combine of up to {kernels['combine'].max():.1f} us here" in prose("09")
    alone = few.attention[64]
    said = f"alone, {alone:.1f} us, takes longer than fa3's whole call, {headline[FA3][64]:.1f} us"
    assert said in prose("09") and alone > headline[FA3][64]


def test_notebook_09_says_what_bounds_each_kernel(studied, bounds):
    table = mla.reached(studied, bounds).set_index(["design", "heads"])
    read, matmul = table["of read, %"], table["of matmul, %"]
    assert f"reads at {span(read[FA3][[16, 32, 64]])} % of read speed" in prose("09")
    said = (
        f"reaches {read[FLASHMLA].max()} % of read speed at best, and {matmul[FLASHMLA].max()} % "
        f"of the matmul rate; with 128 heads that is {table['TFLOP/s, padded'][FLASHMLA, 128]} "
    )
    assert said + "TFLOP/s" in prose("09")
    least = rows.times(mla.sparse_rows(studied))[[FA3, FLASHMLA]].min().min()
    assert f"A call takes at least {least:.1f} us" in prose("09")


def test_notebook_09_says_what_fewer_heads_buy(studied, kernels):
    table = mla.by_heads(studied).set_index("design")["16 / 128"]
    said = f"fa3 takes {span(table[FA3], 2)} of the time and FlashMLA {span(table[FLASHMLA], 2)}."
    assert said in prose("09")
    wide = mla.by_heads(studied).set_index(["design", "top_k", "batch"])
    row = wide.loc[FLASHMLA, 512, 64]
    assert f"{row[128]:.1f} us with 128, {row[16]:.1f} with 16" in prose("09")
    assert row["16 / 128"] == table[FLASHMLA].max()
    combine = kernels["combine"].xs((512, 64, 32768), level=KEY[1:])
    assert f"({combine[128]:.1f} us, then {combine[16]:.1f})" in prose("09")


def test_notebook_09_compares_tensor_with_data_parallelism(studied):
    table = mla.tensor_or_data(studied).set_index(["GPUs", "requests", "top_k"])
    ratios = {name: table[f"{name}: TP / DP"] for name in (FA3, FLASHMLA)}
    four, eight, short = (4, 256, 2048), (8, 64, 2048), (8, 64, 512)
    said = f"TP takes fa3 {ratios[FA3][four]:.2f} and FlashMLA {ratios[FLASHMLA][four]:.2f} times"
    assert said in prose("09")
    said = f"it is {ratios[FA3][eight]:.2f} and {ratios[FLASHMLA][eight]:.2f}, of which"
    assert said in prose("09")
    assert f"fa3 gains from TP there ({ratios[FA3][short]:.2f})" in prose("09")


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
    assert f"{dense[fa3]:.1f} us fa3 and {dense[flashmla]:.1f} us FlashMLA" in prose("09")
    saved = 100 * (1 - short / dense)
    said = f"saves fa3 {saved[fa3]:.0f} % of that, and FlashMLA, which changes to its FP8 kernel, "
    assert said + f"{saved[flashmla]:.0f} %" in prose("09")
    assert FLASHMLA_DENSE in set(mla.mla_rows(studied).backend)


def test_the_wrong_records_are_those_that_32_bit_offsets_predict(studied, wrong):
    old = mla.mla_records(studied)
    old = old[old.release == "0.6.4"]
    shares = [lost_share(case) for case in old.case]
    assert [share > 0 for share in shares] == (old.status == "incorrect").tolist()
    assert f"{100 * max(shares):.1f} % of them are lost" in prose("09")
    assert f"from token {first_lost_token():,} on the product wraps at 2^32" in prose("09")
    assert OFFSETS * 2 == 8 * 2**30 and "cache exceeds 8 GiB" in prose("09")


def test_every_request_of_a_wrong_record_has_lost_tokens(wrong):
    for case in wrong.drop_duplicates([*SHAPE[1:]]).case:
        chosen, table = sample_chosen(case), sample_page_table(case).astype("int64")
        assert (chosen != NO_TOKEN).all()
        pages = table[[[i] for i in range(len(table))], chosen // case.spec.page_size]
        slots = pages * case.spec.page_size + chosen % case.spec.page_size
        assert (slots >= first_lost_token()).any(axis=1).all()


def test_notebook_09_says_how_wrong_the_rows_are(wrong):
    assert f"off by {span(wrong.oracle_error, 1)} times their own length" in prose("09")
    by_case = wrong.groupby([*SHAPE, "backend"]).oracle_error
    assert (by_case.nunique() == 1).all() and (by_case.size() == 3).all()
    wide = by_case.first().unstack("backend")
    apart = 100 * (wide["fa3 0.6.4"] / wide["fa2 0.6.4"] - 1).abs().max()
    assert f"fa2 and fa3 within {apart:.2f} %" in prose("09")


def test_notebook_09_says_what_the_fix_costs(studied):
    table = mla.release_counts(studied).set_index("kernel")
    fa2, fa3 = table.loc["fa2"], table.loc["fa3"]
    assert fa3.slower == 0 and fa2.slower == 1
    said = f"its ratios run from {fa3.lowest:.2f} to {fa3.highest:.2f} around {fa3['median']:.2f}"
    assert said in prose("09")
    found = rows.over(mla.sparse_rows(studied), FA2, mla.OLD_FA2)
    slower = found[found.verdict == "slower"].ratio
    assert f"One of {len(found)} shapes of fa2 did, by {100 * (slower.max() - 1):.0f} %" in prose(
        "09"
    )


def test_notebook_09_sets_fa3_beside_fa2(studied):
    found = rows.over(mla.sparse_rows(studied), FA3, FA2)
    faster = (found.verdict == "faster").sum()
    said = f"{span(found.ratio, 2)} of fa2's time, faster in {faster} of {len(found)} shapes"
    assert said in prose("09")


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


def test_notebook_09_meets_the_limit_within_one_request(published_records):
    edge = store.load(mla_overflow.STUDY.name, mla_overflow.STUDY.reference_machine)
    within, beyond = mla.overflow(edge).to_dict("records")
    assert within["tokens"] < first_lost_token() < beyond["tokens"]
    assert beyond["tokens"] - within["tokens"] == mla_overflow.KV_LEN
    assert (within["0.6.4"], beyond["0.6.4"]) == ("0 of 6", "6 of 6")
    assert (within["0.6.13"], beyond["0.6.13"]) == ("0 of 6", "0 of 6")
    assert (
        f"right in 6 of 6 records with {within['tokens']:,} tokens, and wrong in 6 of 6 with "
        f"{beyond['tokens']:,}, of which {beyond['lost, %']:.1f} % lie behind the limit. The worst "
        f"row is off by {beyond['worst row']:.2f}"
    ) in prose("09")
