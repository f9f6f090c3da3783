"""The version bisect: the search, the rounds of a step, and what is told when it cannot be done."""

import itertools
import json
import math
import shlex
from dataclasses import replace
from unittest.mock import Mock

import pytest
from support import lab as support_lab
from support.lab import SLUG
from support.studies import hand_made

from attnlib import cli
from attnlib.core.spec import AttnSpec
from attnlib.lab.bisect import ROUND_LIMIT, bisect, first_changed
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.run import releases, store
from attnlib.run import study as studying
from attnlib.run.pairs import SPARE_ROUNDS
from attnlib.run.schema import STATUSES
from attnlib.run.study import Grid, Study
from attnlib.studies import STUDIES
from attnlib.studies.metadata import context_width

PACKAGE = "flashinfer-python"
CASE = DecodeCase(AttnSpec(8, 2, 64, 16), 3, 40)
OTHER = replace(CASE, kv_len=41)
GRID = Grid((CASE, OTHER), ("flashinfer-auto",))
DEMO = Study("demo", "?", (GRID,), reference_machine=SLUG, ceilings=())
EACH = ["0.5.3", "0.6.0", "0.6.1", "0.6.2", "0.6.3", "0.6.4", "0.7.2", "0.7.2.post1"]
SLOW = {"0.6.0", "0.6.1", "0.6.2", "0.6.3"}


class Lab(support_lab.Lab):
    """Its jobs have one item each."""

    def order(self):
        """Round and release of each job since this was asked last."""
        jobs = super().order()
        assert {count for *_, count in jobs} <= {1}
        return [job[:2] for job in jobs]


@pytest.fixture
def lab(make_record, monkeypatch):
    """A machine with a GPU that measures at once, and an index with the releases of `EACH`."""

    def runs(name):
        return (40.0, "fa3") if name in SLOW else (10.0, "fa2")

    found = Lab(make_record, runs)
    monkeypatch.setitem(STUDIES, "demo", DEMO)
    found.stand_in(monkeypatch)
    monkeypatch.setattr(releases, "index_releases", lambda package: EACH)
    monkeypatch.setattr(releases, "installed_version", lambda package: "")
    return found


ASKED = {"package": PACKAGE, "good": "0.5.3", "bad": "0.6.3"}


def run(**options):
    return bisect(DEMO, CASE, **ASKED | options)


def command(**options):
    asked = ASKED | {"study": "demo", "case": CASE.key} | options
    return ["bisect", *itertools.chain(*((f"--{name}", value) for name, value in asked.items()))]


@pytest.mark.parametrize("count", range(2, 18))
def test_the_search_finds_every_position_in_logarithmically_many_steps(count):
    names = [str(number) for number in range(count)]
    for change in names[1:]:
        differs = Mock(side_effect=(lambda name, change=change: int(name) >= int(change)))
        assert first_changed(names, differs) == change
        asked = [call.args for call in differs.call_args_list]
        assert len(asked) == len(set(asked))
        assert len(asked) <= 2 + math.ceil(math.log2(count - 1))


@pytest.mark.parametrize(
    "good, steps, word, family, ratio",
    [
        ("0.5.3", ["0.6.3", "0.6.1", "0.6.0"], "slower", "fa3", 4.0),
        ("0.7.2.post1", ["0.7.2.post1", "0.6.4"], "faster", "fa2", 0.25),
    ],
)
def test_the_first_slower_or_faster_release_is_found_with_its_steps_and_again_in_replay(
    lab, monkeypatch, good, steps, word, family, ratio
):
    found = run(good=good)
    first, last = sorted(map(EACH.index, (good, "0.6.3")))
    assert found.releases == tuple(EACH[first : last + 1])
    assert found.machine == SLUG
    assert found.good == good
    assert found.bad == "0.6.3"
    assert found.changed == steps[-1]
    assert found.word == word
    assert [step.release for step in found.steps] == steps
    (other,) = {"fa2", "fa3"} - {family}
    for step in found.steps:
        assert step.verdict.verdict == word
        assert step.verdict.rounds == 3
        assert step.verdict.ratio == pytest.approx(ratio)
        assert step.kernel_family == family
        assert step.reference_family == other
    lab.order()
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    monkeypatch.setattr(releases, "index_releases", lambda package: pytest.fail("index asked"))
    assert run(good=good) == found
    assert lab.order() == []
    assert f" --releases {','.join(found.releases)}" in found.command


