"""The view: its numbers are those of the records, its words are escaped, its call repeats it."""

from dataclasses import replace

import pytest
from support import explorer_records as made
from support.explorer_records import COPY_BYTES, FA2, FA3, LATENT, QWEN, keep, publish, timed

import attnlib
from attnlib.core.backends.table import TABLE, entry_of, library_of
from attnlib.lab import source
from attnlib.lab.known_calls import ASKED, known_at
from attnlib.lab.source import (
    EXPLORER,
    OFFERED_MODELS,
    choose,
    find_case,
    measure_missing,
    sources_of,
)
from attnlib.lab.view import OVER_CEILING, View, view
from attnlib.measure.calls.cases import read_case
from attnlib.measure.stats import judge_ratios
from attnlib.run import store
from attnlib.select.known import PROBLEMS, in_brief
from attnlib.studies.fa3_decode_regression import H100_MACHINE, STUDY

MODEL = "Qwen3-0.6B"
LLAMA = "Llama-3.1-8B"
EVIL = "<img src=x onerror=alert(1)>"
TIMES = {FA2: (100.0, 110.0, 105.0), FA3: (300.0, 330.0, 318.0)}


@pytest.fixture
def demo(make_record, monkeypatch, replayed):
    """A study of Qwen3-0.6B: three rounds of fa2 and fa3 of one case, `TIMES`, with ceilings."""
    publish(monkeypatch, "demo", QWEN, backends=(FA2, FA3))
    made.keep_ceilings(make_record, "demo")
    for backend, times in TIMES.items():
        for round_, us in enumerate(times):
            family = {"kernel_family": backend[-3:], "round": round_}
            keep(make_record, "demo", timed(backend, QWEN), us, **family)
    return TIMES


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
    assert kernels == [[1.0, 8.25, "AttendKernel"], [2.0, 1.5, "MergeKernel"]]


def test_a_ratio_pairs_rounds_and_has_the_verdict_of_the_statistics(demo):
    (row,) = view(MODEL).comparison.to_dict("records")
    (judged,) = judge_ratios([(demo[FA3], demo[FA2])])
    assert row == {"backend": FA3, "against": FA2, **vars(judged)}
    assert view(MODEL).comparison.ratio.dtype == float, "a table of it can be rounded"
    assert row["verdict"] == "slower"
    assert row["rounds"] == 3
    (row,) = view(MODEL, against=FA3).comparison.to_dict("records")
    assert row["backend"] == FA2
    assert row["verdict"] == "faster"


@pytest.mark.parametrize(
    "status, reason",
    [("incorrect", "row error 3 over budget 0.01"), ("crashed", f"signal SIGKILL; {EVIL}")],
)
def test_a_failure_is_a_word_in_its_row_and_a_note_why(demo, make_record, status, reason):
    keep(
        make_record,
        "demo",
        timed("sdpa", QWEN, ""),
        0.0,
        status=status,
        reason=reason,
    )
    seen = view(MODEL, backends=(FA2, "sdpa"))
    row = by_backend(seen.times)["sdpa"]
    assert row["ran"] == status
    assert row["us"] != row["us"]
    assert seen.comparison.empty
    assert f"sdpa: {status}: {reason}" in seen.notes and EVIL not in seen._repr_html_()
    with pytest.raises(ValueError, match="view must hold a backend that was measured ok"):
        view(MODEL, backends=("sdpa",)).figure()


def test_a_throttled_record_is_left_out_and_counted(demo, make_record):
    slow = {"round": 3, "state_after": {"throttle_reasons": 0x40}}
    keep(make_record, "demo", timed(FA2, QWEN), 900.0, **slow)
    seen = view(MODEL)
    assert by_backend(seen.times)[FA2]["us"] == 105.0
    assert any(note.startswith("1 records of a throttled GPU") for note in seen.notes)


def test_a_share_above_all_of_the_ceiling_is_explained(published_records):
    how = {"machine": "h200", "records": "fa3_decode_regression"}
    for kv_len, is_said in ((131072, True), (8192, False)):
        seen = attnlib.view(f"heads=32/8 head_dim=128 page=16 lens={kv_len}x16", **how)
        assert (seen.times.share.max() > 1) == is_said
        assert (OVER_CEILING in seen.notes) == is_said


