"""Who answers a view: published records offer what they hold, this GPU takes any size."""

from __future__ import annotations

import pytest
from support.explorer_records import FA2, FA3, LATENT, MACHINE, QWEN, keep, other, publish, timed

from attnlib.lab.choices import LIVE, MLA
from attnlib.lab.sources import Shelf, ThisGpu, source_of, studies_of, why_not_live
from attnlib.studies.fa3_decode_regression.study import HEADLINE, REFERENCE_MACHINE, WIDE

LLAMA = "Llama-3.1-8B"


@pytest.fixture
def replayed(monkeypatch):
    monkeypatch.setenv("ATTNLIB_MODE", "replay")


@pytest.fixture
def demo(make_record, monkeypatch, replayed):
    """A study of Qwen3-0.6B: two backends at batch 16, one of them at batch 4 too."""
    small = other(QWEN, batch_size=4)
    publish(monkeypatch, "demo", QWEN, small, backends=(FA2, FA3))
    for backend, case in ((FA2, QWEN), (FA3, QWEN), (FA2, small)):
        keep(make_record, "demo", timed(backend, case), 100.0)
    return source_of("Qwen3-0.6B", "")


def test_published_studies_serve_a_model_that_they_hold(published_records):
    assert studies_of(LLAMA)["fa3_decode_regression"] == REFERENCE_MACHINE
    assert "fa3_decode_regression" not in studies_of("Qwen3-0.6B")
    assert "fa3_decode_regression" not in studies_of(MLA)


def test_without_a_gpu_the_first_study_answers(published_records):
    source = source_of(LLAMA, "")
    assert (source.name, source.machine) == ("fa3_decode_regression", REFERENCE_MACHINE)


def test_the_published_shapes_are_those_that_can_be_chosen(published_records):
    source = source_of("Llama-2-7B", "fa3_decode_regression")
    cases = {case for case in (*WIDE, *HEADLINE) if case.spec.heads == "32/32"}
    assert set(source.options("batch", {"model": "Llama-2-7B"})) == {
        case.batch_size for case in cases
    }
    assert set(source.options("kv_len", {"model": "Llama-2-7B"})) == {case.kv_len for case in cases}


def test_a_choice_narrows_those_after_it(demo):
    assert demo.options("batch", {"model": "Qwen3-0.6B"}) == (4, 16)
    assert demo.options("backends", {"model": "Qwen3-0.6B", "batch": 4}) == (FA2,)
    assert demo.options("backends", {"model": "Qwen3-0.6B", "batch": 16}) == (FA2, FA3)
    assert demo.usual("batch", {"model": "Qwen3-0.6B"}) == 16


def test_releases_are_in_the_order_of_versions(make_record):
    records = tuple(
        make_record(item=timed(FA2, QWEN, release)) for release in ("0.6.10", "0.6.9", "0.6.3")
    )
    shelf = Shelf("demo", MACHINE, records)
    assert shelf.options("release", {"model": "Qwen3-0.6B"}) == ("0.6.3", "0.6.9", "0.6.10")


def test_a_case_with_another_seed_is_no_choice(make_record):
    item = timed(FA2, other(QWEN, seed=5, batch_size=2))
    shelf = Shelf("demo", MACHINE, (make_record(item=item),))
    assert shelf.options("batch", {"model": "Qwen3-0.6B"}) == ()


def test_records_that_grew_are_read_again(demo, make_record):
    keep(make_record, "demo", timed(FA2, other(QWEN, batch_size=64)), 100.0)
    assert source_of("Qwen3-0.6B", "demo").options("batch", {"model": "Qwen3-0.6B"}) == (4, 16, 64)


def test_latent_attention_is_served_by_its_study(published_records):
    source = source_of(MLA, "sparse_mla")
    assert "128 heads, top 2048, fp8-656" in source.options("variant", {"model": MLA})
    dense = {"variant": "128 heads, dense, bfloat16", "release": "0.6.13"}
    assert "flashmla-dense" in source.options("backends", {"model": MLA, **dense}), (
        "has no release of FlashInfer"
    )
    assert source.options("release", {"model": MLA}) == ("0.6.4", "0.6.13")


def test_a_new_study_of_latent_attention_serves_deepseek(make_record, monkeypatch, replayed):
    with pytest.raises(ValueError, match="no records on DeepSeek MLA .* measured live only"):
        source_of(MLA, "")
    publish(monkeypatch, "latent", LATENT, backends=("flashmla-dense",))
    keep(make_record, "latent", timed("flashmla-dense", LATENT, ""), 80.0)
    source = source_of(MLA, "")
    assert source.options("variant", {"model": MLA}) == ("128 heads, dense, bfloat16",)
    assert source.options("backends", {"model": MLA}) == ("flashmla-dense",)


def test_a_study_without_the_model_is_refused_and_those_with_it_are_listed(published_records):
    with pytest.raises(
        ValueError, match="records must be one of live, fa3_decode_.*got 'one_launch'"
    ):
        source_of(LLAMA, "one_launch")


def test_another_machines_records_are_served_when_it_is_named(published_records, monkeypatch):
    monkeypatch.setenv("ATTNLIB_MACHINE", "nvidia-h200-5cbc7574")
    assert source_of(LLAMA, "fa3_decode_regression").machine == "nvidia-h200-5cbc7574"


def test_in_live_mode_this_gpu_answers(monkeypatch):
    monkeypatch.setattr("attnlib.lab.sources.mode", lambda: LIVE)
    assert source_of("Qwen3-0.6B", "") == ThisGpu()
    assert ThisGpu().unavailable() == ""


def test_live_mode_is_not_swapped_for_records_where_there_is_no_gpu(monkeypatch, without_gpu):
    monkeypatch.delenv("ATTNLIB_DATA")
    monkeypatch.setenv("ATTNLIB_MODE", "live")
    assert source_of(LLAMA, "") == ThisGpu()
    assert "live needs a CUDA GPU" in ThisGpu().unavailable()


def test_replay_mode_is_the_reason_that_nothing_is_measured(replayed):
    assert "ATTNLIB_MODE=replay asks for records" in why_not_live()
    assert ThisGpu().unavailable() == why_not_live()


def test_a_missing_gpu_is_the_reason_that_nothing_is_measured(without_gpu, monkeypatch):
    assert why_not_live() == "no CUDA GPU is here: torch sees none"
    monkeypatch.setenv("ATTNLIB_MODE", "live")
    assert "live needs a CUDA GPU" in why_not_live()


def test_this_gpu_takes_sizes_that_it_does_not_offer_and_records_take_none(demo):
    assert ThisGpu().is_open and not demo.is_open
    assert 7 not in ThisGpu().options("batch", {"model": LLAMA})
    assert "flashmla-dense" in ThisGpu().options("backends", {"model": MLA})
    assert "flashmla-dense" not in ThisGpu().options("backends", {"model": LLAMA})
