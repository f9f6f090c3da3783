"""Choosing axis by axis: wishes that can be had, the usual for the rest, a word for the others."""

from __future__ import annotations

import pytest
from support.explorer_records import FA2, FA3, MACHINE, QWEN, other, timed

from attnlib.lab.choices import AXES, ROUNDS
from attnlib.lab.sources import Shelf, ThisGpu, narrow

MODEL = "Qwen3-0.6B"


@pytest.fixture
def shelf(make_record):
    """fa2 and fa3 at batch 16, fa2 alone at batch 4 and 4,096 tokens."""
    short = other(QWEN, batch_size=4, kv_len=4096)
    items = (timed(FA3, QWEN), timed(FA2, QWEN), timed(FA2, short))
    return Shelf("demo", MACHINE, tuple(make_record(item=item) for item in items))


def test_who_asks_for_nothing_gets_usual_sizes_and_every_backend(shelf):
    found = narrow(shelf, {"model": MODEL})
    assert found.choices.case == QWEN
    assert (found.choices.backends, found.choices.against) == ((FA2, FA3), FA2)
    assert found.choices.rounds == ROUNDS and found.notes == ()
    assert set(found.options) == {*AXES, "backends", "against"}


def test_a_usual_size_that_is_not_there_gives_the_nearest(shelf):
    assert narrow(shelf, {"model": MODEL, "batch": 4}).choices.kv_len == 4096


def test_options_are_of_the_choices_before_them(shelf):
    assert narrow(shelf, {"model": MODEL, "batch": 4}).options["kv_len"] == (4096,)
    assert narrow(shelf, {"model": MODEL, "batch": 4}).choices.backends == (FA2,)


def test_a_wish_that_is_not_on_record_is_an_error_with_those_that_are(shelf):
    with pytest.raises(ValueError, match=r"batch must be one of 4, 16: 'demo' has no other.*got 7"):
        narrow(shelf, {"model": MODEL, "batch": 7})


@pytest.mark.parametrize(
    ("wish", "note"),
    [
        ({"batch": 7}, "batch 7 is not on record with these choices, 16 is shown."),
        ({"kv_len": 1}, "kv len 1 is not on record with these choices, 8192 is shown."),
        ({"backends": (FA2, "sdpa")}, "backends 'sdpa' is not on record with these choices."),
        ({"against": "sdpa"}, f"against 'sdpa' is not on record with these choices, '{FA2}' is"),
    ],
)
def test_controls_get_a_note_beside_what_is_shown_instead(shelf, wish, note):
    found = narrow(shelf, {"model": MODEL, **wish}, strict=False)
    assert found.choices.case == QWEN
    (said,) = found.notes
    assert said.startswith(note)


def test_backends_keep_the_order_of_the_options(shelf):
    assert narrow(shelf, {"model": MODEL, "backends": (FA3, FA2)}).choices.backends == (FA2, FA3)
    assert narrow(shelf, {"model": MODEL, "backends": (FA3,)}).choices.against == FA3


def test_a_gpu_takes_any_size_and_offers_it_from_then_on():
    found = narrow(ThisGpu(), {"model": MODEL, "batch": 7, "rounds": 5})
    assert (found.choices.batch, found.choices.rounds) == (7, 5)
    assert 7 in found.options["batch"]


def test_a_gpu_measures_the_library_that_is_installed():
    assert narrow(ThisGpu(), {"model": MODEL}).choices.release == ""
