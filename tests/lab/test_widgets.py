"""The explorer's controls: what they offer, what they show, and that no choice ends the kernel."""

import sys
import time
from datetime import UTC, datetime

import pytest
from support import traces
from support.explorer_records import FA2, FA3, go_live
from support.traces import Writer, runs

pytest.importorskip("ipywidgets", reason="needs ipywidgets: pip install ipywidgets")

import attnlib
from attnlib import explore, view
from attnlib.lab import sources, widgets
from attnlib.lab.sources import ThisGpu
from attnlib.lab.view import View, look
from attnlib.lab.widgets import CSS_CLASS, DESCRIPTIONS, Explorer
from attnlib.run import store
from attnlib.studies import STUDIES
from attnlib.studies.fa3_decode_regression import HEADLINE

MODEL = "Qwen3-0.6B"
CPU = ThisGpu("cpu", ())
ON_CPU = {"model": MODEL, "records": "live", "timer": "host", "batch": 1, "kv_len": 16}
ON_CPU |= {"backends": ("sdpa", "flashinfer-fa2"), "rounds": 1}


@pytest.fixture
def published(published_records, monkeypatch):
    """The explorer of the published records; it draws no pictures, which take half of its time."""
    monkeypatch.setattr(View, "image", lambda view: "<img>")
    return explore()


def box_of(explorer, name):
    return next(box for box in explorer.backends.children if box.description == name)


def test_it_opens_with_the_view_that_the_call_gives_or_at_the_choices_asked_for(published):
    assert repr(published.view) == repr(view())
    assert published.view.choices.model == "Llama-3.1-8B"
    assert "Served from records: study fa3_decode_regression" in published.served.value
    assert explore("Qwen3-32B at TP 4", batch=1, kv_len=32768).view.choices.kv_len == 32768


def test_every_control_has_its_label_and_the_whole_has_its_class(published):
    assert {name: c.description for name, c in published.controls.items()} == DESCRIPTIONS
    named = (published.rounds, published.measure, published.stop, published.bar)
    assert [c.description for c in named] == ["Rounds", "Measure", "Stop", "Progress"]
    assert all(box.description for box in published.backends.children)
    assert CSS_CLASS in published._dom_classes


def test_a_choice_that_no_longer_holds_is_replaced_and_said(published):
    published.controls["batch"].value = 64
    published.controls["release"].value = "0.7.2.post1"
    assert published.view.choices.batch == 16
    mine = [case for case in HEADLINE if case.spec.heads == "32/8" and case.spec.page_size == 16]
    offered = [value for _, value in published.controls["batch"].options]
    assert offered == sorted({case.batch_size for case in mine}), "what is on record alone"
    assert "batch 64 is not on record with these choices, 16 is shown." in published.shown.value
    published.controls["release"].value = "0.6.4"
    assert "is not on record" not in published.shown.value, "said once"
    published.controls["records"].value = "auto_resolution"
    assert published.view.choices.records == "auto_resolution"
    published.controls["model"].value = (model := "Qwen3-32B at TP 4")
    assert published.view.choices.records == "fa3_decode_regression", "the first that has it"
    assert f"Study auto_resolution has no records on {model}." in published.shown.value


def test_a_model_without_records_says_so_and_the_next_choice_works(published, monkeypatch):
    few = {"fa3_decode_regression": STUDIES["fa3_decode_regression"]}
    monkeypatch.setattr(sources, "STUDIES", few)
    published.controls["model"].value = MODEL
    assert "No records on Qwen3-0.6B: measured live only, on a GPU." in published.shown.value
    assert published.view is None and published.measure.disabled
    assert "attnlib.view(" in published.shown.value
    published.controls["model"].value = "Qwen3-32B at TP 4"
    assert published.view.choices.case.spec.heads == "16/2"


def test_backends_are_checked_and_unchecked_one_by_one_and_none_at_all_is_a_sentence(published):
    box_of(published, FA3).value = False
    checked = tuple(box.description for box in published.backends.children if box.value)
    assert published.view.choices.backends == checked and FA3 not in checked
    box_of(published, FA2).value = False
    assert published.view.choices.against != FA2
    for box in published.backends.children:
        box.value = False
    assert "Check at least one backend." in published.shown.value
    assert "attnlib.view(" not in published.shown.value
    assert published._repr_mimebundle_()["text/plain"] == "Check at least one backend."
    published.start()
    assert published.wait(0)
    box_of(published, FA2).value = True
    assert published.view.choices.backends == (FA2,)


NO_GPU = {"auto": "Nothing is measured here: no CUDA GPU is here", "live": "live needs a CUDA GPU"}


@pytest.mark.parametrize(("mode", "words"), NO_GPU.items())
def test_without_a_gpu_it_shows_why_and_leaves_the_records_to_be_chosen(
    published_records, without_gpu, monkeypatch, mode, words
):
    monkeypatch.setenv("ATTNLIB_MODE", mode)
    explorer = explore()
    explorer.controls["records"].value = "live"
    assert words in explorer.shown.value and explorer.view is None
    assert explorer.measure.disabled and explorer.live_row.layout.display == "flex"
    explorer.controls["records"].value = "fa3_decode_regression"
    assert explorer.view is not None and explorer.live_row.layout.display == "none"


def test_the_picture_says_its_numbers_and_who_cannot_show_widgets_sees_the_view(published_records):
    published = explore()
    picture = published.picture.value
    assert picture.startswith("<img alt='Time of one call: flashinfer-auto 497.3 us")
    assert "src='data:image/png;base64,iVBOR" in picture
    bundle = published._repr_mimebundle_()
    assert bundle["text/plain"] == repr(published.view)
    assert "Served from records" in bundle["text/html"] and "<table>" in bundle["text/html"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "GPT-7"}, "model must be one of .*got 'GPT-7'"),
        ({"records": "one_launch"}, "records must be one of live, .*got 'one_launch'"),
        ({"colour": 1}, "explore takes model, .*rounds; got 'colour'"),
    ],
)
def test_a_wrong_argument_is_an_error_with_the_valid_ones(published_records, asked, words):
    with pytest.raises(ValueError, match=words):
        explore(**asked)


