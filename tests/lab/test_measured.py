"""`watch --measure`: two releases over the suite, a search for what is slower, and its draft."""

import pytest
import yaml
from support.lab import SLUG, Lab

from attnlib import cli
from attnlib.lab import measured
from attnlib.run import releases, store
from attnlib.select import known
from attnlib.studies.releases import calls

PACKAGE = "flashinfer-python"
EACH = ["0.7.1", "0.7.2", "0.7.4"]
SLOW = "1 user of 4k"


@pytest.fixture
def lab(make_record, monkeypatch):
    """A machine with a GPU; `SLOW` takes 1.5 times as long from 0.7.2 on."""
    found = Lab(make_record, lambda release: (10.0, "fa2"), lambda item, release: (item, release))
    usual = found.usual

    def run(job, *rest):
        for item in job.items:
            if item.case == calls.CALLS[SLOW] and item.release != "0.7.1":
                found.us[item, job.release] = 15.0
        return Lab.run(found, job, *rest)

    found.usual = usual
    found.run = run
    found.stand_in(monkeypatch)
    monkeypatch.setattr(measured, "mode", lambda: "live")
    monkeypatch.setattr("attnlib.lab.bisect.mode", lambda: "live")
    monkeypatch.setattr(measured, "asked_gpus", lambda text: ["0"])
    monkeypatch.setattr(
        measured, "describe", lambda device: {"gpu": "Test GPU", "gpu_id": "0badcafe"}
    )
    monkeypatch.setattr(measured, "overlay_for", lambda *given: None)
    monkeypatch.setattr("attnlib.lab.bisect.machine_shown", lambda *given: SLUG)
    monkeypatch.setattr(measured, "index_releases", lambda package: EACH)
    monkeypatch.setattr(releases, "index_releases", lambda package: EACH)
    few = [item for item in calls.items_of(PACKAGE) if item.case.kind == ""][:8]
    monkeypatch.setattr(measured, "items_of", lambda package: few)
    return found


def test_the_newest_release_is_measured_in_turns_beside_the_one_before(lab):
    found = measured.measure(PACKAGE)
    assert (found.base, found.new) == ("0.7.2", "0.7.4")
    jobs = [(job.round, job.release) for job in lab.jobs if job.release]
    assert jobs == [(0, "0.7.2"), (0, "0.7.4"), (1, "0.7.4"), (1, "0.7.2")] + [
        (2, "0.7.2"),
        (2, "0.7.4"),
        (3, "0.7.4"),
        (3, "0.7.2"),
    ]
    assert found.slower.empty and set(found.rows.verdict) == {"same"}
    assert len(found.rows) == 8 and not found.drafts()


def test_what_is_slower_is_searched_and_becomes_a_known_problem_in_draft(lab, tmp_path):
    found = measured.measure(PACKAGE, "0.7.1", "0.7.4")
    assert found.slower.call.tolist() == [SLOW]
    assert found.changed == {SLOW: "0.7.2"}
    (draft,) = found.drafts()
    (tmp_path / "flashinfer.yaml").write_text(draft)
    (problem,) = known.load_problems(tmp_path).values()
    assert problem.id == "flashinfer-0-7-2-decode"
    assert SLOW in problem.says and problem.do == "pin 0.7.1"
    assert problem.record["pair"] == ["flashinfer-auto==0.7.4", "flashinfer-auto==0.7.1"]
    assert yaml.safe_load(draft)["flashinfer-0-7-2-decode"]["releases"] == {
        "flashinfer": {"since": "0.7.2", "until": "0.7.4"}
    }
    assert f"- {SLOW}: 1.500" in str(found)


def test_the_command_says_the_minutes_first_and_ends_with_6_where_a_call_is_slower(lab, capsys):
    assert cli.main(["watch", PACKAGE, "--measure", "--base", "0.7.1", "--new", "0.7.4"]) == 6
    out, err = capsys.readouterr()
    assert out.startswith("# flashinfer-python 0.7.1 to 0.7.4: 7 same, 1 slower")
    assert err.startswith("8 calls on two releases, 4 rounds")
    assert cli.main(["watch", PACKAGE, "--measure"]) == 0


def test_without_a_gpu_what_is_on_record_is_judged(lab, monkeypatch):
    measured.measure(PACKAGE)
    monkeypatch.setattr(measured, "mode", lambda: "replay")
    lab.jobs.clear()
    again = measured.measure(PACKAGE, "0.7.2", "0.7.4")
    assert len(again.rows) == 8 and not lab.jobs
    assert store.machines("suite") == [SLUG]


def test_two_rounds_on_record_are_said_and_decide_nothing(lab, monkeypatch, capsys):
    monkeypatch.setattr(measured, "ROUNDS", 2)
    measured.measure(PACKAGE)
    monkeypatch.setattr(measured, "mode", lambda: "replay")
    assert cli.main(["watch", PACKAGE, "--measure"]) == cli.UNDECIDED
    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith("8 inconclusive (2 rounds: no verdict, it needs 3)")
    assert ("no GPU here: what is on record is read, with its rounds; to measure are") in err
    empty = measured.Measured(PACKAGE, "1", "2", measured.measure(PACKAGE, "0.1", "0.2").rows)
    assert empty.outcome == "not decided"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure"], "--measure must have one PACKAGE, got none"),
        (["sglang", "--measure"], "package must be one of flashinfer-python, sglang-kernel"),
        ([PACKAGE, "--measure", "--base", "0.7.1"], "base and new must be given together"),
        ([PACKAGE, "--overlay", "a==1=b"], "--overlay must go with --measure"),
    ],
)
def test_wrong_use(words, message, capsys):
    assert cli.main(["watch", *words]) == cli.USAGE
    assert message in capsys.readouterr().err
