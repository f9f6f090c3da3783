"""Studies: what runs in which order, what is measured again, and whose numbers are shown."""

import itertools
import multiprocessing
import time
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest
from support.records import MACHINE
from support.studies import SPEC, grid_of, hand_made, study_of

from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.form import Item
from attnlib.run import store, study
from attnlib.run.rows import machine_slug
from attnlib.run.study import Study, Sweep, load_or_measure, mode, record_machine
from attnlib.studies import PACE

SMALL = DecodeCase(SPEC, 1, 8)
LARGE = DecodeCase(SPEC, 2, 12, "ragged")
FP8 = DecodeCase(replace(SPEC, kv_dtype="float8_e4m3fn"), 1, 8)
CPU_SLUG = "cpu-test64"
TINY = study_of(grid_of(SMALL, LARGE, FP8, rounds=2))
MIXED = study_of(grid_of(SMALL, headline=True), grid_of(LARGE, rounds=3))


def measure(study, **options):
    return Sweep(**options).measure(study)


def cases_of(*jobs):
    return [[item.case for item in job.items] for job in jobs]


@pytest.mark.slow
def test_a_study_killed_in_the_middle_is_measured_to_its_end_without_repeats_and_replayed(
    data, tmp_path, monkeypatch
):
    progress = Mock()
    sweep = multiprocessing.get_context("fork").Process(target=measure, args=[TINY])
    sweep.start()
    while not any(data.glob("records/*/demo/*.json")):
        assert sweep.is_alive()
        time.sleep(0.01)
    sweep.kill()
    sweep.join()
    left = measure(TINY, progress=progress)
    assert 0 < left < 6
    progress.assert_called_once_with(total=left, unit="item", desc="demo")
    assert sum(call.args[0] for call in progress().update.call_args_list) == left
    progress().close.assert_called_once_with()
    (machine,) = store.machines("demo")
    assert len([*store.measured_path("demo", machine).glob("*.json")]) == 6
    frame = store.load("demo", machine)
    order = list(zip(frame["round"], frame.case, strict=True))
    forth = (SMALL, LARGE, FP8)
    assert order == [*((0, case) for case in forth), *((1, case) for case in forth[::-1])]
    assert frame.status.tolist() == ["ok", "ok", "refused", "refused", "ok", "ok"]
    assert {"python", "torch"} <= set(store.provenance("demo", machine)["versions"])
    assert set(frame.command) == {"python -m attnlib measure demo"}
    assert measure(TINY) == 0
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    monkeypatch.setenv("ATTNLIB_MACHINE", machine)
    assert load_or_measure(TINY)["id"].tolist() == frame["id"].tolist()
    monkeypatch.chdir(tmp_path)
    assert machine_slug(study.describe.__wrapped__("cpu")) == machine, "from any folder"


def test_a_failure_counts_as_measured_unless_it_is_to_be_tried_again(instant_jobs, make_record):
    item = Item("sdpa", "host", SMALL)
    store.keep(make_record(item=item, machine=study.describe("cpu"), status="crashed"))
    assert measure(study_of(grid_of(SMALL))) == 0
    assert measure(study_of(grid_of(SMALL)), retry=True) == 1


def test_other_releases_are_those_of_one_package_in_rounds_forth_and_back():
    of_two = grid_of(SMALL, backends=("sdpa", "flashinfer-fa2"), again=("sdpa", "flashinfer-fa3"))
    study = study_of(of_two, grid_of(LARGE, rounds=6), name="two words")
    chosen = study.over_releases("flashinfer-python", ["0.6.18", "0.6.17"])
    jobs = chosen.jobs(headline=False)
    assert [job.release for job in jobs] == ["0.6.18", "0.6.17", "0.6.17", "0.6.18"] * 2
    assert [(item.backend, item.again) for item in jobs[0].items] == [
        ("flashinfer-fa2", 0),
        ("flashinfer-fa3", 1),
    ]
    assert jobs[0].command == (
        "python -m attnlib measure 'two words' --releases flashinfer-python==0.6.18,0.6.17"
    )
    with pytest.raises(ValueError, match="study 'two words' has no backend of 'sglang'"):
        study.over_releases("sglang", ["0.5.16", "0.5.23"])


def test_what_was_published_counts_as_measured_but_not_by_another_machine(
    instant_jobs, make_record
):
    store.keep(make_record(item=Item("sdpa", "host", SMALL)))
    assert measure(TINY) == 6
    store.publish("demo", CPU_SLUG)
    assert measure(TINY) == 0
    assert measure(TINY, rounds=3) == 3
    assert len(store.load("demo", CPU_SLUG)) == 9