def test_rounds_run_a_b_b_a_numbered_on_through_the_steps_and_none_is_measured_again(lab):
    found = run(bad="0.6.1", rounds=3)
    good = "0.5.3"
    assert all(len(job.items) == 1 and job.study == "bisect_demo" for job in lab.jobs)
    first = [
        (0, good),
        (0, "0.6.1"),
        (1, "0.6.1"),
        (1, good),
        (2, good),
        (2, "0.6.1"),
    ]
    assert lab.order() == [
        *first,
        (3, "0.6.0"),
        (3, good),
        (4, good),
        (4, "0.6.0"),
        (5, "0.6.0"),
        (5, good),
    ]
    assert run(bad="0.6.1", rounds=3) == found
    assert lab.order() == []


def test_rounds_cut_short_or_of_another_search_do_not_count_for_a_pair(lab):
    run(bad="0.6.0", rounds=3)
    lab.keep("bisect_demo", 3)
    folder = store.measured_path("bisect_demo", SLUG)
    (folder / "0.json.1.unfinished").write_text('{"half a rec')  # killed as it wrote the fourth
    assert run(bad="0.6.0", rounds=3).steps[0].verdict.rounds == 3
    assert lab.order() == [(2, "0.5.3"), (2, "0.6.0"), (3, "0.6.0"), (3, "0.5.3")]
    assert run(good="0.6.4", bad="0.6.3").changed == "0.6.4"
    numbers = [number for number, _ in lab.order()]
    assert numbers == [4, 4, 5, 5, 6, 6]


@pytest.mark.parametrize(
    "rounds, most",
    [
        (1, ROUND_LIMIT),
        (3, ROUND_LIMIT),
        (20, 20),
    ],
)
def test_a_step_that_stays_inconclusive_fails_and_names_the_release(lab, rounds, most):
    lab.us, lab.noise = (
        {"0.6.1": 15.0},
        {
            "0.6.1": (0.4, 1.0),
            "0.5.3": (1.0,),
            "0.6.3": (1.0,),
        },
    )
    words = rf"release 0\.6\.1 must get .*inconclusive after {most} rounds"
    with pytest.raises(RuntimeError, match=words):
        run(rounds=rounds)
    assert sum(release == "0.6.1" for _, release in lab.order()) == most


@pytest.mark.parametrize(
    "hot_rounds",
    [
        {0},
        {0, 1, 2},
        {1, 3},
    ],
)
def test_rounds_that_are_throttled_are_measured_again(lab, hot_rounds):
    lab.is_hot = lambda item, number: number in hot_rounds
    (step,) = run(bad="0.6.0").steps
    assert step.verdict.verdict == "slower"
    assert step.verdict.rounds == 3
    assert max(round_ for round_, _ in lab.order()) == 2 + len(hot_rounds)
    lab.is_hot = lambda item, number: True
    words = f"3 rounds that are not throttled, it has 0, after {3 + SPARE_ROUNDS} more"
    with pytest.raises(RuntimeError, match=words):
        run(bad="0.6.1")


@pytest.mark.parametrize(
    "good, bad, words",
    [
        ("0.5.3", "0.7.2", r"0\.7\.2 must be slower than 0\.5\.3, it is same after 3 rounds"),
        ("0.7.2", "0.5.3", r"0\.7\.2 must be faster than 0\.5\.3, it is same"),
        ("0.6.3", "0.7.2", r"0\.7\.2 must be slower than 0\.6\.3, it is faster"),
    ],
)
def test_ends_that_do_not_differ_as_asked_stop_the_search(lab, good, bad, words):
    with pytest.raises(ValueError, match=words):
        run(good=good, bad=bad)
    assert len(lab.jobs) == 6


