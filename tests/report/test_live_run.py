"""`make gpu` in parts, with a stand-in for what runs them."""

import json
import os
import threading
from dataclasses import replace

import pytest
from support import live_run

from attnlib.report import provenance
from attnlib.run import store
from attnlib.run.study import Study
from attnlib.studies import STUDIES

PARTS = ["tests/core/test_fa3.py", "tests/core/test_launch.py", "notebooks/02_fa3.ipynb"]
GPU = {"0": {"gpu": "NVIDIA H200", "gpu_id": "0a"}}
PUBLISHED = {"a": "confirmed", "b": "refuted", "c": "open"}


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The parts that were run, in order; one whose name is in `slow` does not end in time."""
    names, slow, failing = [], set(), set()

    def run(name, seconds, environment):
        assert environment["ATTNLIB_MODE"] == "live" and seconds > 0
        monkeypatch.setenv("ATTNLIB_DATA", environment["ATTNLIB_DATA"])
        # Notebooks 00, 10 and 14 show published records on a GPU, too.
        assert STUDIES["engine_step"].reference_machine in store.machines("engine_step")
        names.append(name)
        if name in slow:
            return None
        told = {"part": name, "seconds": 30.0, "failed": int(name in failing)}
        tested = {"passed": 7, "skipped": 1, "skips": {"pip install it": 1}}
        return told | ({} if name.endswith("ipynb") else tested)

    def verdicts(environment):
        live = environment["ATTNLIB_MODE"] == "live"
        return {**PUBLISHED, "b": "confirmed"} if live else PUBLISHED

    for name, value in {
        "run": run,
        "parts": lambda: PARTS,
        "tree": lambda name: "one",
        "verdicts": verdicts,
        "BUILD": tmp_path / "build",
        "SUMMARY": tmp_path / "live_run.json",
        "code": lambda name: "",
        "load_claims": lambda: PUBLISHED,
        "gpus": lambda: GPU,
        "describe_versions": lambda names: {"torch": "2.11.0"},
    }.items():
        monkeypatch.setattr(live_run, name, value)
    return names, slow, failing


def said():
    return json.loads(live_run.SUMMARY.read_text())


def test_parts_that_ran_are_not_run_again_and_the_last_one_leaves_a_summary(ran, monkeypatch):
    names, slow, _ = ran
    slow.add(PARTS[1])
    assert live_run.main(100) == 3
    assert names == PARTS[:2] and said()["left"] == PARTS[1:]
    slow.clear()
    assert live_run.main(100) == 0
    assert names[2:] == PARTS[1:] and said()["left"] == []
    assert [each["part"] for each in said()["parts"]] == PARTS
    verdicts = {"a": ["confirmed", "confirmed"], "b": ["refuted", "confirmed"]}
    assert (said()["verdicts"], said()["of"]) == (verdicts, 3)
    monkeypatch.setattr(live_run, "tree", lambda name: "another" if name == PARTS[1] else "one")
    assert live_run.main(100) == 0 and names[4:] == PARTS[1:2]


def test_a_part_that_failed_ends_with_status_1_once_all_ran_and_runs_again_last(ran):
    names, slow, failing = ran
    failing.add(PARTS[0])
    slow.add(PARTS[2])
    assert live_run.main(100) == 3 and names == PARTS
    slow.clear()
    assert live_run.main(100) == 1 and names[3:] == [PARTS[2], PARTS[0]]
    failing.clear()
    assert live_run.main(100) == 0 and names[5:] == PARTS[:1]


def test_another_machine_of_the_kind_goes_on_where_the_published_run_ended(ran, monkeypatch):
    names, slow, _ = ran
    slow.add(PARTS[1])
    live_run.main(100)
    slow.clear()
    monkeypatch.setattr(live_run, "BUILD", live_run.BUILD.with_name("elsewhere"))
    monkeypatch.setattr(live_run, "verdicts", lambda environment: {**PUBLISHED, "b": "open"})
    monkeypatch.setattr(live_run, "gpus", lambda: {"0": {**GPU["0"], "gpu_id": "0b"}})
    monkeypatch.setenv("GO_ON", "1")
    assert live_run.main(100) == 0 and names[2:] == PARTS[1:]
    assert [each["gpu_id"] for each in said()["parts"]] == ["0a", "0b", "0b"]
    assert said()["verdicts"]["b"] == ["refuted", "confirmed"], "told by the first one alone"
    monkeypatch.setattr(live_run, "describe_versions", lambda names: {"torch": "2.12.0"})
    with pytest.raises(SystemExit, match="GO_ON must be .* got NVIDIA H200 with other torch"):
        live_run.main(100)
    monkeypatch.delenv("GO_ON")
    live_run.BUILD.joinpath("parts.jsonl").unlink()
    assert live_run.main(100) == 0 and names[4:] == PARTS


def test_gpus_of_a_kind_share_the_parts_and_a_study_is_measured_on_one(ran, monkeypatch):
    names, _, _ = ran
    books = [f"notebooks/{number}.ipynb" for number in "abcd"]
    measures = dict(zip(books, [["one"], ["two"], ["three"], ["one", "three"]], strict=True))
    together = [books[0], books[2], books[3]]

    def code(name):
        found = measures.get(name, ())
        return "\n".join(f'load_or_measure(STUDIES["{study}"])' for study in found)

    def verdicts(environment):
        here = environment.get("CUDA_VISIBLE_DEVICES")
        return PUBLISHED | {"b": "confirmed"} if here == "3" else PUBLISHED

    run, asked, both = live_run.run, [], threading.Barrier(2, timeout=60)

    def meet(name, seconds, environment):
        asked.append(environment["CUDA_VISIBLE_DEVICES"])
        if len(asked) <= 2:
            both.wait()
        return run(name, seconds, environment)

    kinds = {"3": GPU["0"], "5": {**GPU["0"], "gpu_id": "0b"}}
    for name, value in {
        "parts": lambda: [PARTS[0], *books],
        "code": code,
        "gpus": lambda: kinds,
        "run": meet,
        "verdicts": verdicts,
    }.items():
        monkeypatch.setattr(live_run, name, value)
    assert live_run.chains(live_run.parts()) == [[PARTS[0]], [books[1]], together]
    assert live_run.main(100) == 0
    assert {*asked[:2]} == {"3", "5"} and sorted(names) == sorted([PARTS[0], *books])
    where = {each["part"]: each["gpu_id"] for each in said()["parts"]}
    assert len({where[name] for name in together}) == 1 and {*where.values()} == {"0a", "0b"}
    assert said()["verdicts"]["b"] == ["refuted", "confirmed"], "the one that differs is told"


def test_the_report_says_what_ran_and_nothing_before_it_did(ran):
    assert provenance.live_run(live_run.SUMMARY) == {}
    ran[1].add(PARTS[1])
    live_run.main(100)
    assert provenance.live_run(live_run.SUMMARY)["not run yet"] == "test_launch, 02_fa3"
    ran[1].clear()
    ran[2].add(PARTS[2])
    live_run.main(100)
    told = provenance.live_run(live_run.SUMMARY)
    assert told["day and GPU"].endswith("NVIDIA H200 0a") and told["not run yet"] == "none"
    assert told["tests"] == "passed 14, skipped 2, failed 0"
    assert told["skipped for"] == "pip install it"
    assert told["notebooks"] == "1, 1 failed; all of it took 2 minutes of a GPU"
    wanted = (
        "1 as published, 1 not told by what was measured; other: b confirmed (published refuted)"
    )
    assert told["verdicts"] == wanted
    since = provenance.live_run(live_run.SUMMARY, published={"b": "confirmed"})["verdicts"]
    assert since == "2 as published, 1 not told by what was measured; other: none"


def test_a_part_runs_again_where_it_or_what_it_stands_on_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(live_run, "ROOT", tmp_path)
    parts = "test_c.py", "d.ipynb"
    tests = "tests/support/b.py", "tests/conftest.py", "tests/core/conftest.py"
    neither = "attnlib/report/e.py", "tests/support/live_run.py"
    everything = "attnlib/a.py", "attnlib/lab/diagnose.py", "attnlib/lab/patterns.py"
    stands_on = {
        **dict.fromkeys(everything, [True, True]),
        **dict.fromkeys(tests, [True, False]),
        **dict.fromkeys(neither, [False, False]),
        "attnlib/studies/named/study.py": [True, False],
        "attnlib/studies/named/tables.py": [True, False],
        "attnlib/studies/named/figures.py": [False, False],
        "attnlib/studies/lender/study.py": [True, False],
        "attnlib/studies/listed/study.py": [True, False],
        "attnlib/studies/shown/figures.py": [False, True],
        "attnlib/studies/asked/tables.py": [False, True],
        "attnlib/studies/other/study.py": [False, False],
        "test_c.py": [True, False],
        "d.ipynb": [False, True],
    }
    says = {
        "test_c.py": 'from ..named.study import STUDY\nSTUDIES["listed"]',
        "attnlib/studies/named/study.py": "from . import tables\nfrom ..lender.study import other",
        "attnlib/lab/diagnose.py": "from .patterns import known",
        "attnlib/lab/patterns.py": "from ..studies.asked.tables import it",
    }
    first = notebook("shown = diagnose(1)", "2")
    for name in stands_on:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(says.get(name, ""))
    (tmp_path / "d.ipynb").write_text(first)
    for name, changed in stands_on.items():
        before = [live_run.tree(part) for part in parts]
        (tmp_path / name).write_text(
            notebook("3", "2") if name == "d.ipynb" else f"{says.get(name)} 1"
        )
        now = [live_run.tree(part) for part in parts]
        assert [old != new for old, new in zip(before, now, strict=True)] == changed, name
    (tmp_path / "d.ipynb").write_text(notebook("3", "what it found"))
    assert live_run.tree("d.ipynb") == now[1]
    trees = []
    for machine in "nvidia-h200-0a1b2c3d", "nvidia-h200-1a2b3c4d":
        text = f'MACHINE = "{machine}"\n"""Of {machine[-1]}.\n\nSo."""\nSIZE = 1\n'
        (tmp_path / "attnlib" / "a.py").write_text(text)
        trees.append(live_run.tree("d.ipynb"))
    (tmp_path / "attnlib" / "a.py").write_text(text.replace("SIZE = 1", "SIZE = 2"))
    assert live_run.tree("d.ipynb") != trees[0]
    assert trees[0] == trees[1], "docstrings and whose records are published decide nothing"


def test_of_a_studys_definition_its_headline_jobs_count_where_it_is_measured(tmp_path, monkeypatch):
    file = tmp_path / "attnlib" / "studies" / "demo" / "study.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "d.ipynb").write_text(notebook('load_or_measure(STUDIES["demo"])', ""))
    (tmp_path / "test_c.py").write_text("from attnlib.studies.demo.study import CASES")
    grid, trees = next(iter(STUDIES["one_launch"].grids)), []
    monkeypatch.setattr(live_run, "ROOT", tmp_path)
    for cases, more, headline in ("1", (), 1), ("1", (grid,), 1), ("1", (), 2), ("2", (), 2):
        grids = (*more, replace(grid, rounds=headline, headline=True))
        monkeypatch.setattr(live_run, "STUDIES", {"demo": Study("demo", "", grids)})
        file.write_text(f"CASES = {cases}\nSTUDY = Study(\n{len(more)}, {headline}\n)\n")
        trees.append([live_run.tree(part) for part in ("d.ipynb", "test_c.py")])
    book, test = zip(*trees, strict=True)
    assert [book[0] == each for each in book] == [True, True, False, False]
    assert book[2] != book[3] and [test[0] == each for each in test] == [True, True, True, False]


def notebook(code, prose):
    cells = {"cell_type": "code", "source": [code]}, {"cell_type": "markdown", "source": [prose]}
    return json.dumps({"cells": cells})


def test_every_file_with_gpu_tests_and_every_notebook_is_a_part():
    names = live_run.parts()
    assert "tests/core/test_fa3.py" in names and "tests/core/test_facts.py" not in names
    assert sum(name.endswith(".ipynb") for name in names) >= 13


def test_what_pytest_says_of_a_file_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(live_run, "ROOT", tmp_path)
    monkeypatch.setattr(live_run, "BUILD", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    gpu = "gpu"  # the mark of a part; this file is none
    marks = f"import pytest\npytestmark = pytest.mark.{gpu}\n@pytest.mark.skip('pip install it')\n"
    marks += "def test_c(): 0\n"
    tests = "def test_a(): pass\ndef test_b(): raise OSError('/a/f')\n"
    (tmp_path / "test_it.py").write_text(marks + tests)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    told = live_run.run("test_it.py", 60, environment)
    assert {word: told[word] for word in provenance.PART_COUNTS} == {
        "passed": 1,
        "skipped": 1,
        "failed": 1,
    }
    assert told["skips"] == {"pip install it": 1}
    assert "1 failed" in told["reason"] and "OSError: f\n" in told["reason"], "without folders"
    (tmp_path / "test_it.py").write_text(f"{marks}import os\ndef test_a(): os._exit(3)\n")
    dead = live_run.run("test_it.py", 60, environment)
    assert (dead["failed"], dead.get("passed")) == (1, None), "nothing of the part before"
    (tmp_path / "test_it.py").write_text("def test_a(): pass\n")
    assert live_run.run("test_it.py", 60, environment)["failed"] == 0