def test_rounds_are_outermost_and_odd_ones_run_backwards():
    releases = ("0.6.3", "0.6.4")
    jobs = study_of(
        grid_of(
            SMALL,
            LARGE,
            releases=releases,
            rounds=2,
        )
    ).jobs(headline=False)
    order = [
        (0, "0.6.3"),
        (0, "0.6.4"),
        (1, "0.6.4"),
        (1, "0.6.3"),
    ]
    assert [(job.round, job.release) for job in jobs] == order
    assert cases_of(*jobs) == [[SMALL, LARGE]] * 2 + [[LARGE, SMALL]] * 2
    assert {item.release for item in jobs[1].items} == {"0.6.4"}


def test_the_command_of_a_job_is_the_studys_own_or_quotes_its_name():
    commands = [
        study_of(grid_of(SMALL), **told).jobs(headline=False)[0].command
        for told in ({"name": "a b"}, {"command": "make a"})
    ]
    assert commands == ["python -m attnlib measure 'a b'", "make a"]


def test_a_grid_is_the_product_of_its_parts_case_by_case():
    grid = grid_of(SMALL, LARGE, backends=("a", "b"), timers=("graph", "eager"))
    expected = list(
        itertools.product(
            (SMALL, LARGE),
            ("a", "b"),
            ("graph", "eager"),
        )
    )
    assert [(i.case, i.backend, i.timer) for i in grid.items()] == expected
    twice = [(i.case, i.backend, i.again) for i in replace(grid, again=("b",)).items()]
    first = [(SMALL, name, 0) for name in "aabb"]
    assert twice[:6] == [*first, (SMALL, "b", 1), (SMALL, "b", 1)]


@pytest.mark.parametrize(
    "grids, options, cases",
    [
        (
            [grid_of(SMALL, LARGE), grid_of(LARGE)],
            {},
            [[SMALL, LARGE]],
        ),
        (
            MIXED.grids,
            {},
            [[SMALL, LARGE], [LARGE], [LARGE]],
        ),
        (MIXED.grids, {"headline": True}, [[SMALL]]),
        (
            MIXED.grids,
            {"rounds": 2},
            [[SMALL, LARGE], [LARGE, SMALL]],
        ),
        (
            [grid_of(SMALL), grid_of(LARGE, FP8, isolated=True)],
            {},
            [[SMALL], [LARGE], [FP8]],
        ),
    ],
    ids=["an item of two grids", "its own rounds", "headline grids", "rounds asked for", "alone"],
)
def test_a_round_has_each_item_of_its_grids_once(grids, options, cases):
    assert cases_of(*study_of(*grids).jobs(**{"headline": False, **options})) == cases


@pytest.mark.parametrize(
    "ceilings",
    [
        ("copy", "matmul"),
        ("read",),
        (),
    ],
)
def test_ceilings_are_measured_in_every_round_unless_the_study_needs_none(ceilings):
    demo = study_of(grid_of(SMALL, releases=("0.6.4",), rounds=2), ceilings=ceilings)
    items = Counter(item for job in demo.jobs(headline=False) for item in job.items)
    expected = {Item(name, "graph"): 2 for name in ceilings}
    assert {item: count for item, count in items.items() if item.case is None} == expected


def test_without_a_gpu_or_rounds_nothing_is_measured(instant_jobs, without_gpu, published_records):
    with pytest.raises(RuntimeError, match="on a CUDA GPU, in about [0-9]+ minutes; none is here"):
        measure(PACE)
    with pytest.raises(ValueError, match="rounds must be >= 1, got 0"):
        measure(replace(TINY, device="cuda"), rounds=0)
    assert instant_jobs.jobs == []


def test_jobs_run_with_the_folder_given_for_their_release(instant_jobs, tmp_path):
    hand_made(tmp_path, "flashinfer-python", "9.9")
    demo = study_of(grid_of(SMALL, backends=("flashinfer-fa2",), releases=("9.9",)))
    measure(demo, overlays={"flashinfer-python==9.9": tmp_path})
    assert instant_jobs.overlays == [tmp_path]


