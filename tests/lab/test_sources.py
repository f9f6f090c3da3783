"""Who answers: records offer what they hold, this GPU takes any size; and how wishes are met."""

from dataclasses import replace

import pytest
from support.explorer_records import FA2, FA3, LATENT, MACHINE, QWEN, keep, publish, timed

from attnlib.lab.choices import AXES, LIVE, MLA, ROUNDS
from attnlib.lab.sources import Shelf, ThisGpu, narrow, source_of, studies_of
from attnlib.studies.fa3_decode_regression import H100_MACHINE, STUDY

LLAMA = "Llama-3.1-8B"
MODEL = {"model": "Qwen3-0.6B"}
LATENT_MODEL = {"model": MLA}


@pytest.fixture
def shelf(make_record):
    """Qwen3-0.6B: fa2 and fa3 at batch 16, fa2 alone at batch 4 and 4,096 tokens."""
    short = replace(QWEN, batch_size=4, kv_len=4096)
    items = (timed(FA3, QWEN), timed(FA2, QWEN), timed(FA2, short))
    return Shelf("demo", MACHINE, tuple(make_record(item=item) for item in items))


def test_published_studies_serve_a_model_that_they_hold_and_the_first_answers(
    published_records, monkeypatch
):
    source = source_of(LLAMA, "")
    assert (source.name, source.machine) == (STUDY.name, STUDY.reference_machine)
    assert "fa3_decode_regression" not in {**studies_of("Qwen3-0.6B"), **studies_of(MLA)}
    with pytest.raises(ValueError, match="records must be one of live, fa3_.*got 'one_launch'"):
        source_of(LLAMA, "one_launch")
    monkeypatch.setenv("ATTNLIB_MACHINE", H100_MACHINE)
    assert source_of(LLAMA, source.name).machine == H100_MACHINE


def test_releases_are_in_the_order_of_versions_and_another_seed_is_no_choice(make_record):
    releases = ("0.6.10", "0.6.9", "0.6.3")
    other = replace(QWEN, seed=5, batch_size=2)
    items = [timed(FA2, other), *(timed(FA2, QWEN, release) for release in releases)]
    shelf = Shelf("demo", MACHINE, tuple(make_record(item=item) for item in items))
    assert shelf.options("release", MODEL) == releases[::-1]
    assert shelf.options("batch", MODEL) == (QWEN.batch_size,)


def test_records_that_grew_are_read_again(demo, make_record):
    assert source_of("Qwen3-0.6B", "demo").options("batch", MODEL) == (16,)
    keep(make_record, "demo", timed(FA2, replace(QWEN, batch_size=64)), 100.0)
    assert source_of("Qwen3-0.6B", "demo").options("batch", MODEL) == (16, 64)


def test_a_new_study_of_latent_attention_serves_deepseek(make_record, monkeypatch, replayed):
    with pytest.raises(ValueError, match="no records on DeepSeek MLA .* measured live only"):
        source_of(MLA, "")
    publish(monkeypatch, "latent", LATENT, backends=("flashmla-dense",))
    keep(make_record, "latent", timed("flashmla-dense", LATENT, ""), 80.0)
    source = source_of(MLA, "")
    assert source.options("variant", LATENT_MODEL) == ("128 heads, dense, bfloat16",)
    assert source.options("backends", LATENT_MODEL) == ("flashmla-dense",)


def test_this_gpu_answers_in_live_mode_and_says_why_it_cannot(without_gpu, monkeypatch):
    monkeypatch.delenv("ATTNLIB_DATA")
    reasons = {"live": "live needs a CUDA GPU", "replay": "ATTNLIB_MODE=replay asks for records"}
    for mode, said in {**reasons, "auto": "no CUDA GPU is here: torch sees none"}.items():
        monkeypatch.setenv("ATTNLIB_MODE", mode)
        assert said in ThisGpu().unavailable()
        assert (source_of(LLAMA, "") == ThisGpu()) == (mode == "live"), "not swapped for records"
    monkeypatch.setattr("attnlib.lab.sources.mode", lambda: LIVE)
    assert (source_of(LLAMA, ""), ThisGpu().unavailable()) == (ThisGpu(), "")


def test_this_gpu_offers_the_usual_and_takes_any_size_and_records_take_none(shelf):
    gpu = ThisGpu()
    assert 7 not in gpu.options("batch", MODEL)
    assert "flashmla-dense" in gpu.options("backends", LATENT_MODEL)
    assert "flashmla-dense" not in gpu.options("backends", MODEL)
    found = narrow(gpu, {**MODEL, "batch": 7, "rounds": 5})
    assert (found.choices.batch, found.choices.rounds) == (7, 5)
    assert 7 in found.options["batch"], "offered from then on"
    assert found.choices.release == "", "the library that is installed"
    with pytest.raises(ValueError, match=r"batch must be one of 4, 16: 'demo' has no other.*got 7"):
        narrow(shelf, {**MODEL, "batch": 7})


def test_who_asks_for_nothing_gets_usual_sizes_and_every_backend_in_their_order(shelf):
    found = narrow(shelf, MODEL)
    assert found.choices.case == QWEN
    assert (found.choices.backends, found.choices.against) == ((FA2, FA3), FA2)
    assert found.choices.rounds == ROUNDS and found.notes == ()
    assert set(found.options) == {*AXES, "backends", "against"}
    assert narrow(shelf, {**MODEL, "backends": (FA3, FA2)}).choices == found.choices
    assert narrow(shelf, {**MODEL, "backends": (FA3,)}).choices.against == FA3


def test_options_are_of_the_choices_before_them_and_the_nearest_to_the_usual_is_taken(shelf):
    found = narrow(shelf, {**MODEL, "batch": 4})
    assert found.options["kv_len"] == (found.choices.kv_len,) == (4096,)
    assert found.choices.backends == (FA2,)


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
    found = narrow(shelf, {**MODEL, **wish}, strict=False)
    assert found.choices.case == QWEN
    (said,) = found.notes
    assert said.startswith(note)