def test_without_ceilings_there_is_no_share_and_of_one_round_no_interval(
    make_record, monkeypatch, replayed
):
    publish(monkeypatch, "demo", QWEN, backends=(FA2, FA3))
    for backend in (FA2, FA3):
        keep(make_record, "demo", timed(backend, QWEN), 100.0)
    seen = view(MODEL)
    assert seen.floor_us != seen.floor_us
    assert seen.times.share.isna().all()
    assert any(note.startswith("No share of a ceiling") for note in seen.notes)
    assert "share" not in seen.card().table and "share" not in seen.card().footer
    assert seen.comparison.verdict.tolist() == ["inconclusive"]
    assert "one round" in repr(seen)


def test_latent_attention_has_the_ceiling_that_binds_it(make_record, monkeypatch, replayed):
    publish(monkeypatch, "latent", LATENT, backends=(made.MLA_FA2, made.DENSE))
    made.keep_ceilings(make_record, "latent")
    for backend, us in ((made.MLA_FA2, 200.0), (made.DENSE, 100.0)):
        keep(make_record, "latent", timed(backend, LATENT, ""), us)
    seen = view("DeepSeek MLA")
    flops_us = LATENT.cost.flops / (made.MATMUL_FLOPS / 1000)
    assert seen.floor_us == pytest.approx(flops_us), "128 heads share what they read"
    assert seen.facts["time at the ceiling"].endswith("by FLOPs")
    assert seen.choice.arguments["variant"] == "heads=128/1"


def test_libraries_without_releases_belong_to_the_view_of_each_release(published_records):
    asked = {"variant": "heads=128/1", "batch": 64, "records": "sparse_mla"}
    seen = view("DeepSeek MLA", release="0.7.2", **asked)
    releases = dict(zip(seen.good.backend, seen.good.release, strict=True))
    assert releases == {"flash-attn-3-mla": "", "flashinfer-mla-fa3": "0.7.2", "flashmla-dense": ""}


def test_the_call_gives_the_same_view_and_table_and_figure_name_the_release(demo):
    seen = view(MODEL, against=FA3)
    again = eval(seen.choice.call, {"attnlib": attnlib})
    assert again.choice.arguments == seen.choice.arguments
    assert repr(again) == repr(seen)
    page = seen._repr_html_()
    assert "Records of study demo: Test GPU 0badcafe, FlashInfer 0.6.3, measured 2026-01-02" in page
    assert "<td>318.0</td><td class='words'>fa3</td>" in page
    assert seen.figure().get_suptitle().startswith(f"{MODEL}, FlashInfer 0.6.3, Test GPU\n")
    assert "FlashInfer 0.6.3" in seen.image()


def test_the_figure_has_a_dot_a_round_and_names_its_records(demo):
    seen = view(MODEL)
    figure = seen.figure()
    (axis,) = figure.axes
    dots = [x for dots in axis.collections for x, _ in dots.get_offsets()]
    assert sorted(dots) == sorted((*demo[FA2], *demo[FA3]))
    assert axis.lines[0].get_xdata()[0] == seen.floor_us
    footer = figure.texts[-1].get_text()
    assert footer.startswith("demo: Test GPU 0badcafe, ") and "\n6 records, " in footer


