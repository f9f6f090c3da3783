"""XQA beside its rivals: right on made-up records, whole on those that a live notebook measures."""

from dataclasses import replace

import pytest
from matplotlib.collections import PathCollection
from support.published import live, published

from attnlib.core.backends.limits import why_not
from attnlib.kinds.item import Item
from attnlib.run import store
from attnlib.studies import xqa_rivals
from attnlib.studies.xqa_rivals.study import (
    CASES,
    CUDNN,
    FLASH_ATTENTION,
    FLASHINFER,
    LAYERS,
    RELEASE,
    SHAPES,
    XQA,
)


def test_each_layer_is_one_that_xqa_takes_and_ten_of_eighteen_give_it_one_part():
    assert not any(why_not("xqa", spec, mode="decode", release=RELEASE) for spec in LAYERS.values())
    heads = {spec.num_kv_heads for spec in LAYERS.values()}
    alone = [h * n > 66 for h in heads for n, *_ in SHAPES.values()]
    assert len(set(CASES)) == len(CASES) == 36
    assert (alone.count(True), len(alone)) == (10, 18)


def without_flash_attention(name):
    frame = live(name)
    return frame[frame.backend != FLASH_ATTENTION]


@pytest.mark.parametrize("of", [published, live, without_flash_attention])
def test_every_table_stands_on_what_a_live_notebook_measures(of):
    frame = of("xqa_rivals")
    assert xqa_rivals.over_rival(frame).loc["Llama-3.1-8B", "one long"]
    assert len(counts := xqa_rivals.counts(frame)) >= 4 and counts["median"].dtype == float
    parts = xqa_rivals.parts_table(frame)
    assert len(parts) == (6 if of is published else 1) and parts["ns per token"].notna().all()
    assert parts["FlashAttention-3, precomputed"].isna().all() == (of is without_flash_attention)
    assert len(xqa_rivals.over_chart(frame).axes) == 3
    assert xqa_rivals.over_rival(frame, FLASH_ATTENTION).shape == (len(LAYERS), len(SHAPES))


def test_cudnn_merges_parts_where_requests_and_kv_heads_are_66_pairs_or_fewer():
    found = xqa_rivals.launched(published("xqa_rivals"), CUDNN)
    pairs = {
        name: [spec.num_kv_heads * n for n, *_ in SHAPES.values()] for name, spec in LAYERS.items()
    }
    wanted = {name: [1 + (count <= 66) for count in row] for name, row in pairs.items()}
    assert found.T.to_dict("list") == wanted and list(found) == [*SHAPES]
    assert xqa_rivals.launched(live("xqa_rivals"), CUDNN).count().sum() == 2


def test_where_xqa_did_not_run_every_table_is_there_and_empty():
    frame = live("xqa_rivals")
    frame = frame[frame.backend != XQA]
    assert xqa_rivals.counts(frame).empty and not xqa_rivals.over_rival(frame).any(axis=None)
    assert xqa_rivals.parts_table(frame)["ns per token"].isna().all()
    assert xqa_rivals.parts_table(frame[:0]).empty and xqa_rivals.over_chart(frame).axes


def test_a_shape_has_its_names_and_a_long_request_is_counted_apart(make_record):
    """Of Llama-3.1-8B XQA takes half of fa2's time for many requests and five times with one long
    one; of a wobble of 0.1 % neither is doubtful."""
    times = {CASES[2]: (10.0, 20.0, 20.0, 40.0), CASES[5]: (100.0, 20.0, 10.0, 50.0)}
    for case, took in times.items():
        for backend, us in zip(FLASHINFER, took, strict=True):
            for round_, wobble in enumerate((1.0, 1.001, 0.999, 1.0)):
                item = Item(backend, "graph-cold", case, RELEASE)
                store.append(make_record(item=item, round=round_, run_us=(us * wobble,)))
    (machine,) = store.machines("demo")
    frame = store.load("demo", machine)
    found = xqa_rivals.over_rival(frame).loc["Llama-3.1-8B"]
    assert found["many"] == "0.50 faster" and found["one long"] == "5.00 slower"
    assert not found["few"] and len(found) == len(SHAPES)
    assert xqa_rivals.over_rival(frame, XQA, CUDNN).loc["Llama-3.1-8B", "many"] == "4.00 slower"
    table = xqa_rivals.counts(frame).set_index("pair")
    assert table.loc["XQA over fa2 planned, one long", "median"] == pytest.approx(10)
    assert table.loc["XQA over fa2, others", "faster"] == 1
    assert (
        xqa_rivals.counts(frame, CUDNN).set_index("pair").loc["cuDNN over fa2, others", "most"] == 2
    )
    (axis, other, _) = xqa_rivals.over_chart(frame).axes
    (cudnn, *_) = xqa_rivals.over_chart(frame, CUDNN).axes
    assert "time of XQA" in axis.get_xlabel() and "time of cuDNN" in cudnn.get_xlabel()
    (dots,) = (c for c in axis.collections if isinstance(c, PathCollection))
    assert dots.get_offsets()[:, 0].tolist() == pytest.approx([0.5, 5], rel=1e-3)
    assert dots.get_offsets()[:, 1].round().tolist() == [2, 5] and not other.collections


@pytest.mark.parametrize(
    ("layer", "parts", "tokens"),
    [("Llama-3.1-8B", 1, 65536), ("Llama-3.1-70B on 8", 4, 16384), ("Llama-2-7B", 1, 65536)],
)
def test_a_block_of_the_long_request_has_the_tokens_that_the_launch_rule_gives_it(
    make_record, layer, parts, tokens
):
    case = CASES[6 * [*LAYERS].index(layer) + 5]
    for round_, us in enumerate((640.0, 660.0, 650.0)):
        item = Item(XQA, "graph-cold", case, RELEASE)
        record = make_record(item=item, round=round_, run_us=(us,))
        store.append(replace(record, machine=record.machine | {"num_sms": 132}))
    (machine,) = store.machines("demo")
    (row,) = xqa_rivals.parts_table(store.load("demo", machine)).reset_index().to_dict("records")
    assert (row["layer"], row["parts"], row["tokens of a block"]) == (layer, parts, tokens)
    assert row["blocks"] == 32 * row["KV heads"] * parts and row["XQA"] == 650
    assert row["ns per token"] == round(650_000 / tokens, 1) and row["fa2"] != row["fa2"]
