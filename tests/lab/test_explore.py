"""The explorer's controls: what they offer, what they show, and that no choice ends the kernel."""

import os
import sys
import time

import pytest
from support.explorer_records import FA2, FA3, go_live
from support.studies import INSTANT

pytest.importorskip("ipywidgets", reason="needs ipywidgets: pip install ipywidgets")

import attnlib
from attnlib import explore, view
from attnlib.lab import explore as module
from attnlib.lab import source
from attnlib.lab.explore import CSS_CLASS, DESCRIPTIONS
from attnlib.lab.source import MOVING, OFFERED_MODELS
from attnlib.lab.view import View
from attnlib.run import store
from attnlib.run import study as studying
from attnlib.run.missing import NoGpuError
from attnlib.run.study import describe
from attnlib.studies import STUDIES

MODEL = "Qwen3-0.6B"
ON_CPU = {"timer": "host", "page_size": 1, "batch": 1, "kv_len": 16, "rounds": 1}
ON_CPU |= {"records": "live", "backends": ("sdpa", "flashinfer-fa2")}
# A sitecustomize module on PYTHONPATH: a worker hangs while it writes its first record.
HANGS = f"""{INSTANT}
import time
from attnlib.run import store
from attnlib.run.study import describe
def asked_of(spec):
    (folder,) = store.data_root().glob("records/*/explorer")
    (folder / "0.json.1.unfinished").write_text('{{"backend":"sdpa","calls_per_sam')
    time.sleep(60)
"""


@pytest.fixture
def published(published_records, monkeypatch):
    """The explorer of the published records; it draws no pictures, which take half of its time."""
    monkeypatch.setattr(View, "image", lambda view: "<img>")
    return explore()


def wait(explorer, timeout_s=60):
    until = time.monotonic() + timeout_s
    while explorer.thread is not None:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_it_opens_with_the_view_that_the_call_gives_or_at_the_choices_asked_for(published):
    opened = view(release="0.6.3", records="fa3_decode_regression", machine="30af7b45")
    assert repr(published.view) == repr(opened)
    assert "Records of study fa3_decode_regression" in published.served.value
    seen = explore("Qwen3-32B at TP 4", release="0.6.3", batch=1, kv_len=32768).view
    assert seen.choice.arguments["kv_len"] == 32768


def test_it_opens_where_its_sliders_move_and_they_stay_there(published):
    batch, kv_len = (published.controls[name] for name in MOVING)
    for model in OFFERED_MODELS:
        published.controls["model"].value = model
        stops = [len(batch.options), len(kv_len.options)]
        assert min(stops) > 1 or model == "DeepSeek MLA", model
    published.controls["model"].value = MODEL
    published.controls["model"].value = "Llama-3.1-8B"
    release = "0.6.3"
    assert published.controls["release"].value == release
    assert len(kv_len.options) > 1
    for _, stop in batch.options:
        batch.value = stop
        assert published.controls["release"].value == release
    newest = explore("Llama-3.1-8B", release="0.7.2.post1")
    assert newest.view.choice.arguments["release"] == "0.7.2.post1", "as asked for"


def test_a_control_with_one_choice_is_disabled(published):
    for release, is_fixed in (("0.7.2.post1", True), ("0.6.3", False)):
        published.controls["release"].value = release
        assert published.controls["kv_len"].disabled == is_fixed
        for control in published.controls.values():
            assert control.disabled == (len(control.options) == 1)


def test_what_another_control_changes_is_said(published):
    published.controls["batch"].value = 64
    assert published.view.choice.arguments["kv_len"] == 4096
    words = "<strong>changed with batch: kv_len 8192 to 4096</strong>"
    assert published.served.value.startswith(words)
    published.controls["against"].value = FA3
    assert "changed with" not in published.served.value


def test_backends_that_are_not_on_record_at_another_size_are_said(published):
    published.controls["release"].value = "0.6.3"
    before = {*published.view.backends}
    published.controls["kv_len"].value = 16384
    gone = before - {*published.view.backends}
    words = f"not on record with this kv_len: {', '.join(sorted(gone))}"
    assert gone and words in published.served.value
    published.controls["against"].value = FA3
    assert "not on record with" not in published.served.value


def test_every_control_has_its_label_and_the_whole_has_its_class(published):
    assert {name: c.description for name, c in published.controls.items()} == DESCRIPTIONS
    assert CSS_CLASS in published._dom_classes
    bundle = published._repr_mimebundle_()
    assert bundle["text/plain"] == repr(published.view)
    assert "<table>" in bundle["text/html"]