def test_a_release_of_a_backend_that_has_none_is_refused_by_name(instant_jobs):
    with pytest.raises(ValueError, match="sdpa"):
        measure(study_of(grid_of(SMALL, releases=("2.0",))))


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("asked", [None, "auto", "live", "replay", "Live"])
def test_the_mode_is_live_where_there_is_a_gpu_unless_replay_is_asked_for(asked, cuda, monkeypatch):
    monkeypatch.setattr(study, "_has_cuda", lambda: cuda)
    if asked:
        monkeypatch.setenv("ATTNLIB_MODE", asked)
    errors = {"Live": "ATTNLIB_MODE must be one of auto, .*, got 'Live'"}
    if not cuda:
        errors["live"] = "live needs a CUDA GPU"
    if asked in errors:
        with pytest.raises((RuntimeError, ValueError), match=errors[asked]):
            mode()
    else:
        assert mode() == ("live" if cuda and asked != "replay" else "replay")


def test_replay_takes_the_studys_machine_unless_another_is_named_and_live_this_one(
    without_gpu, instant_jobs, monkeypatch
):
    published = replace(TINY, reference_machine="nvidia-h200-1a2b3c4d")
    assert record_machine(published) == "nvidia-h200-1a2b3c4d"
    monkeypatch.setenv("ATTNLIB_MACHINE", "another-gpu")
    assert record_machine(published) == "another-gpu"
    monkeypatch.setattr(study, "_has_cuda", lambda: True)
    assert record_machine(published) == CPU_SLUG


def test_live_a_study_of_which_nothing_ran_says_why(instant_jobs, make_record, monkeypatch):
    monkeypatch.setattr(study, "_has_cuda", lambda: True)
    told = {"machine": study.describe("cpu"), "status": "refused", "reason": "pip install fa9"}
    store.keep(make_record(item=Item("sdpa", "host", SMALL), **told))
    with pytest.warns(UserWarning, match="^no case of demo could run here: pip install fa9$"):
        assert len(load_or_measure(study_of(grid_of(SMALL, headline=True)))) == 1
    both = load_or_measure(study_of(grid_of(SMALL, LARGE, headline=True)))
    assert set(both.status) == {"refused", "ok"}


def test_a_study_without_a_machine_lists_those_that_have_it(without_gpu, make_record):
    with pytest.raises(ValueError, match="'demo' has no published records: measure it on a GPU"):
        load_or_measure(TINY)
    store.keep(make_record())
    with pytest.raises(ValueError, match="set ATTNLIB_MACHINE to one of: test-gpu-0badcafe"):
        load_or_measure(TINY)


def test_live_measures_headline_cases_and_shows_all_that_is_on_record_and_replay_never_measures(
    instant_jobs, monkeypatch
):
    monkeypatch.setattr(study, "_has_cuda", lambda: True)
    assert load_or_measure(MIXED)["kv_len"].tolist() == [SMALL.kv_len]
    measure(MIXED)
    assert len(load_or_measure(MIXED)) == 1 + 3
    instant_jobs.jobs.clear()
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    with pytest.raises(FileNotFoundError, match="no records of study 'demo' on 'somewhere'"):
        load_or_measure(replace(MIXED, reference_machine="somewhere"))
    assert instant_jobs.jobs == []


def test_a_case_is_found_by_its_text_and_an_unknown_one_names_near_ones():
    assert TINY.cases == study_of(grid_of(SMALL, LARGE), grid_of(LARGE, FP8)).cases
    for case in TINY.cases:
        assert TINY.case_named(case.label) == case
    words = (
        r"case must be one of study 'demo', got '4/2' \(a call must be words .*\); near: heads=4/2"
    )
    with pytest.raises(ValueError, match=words):
        TINY.case_named("4/2")
    words = "case must be one of study 'demo', got 'heads=8/2 lens=8'; near: heads="
    with pytest.raises(ValueError, match=words):
        TINY.case_named("heads=8/2 lens=8")


def test_a_text_without_a_seed_has_seed_0():
    seeded = replace(SMALL, lengths="ragged", seed=3)
    study = study_of(grid_of(seeded))
    assert study.case_named(seeded.label) == seeded
    with pytest.raises(ValueError, match="case must be one of study"):
        study.case_named(replace(seeded, seed=0).label)


def test_a_retired_study_is_read_and_says_what_to_do_in_place_of_measuring(
    instant_jobs, make_record, monkeypatch
):
    retired = Study("demo", "?", reference_machine=MACHINE, retired="look at its records")
    store.keep(make_record())
    words = "study 'demo' cannot be measured any more: look at its records"
    with pytest.raises(ValueError, match=words):
        measure(retired)
    with pytest.raises(ValueError, match=words):
        retired.case_named("4/2")
    monkeypatch.setattr(study, "_has_cuda", lambda: True)
    with pytest.raises(ValueError, match=words):
        load_or_measure(retired)
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    assert len(load_or_measure(retired)) == 1 and instant_jobs.jobs == []
