"""Tables and figures of sparse MLA: right on made-up records, whole where designs are missing."""

import pytest
from support.published import live, published

from attnlib.core.spec import MlaSpec
from attnlib.kinds.cost import Ceilings
from attnlib.kinds.item import Item
from attnlib.kinds.mla.case import MlaCase
from attnlib.run import frame as rows
from attnlib.run import store
from attnlib.studies import mla_rivals
from attnlib.studies import sparse_mla as mla

LIMIT = Ceilings(copy_gbps=4000.0, matmul_tflops=800.0, num_sms=132, read_gbps=4000.0)
FA3, FLASHMLA = mla.FA3, mla.FLASHMLA
LIBRARIES = {
    "old": ("flashinfer-mla-fa3", "0.6.4", "bfloat16"),
    "new": ("flashinfer-mla-fa3", "0.6.13", "bfloat16"),
    "flashmla": ("flashmla-sparse-fp8", "", "fp8-656"),
}


def without_flashmla(name):
    frame = live(name)
    return frame[~frame.backend.str.startswith("flashmla")]


@pytest.fixture
def measured(make_record):
    """Append rounds of one shape; `us` by library, a list a round."""

    def measure(heads, batch, *, top_k=2048, kv_len=32768, status="ok", **us):
        for library, times in us.items():
            backend, release, kv_format = LIBRARIES[library]
            case = MlaCase(MlaSpec(heads, top_k, kv_format=kv_format), batch, kv_len)
            told = {"item": Item(backend, "graph", case, release), "status": status}
            for round_, time in enumerate(times):
                timed = {"run_us": (time,)} if status == "ok" else {}
                store.append(make_record(round=round_, **told, **timed))
        (machine,) = store.machines("demo")
        return store.load("demo", machine)

    return measure


@pytest.mark.parametrize("of", [published, live, without_flashmla])
def test_every_table_and_figure_stands_on_what_a_live_notebook_measures(of):
    frame = of("sparse_mla")
    limit = rows.ceilings(frame, ("copy", "read", "matmul"))
    for table in (
        mla.side_by_side(frame, mla.HEADLINE, limit),
        mla.reached(frame, limit),
        mla.by_heads(frame),
        mla.by_context(frame),
        mla.overflow(frame),
        mla.release_counts(frame),
        mla.kernel_counts(frame),
    ):
        assert len(table) and not table.isna().all().any()
    for table in (verdicts := mla.verdict_counts(frame), mla.parts(frame)):
        assert table.empty == (of is without_flashmla)
    assert (verdicts.faster.sum() == 0) == verdicts.empty
    for table in (mla.exceptions(frame), mla.tensor_or_data(frame)):
        assert table.empty == (of is not published)
    assert mla.ratio_heatmap(frame).axes and mla.overflow_chart(frame).axes
    assert mla.heads_chart(frame, limit).axes and mla.bound_chart(frame, limit).axes


def test_times_stand_beside_the_share_of_their_own_bound(measured):
    frame = measured(16, 64, new=[40.0, 44.0, 42.0], flashmla=[80.0, 88.0, 84.0])
    frame = measured(16, 1, new=[1.0], flashmla=[9.0])
    # fa2 was not measured: its column is left out.
    case = MlaCase(MlaSpec(16, 2048), 64, 32768)
    (row,) = mla.side_by_side(frame, [case], LIMIT).to_dict("records")
    assert (row[FA3], row[FLASHMLA], row["fa3 / FlashMLA"], row["rounds"]) == (42.0, 84.0, 0.5, 3)
    for design, kv_format in ((FA3, "bfloat16"), (FLASHMLA, "fp8-656")):
        bound = mla.predict_mla(mla.in_format(case, kv_format), LIMIT).bound_us
        assert row[f"{design}: of bound, %"] == round(100 * bound / row[design])
    assert "fa2 0.6.13" not in row


def test_a_shape_pairs_both_formats_and_verdicts_are_counted(measured):
    measured(16, 64, new=[10.0, 10.1, 9.9], flashmla=[20.0, 20.2, 19.8])
    frame = measured(128, 64, new=[30.0, 30.3, 29.7], flashmla=[20.0, 20.2, 19.8])
    table = mla.verdict_counts(frame).set_index("heads")
    assert table.faster.to_dict() == {128: 0, 16: 1} and table.slower.to_dict() == {128: 1, 16: 0}
    (row,) = mla.exceptions(frame).to_dict("records")
    assert (row["heads"], row["ratio"], row["fa3 is"]) == (128, 1.5, "slower")


def test_tensor_and_data_parallelism_share_the_same_requests(measured):
    measured(16, 64, new=[50.0], flashmla=[80.0])
    measured(128, 64, new=[75.0], flashmla=[90.0])
    measured(128, 8, top_k=512, new=[1.0], flashmla=[1.0])
    frame = measured(128, 8, new=[20.0], flashmla=[25.0])
    (row,) = mla.tensor_or_data(frame).to_dict("records")
    assert (row["GPUs"], row["requests"], row["top_k"]) == (8, 64, 2048)
    assert (row[f"{FA3}: TP"], row[f"{FA3}: DP"], row[f"{FA3}: TP / DP"]) == (50.0, 20.0, 2.5)
    assert row[f"{FLASHMLA}: TP / DP"] == 3.2