def test_a_choice_that_no_longer_holds_is_replaced_and_said_once_above_the_figure(published):
    published.controls["release"].value = "0.6.3"
    published.controls["batch"].value = 64
    published.controls["release"].value = "0.7.2.post1"
    note = "batch must be one of 16, 128 with the choices before it, got 64"
    assert published.view.choice.arguments["batch"] == 128, "the nearest one"
    assert note in published.served.value
    assert published.served.value.split("</strong>")[0].endswith("; 128 is shown")
    published.controls["release"].value = "0.6.4"
    assert "must be one of" not in published.served.value
    records = [pair for _, pair in published.controls["records"].options]
    assert len(records) == len(set(records))
    published.controls["records"].value = next(p for p in records if p[0] == "auto_resolution")
    assert published.view.source.records == "auto_resolution"
    published.controls["model"].value = "Qwen3-32B at TP 4"
    assert published.view.source.records == "measurement_trust", "it has the release and batch"
    assert "study auto_resolution has no records" in published.served.value


def test_advice_is_of_the_layer_that_is_shown_and_a_problem_is_said(published):
    published.advise.click()
    assert "heads=32/8 head_dim=128 page=16 lens=8192x16: 131,072 tokens" in published.advice.value
    published.controls["model"].value = "DeepSeek MLA"
    assert published.advice.value == ""
    published.advise.click()
    assert "mode=mla heads=128/1 page=64 lens=8192x64" in published.advice.value


@pytest.mark.slow
def test_every_choice_of_records_is_named_by_gpu_and_question_and_one_a_model_is_shown(published):
    for name in OFFERED_MODELS:
        published.controls["model"].value = name
        offered = [option for option in published.controls["records"].options if option[1][1]]
        assert len(offered) >= 2
        for label, pair in offered:
            assert label == f"{pair[1]}: {STUDIES[pair[0]].question}"
        published.controls["records"].value = pair
        assert (published.view.source.records, published.view.source.machine) == pair


def test_a_machine_is_kept_until_a_model_has_no_records_of_it(published_records):
    explorer = explore("Qwen2.5-72B", tp=8, machine="h100")
    assert "NVIDIA H100" in explorer.served.value
    assert "Qwen2.5-72B at TP 8, FlashInfer 0.6.4, NVIDIA H100" in explorer.words
    explorer.controls["model"].value = "Qwen3-0.6B"
    assert explorer.served.value.startswith("<strong>machine h100 has no records on Qwen3-0.6B; ")
    with pytest.raises(ValueError, match="machine must be one of .*nvidia-h100-80gb.*got 'b200'"):
        explore(machine="b200")


def test_backends_are_chosen_and_none_at_all_is_all(published):
    published.controls["backends"].value = (FA2, FA3)
    assert published.view.backends == [FA2, FA3]
    published.controls["against"].value = FA3
    published.controls["backends"].value = (FA2,)
    assert published.view.choice.arguments["against"] == FA2
    published.controls["backends"].value = ()
    assert len(published.view.backends) > 2


def test_without_a_gpu_it_shows_why_and_leaves_the_records_to_be_chosen(
    published_records, without_gpu, monkeypatch
):
    monkeypatch.setenv("ATTNLIB_MODE", "live")
    explorer = explore(records="live")
    assert "live needs a CUDA GPU" in explorer.shown.value and explorer.view is None
    assert explorer.measure.disabled and explorer.live_row.layout.display == "flex"
    assert explorer.advise.disabled
    explorer.advise.click()
    assert "advice must be of a call that is shown" in explorer.advice.value
    explorer.controls["records"].value = explorer.controls["records"].options[0][1]
    assert explorer.view is not None and explorer.live_row.layout.display == "none"
    assert not explorer.advise.disabled


def test_an_argument_that_is_none_lists_those_that_are(published_records):
    with pytest.raises(ValueError, match="explore takes model, .*head_dim; got 'colour'"):
        explore(colour=1)
    with pytest.raises(ValueError, match="rounds must be left out, got 500: "):
        explore(rounds=500)


def test_without_a_gpu_nothing_offers_to_measure(published_records, without_gpu, monkeypatch):
    monkeypatch.setattr(source, "has_driver", lambda: False)
    monkeypatch.setattr(View, "image", lambda view: "<img>")
    explorer = explore()
    places = [place for _, place in explorer.controls["records"].options]
    assert ("live", "") not in places and len(places) > 1
    assert explorer.view is not None and explorer.measure.disabled
    explorer.start()
    assert explorer.thread is None
    assert "Not measured: no CUDA GPU is here." in explorer.status.value


