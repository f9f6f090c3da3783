"""The view: its numbers are those of the records, its words are escaped, its call repeats it."""

import pytest
from support import explorer_records as made
from support.explorer_records import COPY_BYTES, FA2, FA3, LATENT, QWEN, keep, publish, timed

import attnlib
from attnlib.lab import sources
from attnlib.lab.sources import ThisGpu, narrow
from attnlib.lab.tables import ENGINES
from attnlib.lab.view import look, view
from attnlib.measure.stats import judge_ratios
from attnlib.run import frame as rows
from attnlib.run import store
from attnlib.studies import STUDIES
from attnlib.studies.fa3_decode_regression import HEADLINE, REGRESSED

MODEL = "Qwen3-0.6B"
EVIL = "<img src=x onerror=alert(1)>"


def by_backend(table):
    return table.set_index("backend").to_dict("index")


def test_times_are_medians_over_rounds_shares_of_the_copy_ceiling_kernels_of_the_trace(demo):
    seen = view(MODEL)
    floor_us = QWEN.cost.io_bytes / (COPY_BYTES / 1000.0)
    assert seen.floor_us == pytest.approx(floor_us)
    fa3 = by_backend(seen.times)[FA3]
    assert fa3.pop("share") == pytest.approx(floor_us / 318.0)
    assert fa3 == {"us": 318.0, "ran": "fa3", "launches": 3.0, "plan_us": 45.0, "rounds": 3}
    kernels = view(MODEL, backends=(FA2,)).kernels.drop(columns="backend").to_numpy().tolist()
    assert kernels == [["AttendKernel", 1.0, 8.25], ["MergeKernel", 2.0, 1.5]]


def test_a_ratio_pairs_rounds_and_has_the_verdict_of_the_statistics(demo):
    (found,) = view(MODEL).comparison.to_dict("records")
    (judged,) = judge_ratios([(demo[FA3], demo[FA2])])
    assert found == {"backend": FA3, "against": FA2, **vars(judged)}
    assert (found["verdict"], found["rounds"]) == ("slower", 3)
    (found,) = view(MODEL, against=FA3).comparison.to_dict("records")
    assert (found["backend"], found["verdict"]) == (FA2, "faster")


def test_the_rules_are_asked_for_the_gpu_and_release_of_the_records(demo):
    rule, *engines = view(MODEL).rules.to_dict("records")
    assert [each["library"] for each in engines] == list(ENGINES)
    assert {each["chooses"] for each in engines} == {"flash-attn-3"}
    assert (rule["library"], rule["chooses"]) == ("flashinfer==0.6.3", FA3)
    assert rule["us"] == 318.0 and "Hopper" in rule["because"]


@pytest.mark.parametrize(
    ("status", "reason"),
    [("incorrect", "row error 3 over budget 0.01"), ("crashed", f"signal SIGKILL; {EVIL}")],
)
def test_a_failure_is_a_word_in_its_row_and_a_note_why(demo, make_record, status, reason):
    keep(make_record, "demo", timed("sdpa", QWEN), 0.0, status=status, reason=reason)
    seen = view(MODEL, backends=(FA2, "sdpa"))
    row = by_backend(seen.times)["sdpa"]
    assert row["ran"] == status and row["us"] != row["us"] and seen.comparison.empty
    assert f"sdpa: {status}: {reason}" in seen.notes and EVIL not in seen._repr_html_()
    with pytest.raises(ValueError, match="view must hold a backend that was measured ok"):
        view(MODEL, backends=("sdpa",)).figure()


def test_what_data_says_is_escaped_wherever_it_stands(make_record, monkeypatch, replayed):
    said = {"kernels": ({"name": EVIL, "launches": 1.0, "gpu_us": 1.0},), "kernel_family": EVIL}
    record = make_record(item=timed(EVIL, QWEN), machine={**made.GPU, "gpu": EVIL}, **said)
    shelf = sources.Shelf("demo", record.machine_slug, (record,))
    monkeypatch.setattr("attnlib.lab.view.source_of", lambda *_: shelf)
    page = view(MODEL)._repr_html_()
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 4 and EVIL not in page


def test_a_throttled_record_is_left_out_and_counted(demo, make_record):
    slow = {"round": 3, "state_after": {"throttle_reasons": 0x40}}
    keep(make_record, "demo", timed(FA2, QWEN), 900.0, **slow)
    seen = view(MODEL)
    assert by_backend(seen.times)[FA2]["us"] == 105.0
    assert any(note.startswith("1 records of a throttled GPU") for note in seen.notes)


def test_without_ceilings_there_is_no_share_and_of_one_round_no_interval_and_bytes_are_one(
    make_record, monkeypatch, replayed
):
    publish(monkeypatch, "demo", QWEN, backends=(FA2, FA3))
    for backend in (FA2, FA3):
        keep(make_record, "demo", timed(backend, QWEN), 100.0)
    seen = view(MODEL)
    assert seen.floor_us != seen.floor_us and seen.times.share.isna().all()
    assert "No share of a ceiling: these records hold no ceiling." in seen.notes
    assert seen.comparison.verdict.tolist() == ["ambiguous"] and "one round" in repr(seen)
    keep(make_record, "demo", timed("copy", None, ""), 1000.0, work_per_call=COPY_BYTES)
    seen = view(MODEL)
    assert seen.floor_us == pytest.approx(QWEN.cost.io_bytes / (COPY_BYTES / 1000.0))
    assert "No matmul ceiling on record: the ceiling is that of the bytes." in seen.notes
    assert "matmul" not in seen.facts["ceilings, measured"]