def test_wrong_records_are_counted_by_the_size_of_the_cache(measured):
    measured(16, 256, old=[1.0, 1.0], status="incorrect")
    measured(16, 256, new=[1.0], flashmla=[1.0])
    frame = measured(16, 64, old=[1.0], new=[1.0])
    shown = mla.overflow(frame)[["tokens", "GiB bf16", "0.6.4", "0.6.13", "FlashMLA"]]
    assert shown.to_numpy().tolist() == [
        [64 * 32768, 2.25, "0 of 1", "0 of 1", "0 of 0"],
        [256 * 32768, 9.0, "2 of 2", "0 of 1", "0 of 1"],
    ]


def test_rates_count_whole_tiles(measured):
    frame = measured(16, 64, new=[100.0], flashmla=[100.0])
    table = mla.reached(frame, LIMIT).set_index("design")
    # 64 rows for 16 heads, 2,048 tokens of 64 requests, in 100 us.
    flops = 2 * 64 * (576 + 512) * 2048 * 64
    assert set(table["TFLOP/s, padded"]) == {round(flops / 100 / 1e6)}
    gathered = 2048 * 64 * 656 + 64 * 16 * 2 * (576 + 512) + 4 * 64 * 2048
    assert table["GB/s"][FLASHMLA] == round(gathered / 100 / 1e3)
    assert table["of read, %"][FLASHMLA] == round(100 * gathered / 100 / 1e3 / 4000)


def test_flashmlas_kernels_are_named_by_what_they_do(make_record):
    item = Item("flashmla-sparse-fp8", "graph", MlaCase(MlaSpec(16, 512), 64, 4096))
    times = {"splitkv_mla_fp8_sparse": 30.0, "mla_combine": 8.0}
    names = {f"flash_fwd_{name}_kernel": us for name, us in times.items()}
    names["elementwise_kernel"] = 3.5
    kernels = tuple({"name": n, "launches": 1.0, "gpu_us": us} for n, us in names.items())
    (row,) = mla.parts(store.frame([make_record(item=item, kernels=kernels)])).to_dict("records")
    assert (row["attention"], row["combine"], row["query copy"]) == (30.0, 8.0, 3.5)


def without_flash_attention(name):
    frame = live(name)
    return frame[frame.backend != "flash-attn-3-mla"]


@pytest.mark.parametrize("of", [published, live, without_flash_attention, without_flashmla])
def test_every_table_of_the_rivals_stands_on_what_a_live_notebook_measures(of):
    frame = of("mla_rivals")
    for table in (
        mla_rivals.side_by_side(frame),
        mla_rivals.formats(frame),
        mla_rivals.format_counts(frame),
        mla_rivals.pair_counts(frame),
    ):
        assert len(table)
    assert mla_rivals.left_out(frame).records.le(40).all()


def test_the_fastest_of_each_format_are_compared_cold_and_warm(make_record):
    """FlashInfer over FP8 takes half of FlashAttention-3, which is faster than its fa3 over bf16.

    Warm it takes twice as long; and one of its rounds drifts, which is said.
    """
    for kv_format, backend, cold, warm in (
        ("bfloat16", "flash-attn-3-mla", 20.0, 10.0),
        ("bfloat16", "flashinfer-mla-fa3", 99.0, 99.0),
        ("fp8-576", "flashinfer-mla-fa3", 10.0, 20.0),
    ):
        case, release = MlaCase(MlaSpec(16, 512, kv_format=kv_format), 8, 32768), "0.7.2"
        for timer, us in (("graph-cold", cold), ("graph", warm)):
            item = Item(backend, timer, case, release if "flashinfer" in backend else "")
            for round_, wobble in enumerate((1.0, 1.001, 0.999, 1.0, 1.1)):
                drift = 1.1 if round_ == 4 else 1.0
                took = (us * wobble,) * 3 + (us * wobble * drift,) * 3
                store.append(make_record(item=item, round=round_, run_us=took, settle_us=9.0))
    (machine,) = store.machines("demo")
    frame = store.load("demo", machine)
    (row,) = mla_rivals.formats(frame).to_dict("records")
    assert (row["bf16"], row["bf16, us"]) == ("FlashAttention-3", 20.0)
    assert (row["FP8"], row["FP8, us"], row["ratio"]) == ("FlashInfer fa3", 10.0, 0.5)
    assert (row["rounds"], row["FP8 is"]) == (4, "faster")
    counts = mla_rivals.format_counts(frame).set_index("L2")
    assert counts.loc["cold, 8 requests", "faster"] == counts.loc["warm, 8 requests", "slower"] == 1
    (lost,) = mla_rivals.left_out(frame).to_dict("records")
    assert (lost["records"], lost["left out"], lost["at the power limit"]) == (30, 6, 0)


@pytest.mark.usefixtures("published_records")
def test_the_counters_are_those_of_the_call_that_the_study_timed():
    found = mla_rivals.counters().set_index("counter").value
    tokens = 64 * 2048 * 576 * 2 / 1e6
    assert found["written to another SM, MB"] == round(tokens, 1)
    stalls = found[[name for name in found.index if name.startswith("of these")]]
    assert 0 < stalls.sum() < found["cycles a warp takes an instruction"]
    timed = mla_rivals.side_by_side(published("mla_rivals"))
    (row,) = timed[(timed.heads == 128) & (timed.top_k == 2048) & (timed.batch == 64)].to_dict(
        "records"
    )
    assert found["time, us"] == pytest.approx(row["FlashMLA, FP8"], rel=0.05)