def test_without_a_gpu_a_machine_is_described_by_one_sentence(monkeypatch):
    describe.cache_clear()
    monkeypatch.setattr(studying, "has_driver", lambda: False)
    with pytest.raises(NoGpuError, match=r"^no CUDA GPU is here$"):
        describe("cuda")


def test_on_a_gpu_it_opens_to_measure_there(instant_jobs, monkeypatch):
    go_live(monkeypatch)
    explorer = explore(MODEL)
    assert explorer.controls["records"].value == ("live", "")
    assert explorer.served.value == "Measures here; not on record yet."
    assert explorer.view.times.ran.tolist() == ["not on record"] * 2
    assert not list(store.data_root().rglob("*.json")), "to look writes nothing"
    explorer.advise.click()
    assert "gpu must be one of" in explorer.advice.value and "CPU" not in explorer.advice.value
    explorer.measure.click()
    wait(explorer)
    assert explorer.view.times.rounds.tolist() == [3, 3]
    assert explorer.view.times.share.notna().all()
    assert "Measured here: Test GPU 0badcafe" in explorer.served.value
    assert "Measured 12 items." in explorer.status.value
    explorer.controls["kv_len"].value = 4096
    explorer.measure.click()
    wait(explorer)
    assert "Measured 6 items." in explorer.status.value, "no ceilings again"
    explorer.rounds.value = 4
    assert "rounds=4" in explorer.shown.value
    with pytest.raises(ValueError, match="rounds must be .*100, got 500"):
        explore(MODEL, rounds=500)


def test_an_error_of_any_kind_is_shown_and_not_raised(published, monkeypatch):
    monkeypatch.setattr(module, "find_case", lambda *_: {}["<b>disk</b>"])
    published.controls["release"].value = "0.6.4"
    assert "KeyError: &#x27;&lt;b&gt;disk&lt;/b&gt;&#x27;" in published.shown.value


@pytest.mark.slow
def test_a_measurement_can_be_stopped_and_taken_up_and_says_what_could_not_run(
    tmp_path, monkeypatch
):
    go_live(monkeypatch, describe("cpu"), "cpu", ())
    explorer = explore(MODEL, **ON_CPU)
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        explorer.measure.click()
        assert explorer.measure.disabled and not explorer.stop.disabled
        first = explorer.thread
        explorer.start()
        assert explorer.thread is first, "a second click does not measure twice"
        explorer.stop.click()
        wait(explorer)
    assert "Stopped. What was measured is kept" in explorer.status.value
    explorer.measure.click()
    wait(explorer, 120)
    assert explorer.view.times.ran.tolist() == ["-", "refused"]
    assert explorer.view.times.us[0] > 0
    assert "flashinfer-fa2: refused:" in explorer.shown.value
    assert explorer.bar.value == 2
    assert explorer.bar.max == 2
    assert "Measured 2 items." in explorer.status.value
    assert explorer.stop.disabled and not explorer.measure.disabled


def test_without_ipywidgets_the_install_line_is_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "attnlib.lab.explore")
    with pytest.raises(
        ModuleNotFoundError, match=r'attnlib.explore: needs ipywidgets: pip install -e "\.\[lab'
    ):
        attnlib.explore  # noqa: B018 - the attribute is asked for


@pytest.mark.gpu
def test_on_a_real_gpu_a_case_that_does_not_fit_is_a_sentence_and_the_next_one_is_measured():
    backends = ("sdpa", FA2)
    explorer = explore("Llama-3.1-8B", backends=backends, batch=512, kv_len=131072, rounds=1)
    explorer.measure.click()
    wait(explorer, 900)
    assert "flashinfer-fa2: refused: KV needs" in explorer.shown.value
    assert "Measured 4 items." in explorer.status.value, explorer.status.value
    explorer.controls["batch"].value = 1
    explorer.controls["kv_len"].value = 1024
    explorer.measure.click()
    wait(explorer, 900)
    seen = explorer.view
    assert "Measured 2 items." in explorer.status.value, "ceilings are on record"
    assert seen.times.rounds.tolist() == [1, 1] and seen.times.share.notna().all(), repr(seen)
    assert len(seen.kernels) >= 2