def test_a_release_that_fails_stops_the_search_in_one_line_and_is_tried_again(lab):
    for status in set(STATUSES) - {"ok"}:
        lab.failing = {"0.6.1": status}
        with pytest.raises(
            RuntimeError, match=f"^release 0.6.1 must run, it was {status}: no luck$"
        ):
            run()
    lab.failing = {}
    assert run().changed == "0.6.0"


@pytest.fixture
def replay(lab, monkeypatch):
    """The records of both searches, in replay mode."""
    run()
    run(good="0.7.2.post1")
    monkeypatch.setenv("ATTNLIB_MODE", "replay")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"bad": "0.6.9"}, r"release 0\.6\.9 must be on record to be replayed, .*are: 0\.5\.3"),
        ({"bad": "0.7.2"}, r"release 0\.5\.3 to 0\.7\.2 must be on record"),
        ({"backend": "flashinfer-fa2"}, "no bisection of .* is on record of this case and fl"),
        ({"bad": "0.6.2"}, r"release 0\.6\.2 must have 3 rounds against 0\.5\.3 .* it has 0"),
        ({"rounds": 4}, r"release 0\.6\.3 must have 4 rounds against 0\.5\.3 .* it has 3"),
        ({"releases": ["0.5.3", "0.6.2", "0.6.3"]}, r"release 0\.6\.2 must have 3 rounds"),
    ],
)
def test_replay_says_which_release_is_not_on_record(replay, options, words):
    with pytest.raises(FileNotFoundError, match=words):
        run(**options)


def test_a_backend_that_fits_no_release_is_refused_with_those_of_the_case():
    study = STUDIES["split_cap"]
    case = next(case for case in study.cases if case.label.startswith("mode=mla heads=128/1"))
    ends = {"package": "sglang-kernel", "good": "0.4.9", "bad": "0.4.10"}
    with pytest.raises(ValueError, match="backend for sglang-kernel must be") as refused:
        bisect(study, case, **ends)
    told = str(refused.value)
    assert "sglang-flash-attn-3-mla" in told and "extend" not in told


def test_what_is_not_on_record_has_the_status_of_what_is_not_decided(capsys):
    call = "heads=32/8 head_dim=128 page=16 lens=8192x16"
    asked = ["--package", "flashinfer-python", "--good", "0.5.3", "--bad", "0.6.3"]
    assert cli.main(["bisect", *asked, "--study", "suite", "--case", call]) == cli.UNDECIDED
    assert "no bisection of suite is on record of this case" in capsys.readouterr().err


def test_pre_releases_are_searched_if_they_are_given(lab):
    listed = [*EACH, "0.6.1rc1", "0.6.0rc2"]
    lab.us = {"0.6.1rc1": 40.0, "0.6.0rc2": 40.0}
    found = run(bad="0.6.1rc1", releases=listed)
    assert found.changed == "0.6.0rc2"
    assert found.releases[1:] == ("0.6.0rc2", "0.6.0", "0.6.1rc1")


