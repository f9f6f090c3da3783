"""A new study: refused whole or written whole; in a copy of the tree it passes our own tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnlib import studies
from attnlib.report import new_study as recipe
from attnlib.run import store
from attnlib.studies import STUDIES

ROOT = Path(__file__).resolve().parents[2]
NAME = "a_question_of_the_tests"
NBVAL = ("--nbval", "--nbval-current-env", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg")

pytestmark = pytest.mark.usefixtures("published_records")


@pytest.fixture
def tree(tmp_path):
    """A checkout with two notebooks and no study."""
    for folder in ("attnlib/studies", "notebooks"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("01_first", "07_an_old_question"):
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text("{}")
    return tmp_path


def files(tree):
    return sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())


NO_SLUGS = ["", "Upper", "two words", "a-b", "_a", "a_", "a__b", "1a", "class", "bisect_x", "../x"]
TAKEN = ["fa3_decode_regression", "an_old_question", "left_over", "recorded"]


@pytest.mark.parametrize("name", [*NO_SLUGS, "a" * 41, *TAKEN])
def test_a_name_that_is_no_slug_or_taken_is_refused(tree, monkeypatch, name):
    (tree / "attnlib" / "studies" / "left_over").mkdir()
    recorded = {"recorded": ["some-gpu"]}
    monkeypatch.setattr(store, "machines", lambda study: recorded.get(study, []))
    before = files(tree)
    said = "new, there is already" if name in TAKEN else "lower-case words joined by _"
    said = "new, there is already records on some-gpu" if name == "recorded" else said
    with pytest.raises(ValueError, match=f"NAME must be {said}"):
        recipe.new_study(name, tree)
    assert files(tree) == before


def test_it_is_refused_outside_a_checkout_and_the_command_fails_in_one_line(fails, tmp_path):
    assert "NAME must be lower-case words" in fails("new-study", "No")
    with pytest.raises(ValueError, match="must run in a checkout"):
        recipe.new_study(NAME, tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("cell failed"), KeyboardInterrupt()])
def test_a_study_whose_notebook_fails_leaves_nothing_behind(tree, monkeypatch, error):
    def execute(path, notebook):
        assert (tree / "attnlib" / "studies" / NAME / "study.py").exists()
        assert os.environ["ATTNLIB_MODE"] == "replay" and "ATTNLIB_MACHINE" not in os.environ
        raise error

    monkeypatch.setattr("attnlib.report.build.execute", execute)
    monkeypatch.setenv("ATTNLIB_MACHINE", "mine")
    before = files(tree)
    with pytest.raises(type(error)):
        recipe.new_study(NAME, tree)
    assert files(tree) == before and os.environ["ATTNLIB_MACHINE"] == "mine"


def test_the_notebook_takes_the_next_number_and_module_and_it_tell_of_the_lender(tree, monkeypatch):
    def execute(path, notebook):
        notebook.metadata["language_info"] = {"name": "python", "version": "3.11.7"}
        return notebook

    monkeypatch.setattr("attnlib.report.build.execute", execute)
    module, notebook = recipe.new_study(NAME, tree)
    assert (module.name, notebook.name) == ("study.py", f"08_{NAME}.ipynb")
    assert "3.11.7" not in notebook.read_text(), "nothing of this machine"
    text = module.read_text()
    assert "Not measured yet" in text and f'borrows=("{recipe.LENDER}", ' in text
    assert "TODO" in text and "{" not in text
    first = recipe.notebook_of(NAME, number="08").cells[0].source
    found = store.provenance(recipe.LENDER, STUDIES[recipe.LENDER].reference_machine)
    assert found["measured"] in first and found["machine"]["gpu"] in first and "TODO" in first


def test_a_study_folder_must_hold_its_study(tmp_path, monkeypatch):
    (tmp_path / "empty_one").mkdir()
    for name in ("__init__", "study"):
        (tmp_path / "empty_one" / f"{name}.py").write_text("")
    monkeypatch.setattr(studies, "__path__", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"studies/empty_one/study\.py must hold STUDY"):
        studies.discover()


def run_in(folder, *arguments):
    environment = {name: value for name, value in os.environ.items() if "ATTNLIB" not in name}
    environment |= {"PYTHONPATH": str(folder), "ATTNLIB_MODE": "replay"}
    how = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-m", *arguments], **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.kernel
def test_a_new_study_runs_under_nbval_at_once_and_passes_our_own_tests(tmp_path):
    left_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("attnlib", "tests", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    told = run_in(tmp_path, "attnlib", "new-study", NAME)
    (notebook,) = tmp_path.glob(f"notebooks/*_{NAME}.ipynb")
    assert f"written notebooks/{notebook.name}" in told.splitlines()
    held = ("house/test_notebooks", "house/test_imports", "studies/test_studies", "test_cli")
    tests = [f"tests/{name}.py" for name in held]
    run_in(tmp_path, "pytest", "-q", "-k", NAME, *NBVAL, str(notebook), *tests)
    for command in (("check",), ("format", "--check")):
        run_in(tmp_path, "ruff", *command, "attnlib", "notebooks")
