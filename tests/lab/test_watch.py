"""`watch` over tiny wheels that pip finds in a folder, without an index."""

import json
import re
from datetime import date, timedelta
from fnmatch import fnmatchcase
from types import SimpleNamespace
from zipfile import ZipFile, ZipInfo

import pytest
from support.tiny_wheels import make_wheel

from attnlib import cli
from attnlib.core import releases
from attnlib.core.releases import read_releases
from attnlib.lab import watch, wheels
from attnlib.lab.citing import CITATION, rows_of

pytestmark = pytest.mark.slow
ENGINE = "attnlib-engine"
"""No package of an index."""
CITED = f"""\
flashinfer-python:
  title: FlashInfer
  read:
    - by: attnlib/core/fa2
      files: {{flashinfer/plan.cuh: Plan}}
{ENGINE}:
  title: Engine
  read:
    - by: data/rules/engine.yaml
      files:
        engine/pick.py: pick LIMIT
        engine/models/*.py: ""
    - by: attnlib/core/schedule
      files: {{engine/kernel.so: ""}}
"""
RULES = f"""\
library: engine
package: {ENGINE}
limits:
  - {{source: "Engine pick.py:3-4, 1.0"}}
  - {{source: "Engine pick.py:6, 1.0"}}
  - {{source: "Engine LIMIT, 0.9"}}
  - {{when: [before 1.0], source: "Engine pick.py, 0.8"}}
  - source: Engine models/llama.py
"""
PICK = """\
import os

LIMIT = 64


def pick(heads):
    return "fa3" if heads > LIMIT else "fa2"


def log():
    print("picked")
"""
FILES = {
    "engine/pick.py": PICK,
    "engine/models/llama.py": "from ..pick import pick\n",
    "engine/kernel.so": b"\x7fELF",
    "engine/loop.py": "from engine.step import step\n",
    "engine/step.py": "def step(batch):\n    return batch\n",
}
PLAN = {"flashinfer/plan.cuh": "int Plan(int n) { return n; }\n"}
READ = {"flashinfer-python": {"0.7.1": None, "0.7.2": None}, ENGINE: {"1.0": "0.7.2"}}


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Makes releases: of the engine by what differs from `FILES`, unless told otherwise."""
    wheels = tmp_path / "wheels"
    rules = tmp_path / "rules"
    for folder in (wheels, rules):
        folder.mkdir()
    (tmp_path / "watch.yaml").write_text(CITED)
    (tmp_path / "releases.json").write_text(json.dumps(READ))
    (rules / "engine.yaml").write_text(RULES)
    monkeypatch.setattr(releases, "PATH", tmp_path / "releases.json")
    monkeypatch.setattr(watch, "CITED", tmp_path / "watch.yaml")
    monkeypatch.setattr("attnlib.lab.citing.RULES_FOLDER", rules)
    for name, value in (
        ("INDEX", "1"),
        ("CONFIG_FILE", "/dev/null"),
        ("EXTRA_INDEX_URL", ""),
    ):
        monkeypatch.setenv(f"PIP_NO_{name}" if name == "INDEX" else f"PIP_{name}", value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    watch._packages.cache_clear()

    def make(release, changed=(), requires="flashinfer_python[cu13]==0.7.2", name=ENGINE):
        files = PLAN if name == "flashinfer-python" else FILES
        return make_wheel(wheels, name, release, {**files, **dict(changed)}, requires)

    make("0.7.2", requires="", name="flashinfer-python")
    make("1.0")
    yield make
    watch._packages.cache_clear()


def read():
    """What is on file now."""
    return json.loads(releases.PATH.read_text())


def run(capsys, *words):
    """Exit status, standard output, and the one line of the error."""
    status = cli.main(["watch", *words])
    out, err = capsys.readouterr()
    assert len(err.splitlines()) <= 1
    return status, out, err


def test_without_a_newer_release_nothing_is_fetched_or_written(index, capsys, monkeypatch):
    monkeypatch.setattr(watch, "fetched", None)
    before = releases.PATH.stat().st_mtime_ns
    status, out, _ = run(capsys)
    assert status == 0
    assert out.splitlines()[-1] == "There are none."
    assert releases.PATH.stat().st_mtime_ns == before


def test_a_release_that_changes_nothing_that_is_cited_is_covered(index, capsys):
    reformatted = PICK.replace("heads)", "heads,  # of a GPU\n)").replace("picked", "picks")
    reformatted = reformatted.replace("import os", "import sys as os")
    index("1.1", {"engine/pick.py": reformatted})
    status, out, _ = run(capsys)
    assert status == 0
    assert "Nothing changed: all 3 cited definitions are the same." in out
    assert read() == READ | {ENGINE: {"1.0": "0.7.2", "1.1": "0.7.2"}}


def test_a_change_is_named_with_the_rows_to_read_again_and_ends_what_is_covered(index, capsys):
    index("1.1")
    index("1.2", {"engine/pick.py": PICK.replace("heads > LIMIT", "heads >= LIMIT")})
    index("1.3")
    status, out, _ = run(capsys)
    assert status == cli.CHANGED == 6
    assert read()[ENGINE] == {"1.0": "0.7.2", "1.1": "0.7.2"}
    assert "## attnlib-engine 1.1 to 1.2\n\n1 of 3 cited" in out and '`"1.2": "0.7.2"`' in out
    assert "\n- data/rules/engine.yaml:4: Engine pick.py:3-4, 1.0: `pick`\n" in out
    assert "### `engine/pick.py`: pick changed" in out
    assert "-    return 'fa3' if heads > LIMIT else 'fa2'" in out
    assert "Not compared yet: attnlib-engine 1.3." in out


def test_a_badge_says_how_old_the_newest_read_release_is(index, capsys, tmp_path, monkeypatch):
    path = tmp_path / "badge.json"
    index("1.1")
    assert run(capsys, ENGINE, "--badge", str(path))[0] == 0
    badge = json.loads(path.read_text())
    assert (badge["message"], badge["color"]) == ("newest", "green")
    index("1.2", {"engine/pick.py": PICK.replace("heads", "group")})
    monkeypatch.setattr(wheels.Wheel, "built", date.today() - timedelta(days=29))
    assert run(capsys, ENGINE, "--badge", str(path))[0] == 6
    badge = json.loads(path.read_text())
    assert badge["message"] == f"{ENGINE} 1.1, 29 days old" and badge["color"] == "orange"
    assert badge["schemaVersion"] == 1 and badge["label"]


def test_a_wheel_says_its_day_unless_its_build_gives_all_files_one_day(tmp_path):
    for number, days in enumerate([[(1980, 1, 1)], [(2020, 2, 2)], [(2026, 11, 1), (2026, 11, 3)]]):
        path = tmp_path / f"{number}.whl"
        with ZipFile(path, "w") as archive:
            for entry, day in enumerate(days):
                archive.writestr(ZipInfo(f"file{entry}", (*day, 0, 0, 0)), "")
        expected = date(2026, 11, 3) if number == 2 else None
        assert wheels.Wheel(path, ENGINE, "1.0").built == expected
    verdict = watch.Verdict(ENGINE, "1.0", "1.1", None, 0, ())
    assert verdict.age(date(2026, 11, 28)) == f"{ENGINE} 1.0"


def test_the_rows_are_those_that_cite_the_definition(index):
    changed = PICK.replace("LIMIT = 64", "LIMIT = 128").replace('"fa3" if', '"fa4" if')
    index("1.1", {"engine/pick.py": changed, "engine/kernel.so": b"\x7fELF2"})
    found = watch.compare(ENGINE, "1.0", "1.1")
    again = {change.name: change.again for change in found.changes}
    assert again == {
        # Of lines of 1.0 those that it has; a row that ended before 1.0 is not named.
        "pick": ("data/rules/engine.yaml:5: Engine pick.py:6, 1.0",),
        "LIMIT": (
            "data/rules/engine.yaml:4: Engine pick.py:3-4, 1.0",
            "data/rules/engine.yaml:6: Engine LIMIT, 0.9",
        ),
        "the file": ("attnlib/core/schedule",),
    }


def test_what_moved_is_found_and_a_new_file_of_a_pattern_is_new(index):
    moved = PICK.replace("def pick", "def choose")
    both = {"engine/other.py": PICK, "engine/models/gemma.py": "def backend():\n    return 1\n"}
    index("1.1", {"engine/pick.py": moved, **both})
    found = watch.compare(ENGINE, "1.0", "1.1")
    how = {change.name: change.how for change in found.changes}
    assert how == {"pick": "is gone; pick is in engine/other.py", "backend": "is new"}


@pytest.mark.parametrize(
    "changed, place",
    [
        ({"engine/step.py": "def step(batch, graph=False):\n    return batch\n"}, "step.py"),
        ({"engine/loop.py": "from engine.pick import pick as step\n"}, "loop.py"),
    ],
)
def test_a_hooked_function_is_followed_to_where_it_is_imported_from(index, changed, place):
    def around_step():
        """A hook."""

    point = SimpleNamespace(path="engine.loop:step", hook=around_step, since="0.9", before="")
    gone = SimpleNamespace(path="engine.old:step", hook=around_step, since="", before="1.0")
    later = SimpleNamespace(path="engine.new:step", hook=around_step, since="1.1", before="")
    index("1.1", changed)
    found = watch.compare(ENGINE, "1.0", "1.1", {ENGINE: [point, gone, later]})
    (change,) = found.changes
    assert change.path == f"engine/{place}" and found.compared == 5
    assert change.again == (f"hook around_step of {__name__}",)


def test_a_flashinfer_that_was_not_read_is_a_change(index, capsys):
    index("1.1", requires="flashinfer-python==0.7.3")
    status, out, _ = run(capsys, ENGINE)
    assert status == cli.CHANGED and read() == READ
    assert "### `METADATA`: Requires-Dist is FlashInfer 0.7.3, which was not read" in out
    index("0.7.3", requires="", name="flashinfer-python")
    assert run(capsys, ENGINE)[0] == cli.CHANGED
    assert read() == READ
    # Of all packages FlashInfer is covered first, and the engine then too.
    assert run(capsys)[0] == 0
    assert read()[ENGINE]["1.1"] == "0.7.3"
    assert "0.7.3" in read()["flashinfer-python"]


def cut(path):
    """As a download that ended early leaves it."""
    path.write_bytes(path.read_bytes()[:-200])


def spoil(path):
    """A byte of a file is another one."""
    content = path.read_bytes()
    at = content.index(b"def pick")
    path.write_bytes(content[:at] + b"D" + content[at + 1 :])


@pytest.mark.parametrize(
    "harm, message",
    [
        (cut, r"could not fetch the wheel of attnlib-engine 1\.1|must be whole"),
        (spoil, r"the wheel of attnlib-engine 1\.1 must be whole, got: Bad CRC"),
    ],
)
def test_a_broken_wheel_is_one_error_and_nothing_is_written(index, capsys, harm, message):
    index("0.7.3", requires="", name="flashinfer-python")  # would be covered
    harm(index("1.1"))
    status, out, err = run(capsys)
    assert status == cli.FAILED
    assert out == ""
    assert re.search(message, err)
    assert read() == READ


def test_code_that_this_python_cannot_read_is_an_error(index, capsys):
    index("1.1", {"engine/pick.py": "def pick(:\n"})
    status, _, err = run(capsys)
    assert status == cli.FAILED and read() == READ
    assert "engine/pick.py of attnlib-engine 1.1 must be code that Python 3." in err


def test_without_an_index_there_is_one_error(index, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    status, out, err = run(capsys)
    assert status == cli.FAILED
    assert out == ""
    assert err.startswith("attnlib watch: pip could not list the releases of flashinfer-python")


@pytest.mark.parametrize(
    "words, message",
    [
        (["sglangs"], "package must be one of flashinfer-python, attnlib-engine, got 'sglangs'"),
        ([ENGINE, "--base", "1.0"], "--base and --new must be given together, for one PACKAGE"),
        (["--base", "1.0", "--new", "1.1"], "for one PACKAGE"),
        ([ENGINE, "--measure", "--badge", "x"], "--badge must go without --measure"),
    ],
)
def test_wrong_use(index, capsys, words, message):
    status, out, err = run(capsys, *words)
    assert status == cli.USAGE
    assert out == ""
    assert message in err


def test_two_given_releases_are_compared_and_nothing_is_written(index, capsys):
    index("1.1")
    assert run(capsys, ENGINE, "--base", "1.0", "--new", "1.1")[0] == 0
    assert read() == READ


def test_a_citation_of_what_no_release_has_is_an_error(index, tmp_path):
    index("1.1")
    (tmp_path / "watch.yaml").write_text(CITED.replace("pick LIMIT", "pick MOST"))
    watch._packages.cache_clear()
    with pytest.raises(ValueError, match=r"engine/pick.py, cited by .* must have MOST in "):
        watch.compare(ENGINE, "1.0", "1.1")


NOT_WATCHED = ("flash_api.cpp", "flashInferMetaInfo.h", "mimo_v2_flash.py", "mla.py")
"""Files that rules cite and no wheel has now."""


@pytest.mark.parametrize("package", watch._packages())
def test_every_file_that_a_rule_cites_is_watched(package):
    entry = watch._packages()[package]
    last = [*read_releases(package)][-1]
    watched = []
    for part in watch._packages().values():
        for cited in part["read"]:
            watched += cited["files"]
    names = {path.rpartition("/")[2] for path in watched}
    for row in rows_of(entry["title"], package, last):
        for file, _, _ in CITATION.findall(row.source):
            name = file.rpartition("/")[2]
            if name.endswith((".py", ".cuh", ".cu", ".h", ".cpp")) and name not in NOT_WATCHED:
                assert any(fnmatchcase(name, pattern) for pattern in names), row