def test_latent_attention_has_the_ceiling_that_binds_it(make_record, monkeypatch, replayed):
    publish(monkeypatch, "latent", LATENT, backends=(made.MLA_FA2, made.DENSE))
    made.keep_ceilings(make_record, "latent")
    for backend, us in ((made.MLA_FA2, 200.0), (made.DENSE, 100.0)):
        keep(make_record, "latent", timed(backend, LATENT, ""), us)
    seen = view("DeepSeek MLA")
    flops_us = LATENT.cost.flops / (made.MATMUL_FLOPS / 1000)
    assert seen.floor_us == pytest.approx(flops_us), "128 heads share what they read"
    assert seen.facts["time at the ceiling"].endswith("by FLOPs")
    assert by_backend(seen.times)[made.DENSE]["us"] == 100.0
    assert seen.comparison.backend.tolist() == [made.DENSE]
    chosen = seen.rules.set_index("library").chooses
    assert chosen["vllm==0.33.0"] == chosen["sglang==0.5.23"] == "flash-attn-3-mla"


def test_another_librarys_backend_is_compared_whatever_flashinfers_release(published_records):
    asked = {"variant": "128 heads, dense, bfloat16", "batch": 64, "records": "sparse_mla"}
    seen = view("DeepSeek MLA", release="0.7.2", **asked)
    frame = store.load("sparse_mla", STUDIES["sparse_mla"].reference_machine)
    mine = frame[frame.id.isin(seen.samples.id)]
    own = {"flash-attn-3-mla": "", "flashinfer-mla-fa3": "0.7.2", "flashmla-dense": ""}
    assert dict(zip(mine.backend, mine.release, strict=True)) == own
    assert {*seen.comparison.backend, *seen.comparison.against} == {*own}


def test_the_call_gives_the_same_view_and_its_card_says_that_records_serve_it(demo):
    seen = view(MODEL, against=FA3)
    again = eval(seen.call, {"attnlib": attnlib})
    assert again.choices == seen.choices and repr(again) == repr(seen)
    page = seen._repr_html_()
    assert "Served from records: study demo, Test GPU 0badcafe, measured 2026-01-02." in page
    assert "<td>318.0</td><td class='words'>fa3</td>" in page
    assert "<th scope='col'>us</th>" in page and "<th scope='col' class='words'>ran</th>" in page


@pytest.mark.parametrize("case", HEADLINE, ids=lambda case: case.key)
def test_the_published_ratios_are_those_of_the_report(frame, case):
    sizes = {"page_size": case.spec.page_size, "batch": case.batch_size, "kv_len": case.kv_len}
    asked = {"release": REGRESSED, "records": "fa3_decode_regression", **sizes}
    seen = view(sources.model_of(case), backends=(FA2, FA3), **asked)
    (found,) = seen.comparison.to_dict("records")
    known = rows.decode_rows(frame[frame.case == case], release=REGRESSED)
    (ratio,) = rows.over(known, FA3, FA2).to_dict("records")
    for value in ("ratio", "low", "rounds"):
        assert found[value] == ratio[value]
    assert by_backend(seen.times)[FA2]["us"] == rows.times(known)[FA2].item()


def test_records_none_of_which_waited_for_a_steady_clock_are_marked(demo, make_record):
    mark = "No GPU is used. No sample waited for a steady clock."
    assert view(MODEL).served.endswith(mark)
    keep(make_record, "demo", timed(FA2, QWEN), 8.0, settle_us=2e5, round=9)
    assert view(MODEL).served.endswith("No GPU is used.")


def test_in_live_mode_the_call_measures_what_is_missing(instant_jobs, monkeypatch):
    made.go_live(monkeypatch)
    seen = view(MODEL, batch=7)
    assert seen.times.rounds.tolist() == [3, 3] and seen.choices.batch == 7
    assert len(instant_jobs.jobs) == 3
    assert eval(seen.call, {"attnlib": attnlib}).served == seen.served
    assert len(instant_jobs.jobs) == 3, "all was on record"


def test_what_only_a_gpu_can_answer_is_refused_with_the_reason(without_gpu):
    with pytest.raises(RuntimeError, match="must be measured on a CUDA GPU: no CUDA GPU is here"):
        view(MODEL, records="live")


def test_the_figure_has_a_dot_a_round_and_names_its_records(demo):
    seen = view(MODEL)
    figure = seen.figure()
    (axis,) = figure.axes
    *dots, floor = (line.get_xdata() for line in axis.lines)
    assert sorted(sum(map(list, dots), [])) == sorted((*demo[FA2], *demo[FA3]))
    assert floor[0] == seen.floor_us
    footer = figure.texts[-1].get_text()
    assert footer.startswith("demo: Test GPU 0badcafe, ") and "\n6 records, " in footer


def test_a_backend_that_was_not_measured_beside_the_others_is_named(make_record, monkeypatch):
    made.go_live(monkeypatch)
    gpu = ThisGpu()
    keep(make_record, sources.STUDY, timed(FA2, QWEN, ""), 100.0)
    seen = look(gpu, narrow(gpu, {"model": MODEL}).choices)
    assert seen.times.ran.tolist() == ["fa2", "not on record"]
    assert f"Not on record for these choices: {FA3}." in seen.notes