@pytest.mark.slow
@pytest.mark.parametrize("model", OFFERED_MODELS)
def test_every_model_and_source_on_record_and_every_backend_of_it_can_be_shown(
    published_records, model
):
    for pair in sources_of(model):
        choice = find_case(model, *pair)
        seen = View(choice)
        assert not choice.notes and len(choice.rows) and repr(seen)
        assert choice.rows.case.nunique() == 1
        library = "sglang-kernel" if pair[0] == "split_cap" else "FlashInfer"
        assert f", {library} " in seen.where
    for name in choice.options["against"]:
        assert repr(View(choose(choice.source, model, {"backends": [name]})))
    assert repr(View(choose(choice.source, model, {"against": name})))


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"records": "fa2_plan"}, "records must be one of live, .*got 'fa2_plan'"),
        ({"machine": "b200"}, "machine must be one of .*nvidia-h100-80gb-hbm3.*got 'b200'"),
        ({"machine": "h100", "records": "live"}, "machine must be left out with records='live'"),
        (
            {"records": "random_batches", "batch": 64},
            "batch must be one of .* choices before it, got 64",
        ),
        ({"release": "0.6.2"}, "release must be one of .*'0.6.3', .*got '0.6.2'"),
        ({"rounds": 3}, "rounds must be left out: records show all of theirs, got 3"),
        ({"backends": FA2}, "backends must be a list of names, got 'flashinfer-fa2'"),
        ({"backends": []}, "backends must name one at least, got none"),
        ({"heads": 8}, "heads must be text, got 8"),
        ({"head_dim": 64}, "no records on heads=8/1 head_dim=64 .*head_dim 128: .*5/1"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_error_that_says_what_can(published_records, asked, words):
    with pytest.raises(ValueError, match=words):
        view("Llama-3.1-70B at TP 8", **asked)
    with pytest.raises(ValueError, match="tp, heads and head_dim must be left out with DeepSeek"):
        view("DeepSeek MLA", tp=8)


def test_the_newest_release_of_the_asked_case_on_any_machine_of_that_name(
    published_records, monkeypatch
):
    for asked in ({"heads": "8/1"}, {"model": "Llama-3.1-70B", "tp": 8}):
        assert view(**asked, batch=64).choice.arguments["release"] == "0.7.2.post1"
    other = view("Qwen2.5-72B", tp=8, batch=64)
    assert other.where == "Qwen2.5-72B at TP 8, FlashInfer 0.7.2.post1, NVIDIA H200"
    monkeypatch.setenv("ATTNLIB_MACHINE", "h100")
    assert view(**asked).gpu == "NVIDIA H100 80GB HBM3"
    monkeypatch.setenv("ATTNLIB_MACHINE", "b200")
    with pytest.raises(ValueError, match="ATTNLIB_MACHINE must be one of .*got 'b200'"):
        view(**asked)


def test_the_first_study_answers_of_its_reference_machine_or_of_the_one_that_is_named(
    published_records, monkeypatch
):
    source = find_case(LLAMA).source
    assert source.records == STUDY.name
    assert source.machine == STUDY.reference_machine
    assert find_case(LLAMA, STUDY.name, H100_MACHINE).source.machine == H100_MACHINE
    monkeypatch.setenv("ATTNLIB_MACHINE", H100_MACHINE)
    assert find_case(LLAMA).source.machine == H100_MACHINE


def test_the_newest_release_is_usual_and_releases_are_in_the_order_of_versions(demo, make_record):
    for release in ("0.6.10", "0.6.9"):
        keep(make_record, "demo", timed(FA2, QWEN, release), 100.0)
    keep(
        make_record,
        "demo",
        timed(FA2, replace(QWEN, seed=5, batch_size=2)),
        100.0,
    )
    choice = view(MODEL).choice
    assert choice.options["release"] == ["0.6.3", "0.6.9", "0.6.10"]
    assert choice.arguments["release"] == "0.6.10"
    assert choice.options["batch"] == [QWEN.batch_size], "a seeded case is no choice"
    keep(make_record, "demo", timed(FA2, replace(QWEN, batch_size=4), "0.6.9"), 100.0)
    assert view(MODEL, batch=4).choice.arguments["release"] == "0.6.9", "the newest that has it"


def test_options_are_of_the_choices_before_them_and_another_wish_is_refused(demo, make_record):
    keep(
        make_record,
        "demo",
        timed(FA2, replace(QWEN, batch_size=4, kv_len=4096)),
        100.0,
    )
    choice = view(MODEL, batch=4).choice
    assert choice.options["kv_len"] == [4096]
    assert choice.arguments["backends"] == [FA2]
    assert view(MODEL).choice.case == QWEN, "the size nearest to the preferred one"
    for wish, words in (
        ({"batch": 7}, "batch must be one of 4, 16 with the choices before it, got 7"),
        ({"backends": (FA2, "sdpa")}, f"backends must be one of '{FA2}', '{FA3}'.*got 'sdpa'"),
        ({"against": "sdpa"}, "against must be one of .*got 'sdpa'"),
    ):
        with pytest.raises(ValueError, match=words):
            view(MODEL, **wish)


def test_a_library_that_goes_along_with_every_release_may_alone_have_the_wish(demo, make_record):
    keep(make_record, "demo", timed("sdpa", replace(QWEN, batch_size=4), ""), 100.0)
    for wishes in ({"batch": 4}, {"batch": 4, "release": "0.6.3"}):
        seen = view(MODEL, **wishes)
        assert seen.backends == ["sdpa"]
        assert seen.choice.arguments["release"] == "0.6.3"
    assert view(MODEL).choice.case == QWEN


def test_what_only_a_gpu_can_answer_is_refused_with_the_reason(without_gpu, monkeypatch):
    told = (
        ("live", False, "live needs a CUDA GPU"),
        ("replay", False, "no CUDA GPU is here"),
        ("auto", False, "no CUDA GPU is here"),
        ("replay", True, "ATTNLIB_MODE=replay asks for records"),
    )
    for mode, driver, reason in told:
        monkeypatch.setattr(source, "has_driver", lambda driver=driver: driver)
        monkeypatch.setenv("ATTNLIB_MODE", mode)
        with pytest.raises(
            RuntimeError, match=f"^{MODEL} must be measured on a CUDA GPU: .*{reason}"
        ):
            view(MODEL, records="live")
    with pytest.raises(RuntimeError, match="measured by its study alone, sparse_mla"):
        view("DeepSeek MLA", records="live")


def test_in_live_mode_the_call_measures_what_is_missing(instant_jobs, monkeypatch):
    made.go_live(monkeypatch)
    seen = view(MODEL, batch=7)
    assert seen.times.rounds.tolist() == [3, 3]
    assert seen.choice.arguments["batch"] == 7
    names = [[item.backend for item in job.items] for job in instant_jobs.jobs]
    forth = ["copy", "matmul", FA2, FA3]
    assert names == [forth, forth[::-1], forth], "a round is a process, odd ones in reverse"
    assert eval(seen.choice.call, {"attnlib": attnlib}).served == seen.served
    assert len(instant_jobs.jobs) == 3, "all was on record"
    view(MODEL, batch=7, backends=(FA2, FA3, "sdpa"), rounds=1)
    assert [job.round for job in instant_jobs.jobs[3:]] == [3], "no round is filled up later"


def test_a_named_release_is_measured_of_flashinfer_alone(monkeypatch):
    made.go_live(monkeypatch, device="cpu")
    asked = {
        "release": "0.6.3",
        "backends": (FA2, "sdpa", "sglang-flash-attn-3"),
        "rounds": 1,
    }
    choice = find_case(LLAMA, "live", wishes=asked)
    jobs = []
    monkeypatch.setattr("attnlib.run.study.Sweep.run", lambda sweep, found: jobs.extend(found) or 0)
    measure_missing(choice)
    (job,) = jobs
    assert job.study == EXPLORER and job.release == "0.6.3"
    releases = {item.backend: item.release for item in job.items[2:]}
    assert releases == {"sdpa": "", FA2: "0.6.3", "sglang-flash-attn-3": ""}
    assert {item.case for item in job.items[2:]} == {choice.case}
    assert store.find(EXPLORER, made.MACHINE).empty


SPLIT_CAP = {"records": "split_cap", "machine": "47067cab"}


def test_a_release_is_of_the_library_that_the_study_compares(published_records):
    seen = view(heads="8/1", **SPLIT_CAP)
    assert ", sglang-kernel 0.4.10, NVIDIA H100" in seen.where
    assert "FlashInfer" not in repr(seen)
    assert seen.choice.arguments["against"] == "sglang-flash-attn-3"
    (row,) = [row for row in seen.comparison.itertuples() if row.backend.endswith("@bounded")]
    assert row.against == "sglang-flash-attn-3"
    old = view("DeepSeek MLA", release="0.4.5", **SPLIT_CAP)
    assert "sglang-flash-attn-3-mla" in old.backends, "not only what goes along with any release"
    pages = view("DeepSeek MLA", page_size=64, **SPLIT_CAP)
    assert "flashinfer-mla-fa3" in pages.backends, "FlashInfer is not what is compared"


def test_the_width_of_the_page_table_tells_calls_apart_and_lengths_are_in_few_words(
    published_records,
):
    seen = view(heads="8/1", **SPLIT_CAP)
    variant = seen.choice.arguments["variant"]
    assert variant == f"dtype=bfloat16 context={seen.choice.case.context}"
    title = seen.card().title
    assert title.endswith("context=131072") and len(title) < 200
    assert eval(seen.choice.call, {"attnlib": attnlib}).choice.case == seen.choice.case
    words = r"^lengths must be one of .*requests.*got 'chat'$"
    with pytest.raises(ValueError, match=words) as error:
        view(heads="8/1", page_size=1, lengths="chat", **SPLIT_CAP)
    assert len(str(error.value)) < 2000
    verify = view("DeepSeek MLA", variant=variant_with_queries(), **SPLIT_CAP)
    assert verify.choice.case.q_len == 4


def variant_with_queries():
    """The variant of a call with several query tokens."""
    options = view("DeepSeek MLA", **SPLIT_CAP).choice.options["variant"]
    return next(option for option in options if "q_len=4" in option)


def test_a_known_problem_of_a_backend_and_release_is_a_note_and_others_are_silent(
    published_records,
):
    auto = "flashinfer-fa3-decode-auto"
    slow = view(LLAMA, release="0.6.3")
    (note,) = [note for note in slow.card().notes if auto in note]
    (answer,) = slow.known["flashinfer-auto"]
    assert note == f"flashinfer-graph-auto, flashinfer-auto: {in_brief(answer)}"
    assert PROBLEMS[auto].do in note
    assert slow.known[FA2] == []
    mended = view(LLAMA, release="0.6.4")
    assert auto not in repr(mended)
    assert mended.known["flashinfer-auto"] == []
    assert [answer.problem.id for answer in mended.known[FA3]] == ["flashinfer-fa3-decode-by-name"]


def test_a_backend_without_a_release_or_on_an_unknown_card_has_no_known_problem(demo):
    assert view(MODEL).known == {FA2: [], FA3: []}, "of a Test GPU no rule knows"
    how = {"gpu": "NVIDIA H200", "timer": "graph", "kernel": "fa3"}
    asked = {
        "flashinfer-fa3": ["flashinfer-fa3-decode-by-name"],
        "flashinfer-fa2-planned": [],
        "flash-attn-3": [],
    }
    for backend, ids in asked.items():
        found = known_at(QWEN, backend, release="0.7.2", **how)
        assert [answer.problem.id for answer in found] == ids
    assert known_at(QWEN, FA3, release="", **how) == []
    may_hold = {**how, "kernel": ""}
    assert known_at(QWEN, "flashinfer-auto", release="0.6.3", **may_hold) == []


def test_the_cap_of_splits_is_known_where_it_takes_splits_from_a_recorded_call():
    how = {"release": "0.4.10", "gpu": "NVIDIA H100 80GB HBM3", "timer": "graph"}
    skewed = read_case("heads=32/8 head_dim=128 page=1 lens=131072,1024x127")
    even = read_case("heads=32/8 head_dim=128 page=1 lens=1024x128")
    name = "sglang-flash-attn-3"
    found = known_at(skewed, name, **how)
    assert [answer.problem.id for answer in found] == ["sglang-fa3-split-cap-gqa"]
    assert known_at(even, name, **how) == []
    assert known_at(skewed, f"{name}@bounded", **how) == [], "it is the mend"


def test_a_backend_that_came_with_the_machine_has_the_release_that_its_study_saw(published_records):
    places = [(study, machine) for study, machine in sources_of(LLAMA) if study == "engine_modes"]
    assert places
    seen = View(find_case(LLAMA, *places[-1]))
    assert not seen.good.release.any()
    for name in {*seen.good.backend} & {*ASKED}:
        distribution = entry_of(name).distribution
        versions = store.provenance(*places[-1])["versions"][distribution]
        assert seen._release_seen(name) == versions[0]


def test_every_backend_of_a_library_is_asked_about_but_those_that_we_mend():
    ours = {name for name in TABLE if name.endswith(("-planned", "-uniform"))}
    alone = {name for name in TABLE if library_of(name) in ("sdpa", "flash-attn-3", "flashmla")}
    by_mode = {"flashinfer-batch-attention-extend"}
    assert {*ASKED} == {*TABLE} - ours - alone - by_mode