def test_the_command_prints_steps_answer_and_how_to_repeat_it(lab, capsys):
    assert cli.main(command()) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "first slower release: 0.6.0"
    assert "against 0.5.3 (fa2)" in lines[1]
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == "release kernel slowdown 95 % CI verdict rounds".split()
    assert [[*row.split()[:3], *row.split()[-2:]] for row in table[1:]] == [
        [release, "fa3", "4.00", "slower", "3"] for release in ("0.6.3", "0.6.1", "0.6.0")
    ]
    assert repr(run()) == printed.rstrip()
    assert cli.main([*command(), "--details"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith(printed)
    again = whole.partition("repeat with:\n")[2].replace("\\\n", "")
    assert shlex.split(again) == shlex.split(run().command)
    assert cli.main(shlex.split(again)[3:]) == 0
    assert capsys.readouterr().out == printed


def test_the_command_takes_the_label_of_a_case_and_prints_json(lab, capsys):
    assert cli.main([*command(case=CASE.label), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changed"] == "0.6.0"
    assert found["word"] == "slower"
    assert found["case"] == CASE.key
    step = found["steps"][0]
    assert step.pop("low") <= step.pop("ratio") <= step.pop("high")
    said = {"release": "0.6.3", "ran": "fa3", "reference_ran": "fa2"}
    assert step == said | {"verdict": "slower", "rounds": 3}


def test_overlays_given_are_searched_used_and_repeated(lab, tmp_path, monkeypatch, capsys):
    given = []
    for release in ("0.5.3", "0.6.1", "0.6.3", "0.7.2"):
        folder = hand_made(tmp_path / release, PACKAGE, release)
        given += ["--overlay", f"{PACKAGE}=={release}={folder}"]
    overlay_for = Mock(return_value=None)
    monkeypatch.setattr(studying, "overlay_for", overlay_for)
    assert cli.main([*command(), *given, "--details"]) == 0
    out = capsys.readouterr().out.replace(" \\\n ", "").rstrip()
    assert "first slower release: 0.6.1" in out and out.endswith(" ".join(given))
    assert overlay_for.call_args.args[2][f"{PACKAGE}==0.6.1"] == tmp_path / "0.6.1"
    commands = store.load("bisect_demo", SLUG).command
    assert not commands.str.contains(str(tmp_path), regex=False).any()


def test_kernels_of_metadata_are_searched_through_the_releases_of_their_own_library(
    lab, fails, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(releases, "index_releases", lambda package: pytest.fail("index asked"))
    names = ["0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.23"]
    lab.us = dict.fromkeys(names[1:], 60.0)
    given = []
    for name in names:
        folder = hand_made(tmp_path / name, "sglang", name)
        given += ["--overlay", f"sglang=={name}={folder}"]
    asked = {
        "package": "sglang",
        "good": names[0],
        "bad": names[-1],
        "rounds": "2",
    }
    asked |= {"study": "context_width", "case": context_width.WIDEST.key}
    assert cli.main([*command(**asked, backend="sglang-metadata"), *given]) == 0
    assert "first slower release: 0.5.15\n" in capsys.readouterr().out
    assert {item.backend for job in lab.jobs for item in job.items} == {"sglang-metadata"}
    assert fails(*command(**asked)).endswith(
        "backend for sglang must be one of sglang-metadata, got 'flashinfer-auto'"
    )


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"package": "vllm"},
            "package must be one of flashinfer-python, sglang-kernel, got 'vllm'",
        ),
        ({"backend": "sdpa"}, "backend for flashinfer-python must be one of flashinfer-auto, "),
        ({"study": "nope"}, "STUDY must be one of "),
        (
            {"case": "nope"},
            "case must be one of study 'demo', got 'nope' (a call must be words such as",
        ),
        ({"good": "0.6.3"}, "good and bad must be two releases, got 0.6.3 and 0.6.3"),
        ({"good": "0.6.3.0"}, "good and bad must be two releases, got 0.6.3.0 and 0.6.3"),
        ({"good": "fast"}, "good must be a version such as 0.6.3, got 'fast'"),
        ({"good": "0.5.2"}, f"releases must hold 0.5.2, got {', '.join(EACH)}"),
        ({"bad": "0.6.5"}, f"releases must hold 0.6.5, got {', '.join(EACH)}"),
        ({"rounds": "0"}, "rounds must be an integer >= 1, got 0"),
        ({"overlay": "probe==1.0=other"}, f"overlay must be of {PACKAGE}, got probe==1.0"),
        ({"releases": "0.5.3,x"}, "release must be a version such as 0.6.3, got 'x'"),
    ],
)
def test_what_cannot_be_asked_fails_in_one_line(lab, fails, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    hand_made(tmp_path / "other", "probe", "1.0")
    assert words in fails(*command(**options))
    assert lab.jobs == []