def test_on_a_gpu_it_opens_to_measure_there(instant_jobs, monkeypatch):
    go_live(monkeypatch)
    explorer = explore(MODEL)
    assert explorer.controls["records"].value == "live"
    assert explorer.served.value == "<b>Measures here; not on record yet.</b>"
    assert explorer.view.times.ran.tolist() == ["not on record"] * 2
    assert not list(store.data_root().rglob("*.jsonl")), "to look writes nothing"
    explorer.measure.click()
    assert explorer.wait(60)
    assert explorer.view.times.rounds.tolist() == [3, 3]
    assert explorer.view.times.share.notna().all()
    assert explorer.view.rules.library.tolist()[0] == "flashinfer==0.6.3"
    assert "Measured here, on Test GPU 0badcafe" in explorer.served.value
    assert "Measured 12 items." in explorer.status.value
    explorer.controls["kv_len"].value = 4096
    explorer.measure.click()
    assert explorer.wait(60) and "Measured 6 items." in explorer.status.value, "no ceilings again"
    explorer.rounds.value = 4
    assert "rounds=4" in explorer.shown.value


def test_a_choice_draws_one_view_and_shows_its_call_or_an_error_of_any_kind(published, monkeypatch):
    drawn = []
    monkeypatch.setattr(widgets, "look", lambda *asked: drawn.append(asked) or look(*asked))
    published.controls["kv_len"].value = 4096
    assert len(drawn) == 1 and "kv_len=4096" in published.shown.value
    assert repr(view(kv_len=4096)) == repr(published.view)
    monkeypatch.setattr(widgets, "look", lambda *_: {}["<b>disk</b>"])
    published.controls["kv_len"].value = 8192
    assert "KeyError: &#x27;&lt;b&gt;disk&lt;/b&gt;&#x27;" in published.shown.value, "not raised"


def test_a_measurement_can_be_stopped_and_taken_up_and_says_what_could_not_run():
    explorer = Explorer(ON_CPU, CPU)
    explorer.measure.click()
    assert explorer.measure.disabled and not explorer.stop.disabled
    first = explorer._sweep
    explorer.start()
    assert explorer._sweep is first, "a second click does not measure twice"
    explorer.stop.click()
    assert explorer.wait(60)
    assert "Stopped. What was measured is kept" in explorer.status.value
    explorer.measure.click()
    assert explorer.wait(120)
    assert explorer.view.times.ran.tolist() == ["-", "refused"]
    assert explorer.view.times.us[0] > 0
    assert "flashinfer-fa2: refused:" in explorer.shown.value
    assert (explorer.bar.value, explorer.bar.max) == (2, 2)
    assert "Measured 2 items." in explorer.status.value
    assert explorer.stop.disabled and not explorer.measure.disabled


def test_without_ipywidgets_the_install_line_is_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "attnlib.lab.widgets")
    with pytest.raises(ModuleNotFoundError, match='needs ipywidgets: pip install "ipywidgets>='):
        attnlib.explore  # noqa: B018 - the attribute is asked for


@pytest.mark.gpu
def test_on_a_real_gpu_a_case_that_does_not_fit_is_a_sentence_and_the_next_one_is_measured():
    backends = ("sdpa", FA2)
    explorer = explore("Llama-3.1-8B", backends=backends, batch=512, kv_len=131072, rounds=1)
    explorer.measure.click()
    assert explorer.wait(900)
    assert "flashinfer-fa2: refused: KV needs" in explorer.shown.value
    assert "Measured 4 items." in explorer.status.value, explorer.status.value
    explorer.controls["batch"].value = 1
    explorer.controls["kv_len"].value = 1024
    explorer.measure.click()
    assert explorer.wait(900)
    seen = explorer.view
    assert "Measured 2 items." in explorer.status.value, "ceilings are on record"
    assert seen.times.rounds.tolist() == [1, 1] and seen.times.share.notna().all(), repr(seen)
    assert seen.times.ran[1] == "fa2" and len(seen.kernels) >= 2
    assert len(seen.rules) == 3 and seen.comparison.verdict.tolist() == ["ambiguous"]


def test_two_releases_of_the_model_are_compared_below_and_a_problem_is_a_sentence(published):
    published.compare_now()
    assert "FlashInfer 0.6.4 (base) to 0.7.2.post1 (new)" in published.answer.value
    assert "32/8,d128,p16,b16,k8192" in published.answer.value
    assert "16/2,d128" not in published.answer.value
    base, _ = published.ends
    base.value = "fast"
    published.compare.click()
    for _ in range(100):
        if "fast must be a release" in published.answer.value:
            break
        time.sleep(0.05)
    assert "role='alert'" in published.answer.value


def test_a_trace_that_is_dropped_is_diagnosed_under_its_own_name(published, tmp_path):
    def drop(name, content):
        file = {"name": name, "type": "", "size": len(content), "content": memoryview(content)}
        published.trace.value = ({**file, "last_modified": datetime.now(UTC)},)

    trace, writer = tmp_path / "server.json.gz", Writer()
    writer.step([runs(traces.FA3)], mark="step[DECODE bs=3]")
    writer.save(trace)
    drop(trace.name, trace.read_bytes())
    assert trace.name in published.answer.value and "known pattern" in published.answer.value
    drop("notes.json", b"no trace")
    assert "ValueError: notes.json must be" in published.answer.value
