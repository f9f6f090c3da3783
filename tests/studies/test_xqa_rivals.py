"""XQA beside its rivals: right on made-up records, whole on those that a live notebook measures."""

import pytest
from support.published import live, published

from attnlib.core.backends.limits import why_not
from attnlib.kinds.item import Item
from attnlib.run import store
from attnlib.studies import xqa_rivals
from attnlib.studies.xqa_rivals.study import CASES, FLASHINFER, LAYERS, RELEASE, SHAPES


def test_each_layer_is_one_that_xqa_takes_and_half_of_the_shapes_give_a_head_one_block():
    assert not any(why_not("xqa", spec, mode="decode", release=RELEASE) for spec in LAYERS.values())
    heads = {spec.num_kv_heads for spec in LAYERS.values()}
    alone = [h * n >= 132 for h in heads for n, *_ in SHAPES.values()]
    assert len(set(CASES)) == len(CASES) == 36 and alone.count(True) * 2 == len(alone)


def without_flash_attention(name):
    frame = live(name)
    return frame[frame.backend != "fa3-precomputed"]


@pytest.mark.parametrize("of", [published, live, without_flash_attention])
def test_every_table_stands_on_what_a_live_notebook_measures(of):
    frame = of("xqa_rivals")
    assert xqa_rivals.over_rival(frame).loc["Llama-3.1-8B", "one long"]
    assert len(xqa_rivals.counts(frame)) >= 4


def test_a_shape_has_its_names_and_a_long_request_is_counted_apart(make_record):
    """Of Llama-3.1-8B XQA takes half of fa2's time for many requests and five times with one long
    one; of a wobble of 0.1 % neither is doubtful."""
    times = {CASES[2]: (10.0, 20.0, 20.0), CASES[5]: (100.0, 20.0, 10.0)}
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
    table = xqa_rivals.counts(frame).set_index("pair")
    assert table.loc["XQA over fa2 planned, one long", "median"] == pytest.approx(10)
    assert table.loc["XQA over fa2, others", "faster"] == 1
