"""Releases: which there are, and each in a folder of its own or not there at all. No network."""

import base64
import hashlib
import re
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from support.studies import hand_made, metadata_of

from attnlib.run import releases
from attnlib.run.releases import available_releases, overlay_for, parse_overlay

PACKAGE = "flashinfer-python"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(releases, "ROOT", tmp_path / "overlays")
    return tmp_path / "overlays"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of wheels, and the only place that pip may look at."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("ATTNLIB_WHEELS", str(folder))
    return folder


def record_line(path: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
    return f"{path},sha256={digest.decode()},{len(text)}\n"


def build_wheel(folder: Path, name: str, version: str) -> None:
    """The smallest wheel there is: one module that knows its version."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata_of(name, version),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(record_line(path, text) for path, text in files.items())
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            wheel.writestr(path, text)


@pytest.mark.parametrize("name", ["old", "a=b", "a==b", "with space"])
def test_a_folder_given_by_hand_is_parsed_to_its_requirement_and_full_path(
    tmp_path, monkeypatch, name
):
    hand_made(tmp_path / name, "attnlib-probe", "1.0")
    monkeypatch.chdir(tmp_path)
    found = parse_overlay(f"attnlib-probe==1.0={name}")
    assert found == ("attnlib-probe==1.0", tmp_path / name)


@pytest.mark.parametrize(
    "argument", ["", "probe", "probe==1.0", "probe==1.0=", "==1.0=old", "probe=1.0=old", "probe=="]
)
def test_what_is_no_overlay_is_refused_with_the_form_it_must_have(argument):
    words = rf"--overlay must be NAME==VERSION=DIR, got {re.escape(repr(argument))}"
    with pytest.raises(ValueError, match=words):
        parse_overlay(argument)


@pytest.mark.parametrize(
    ("made", "has"),
    [
        (lambda folder: hand_made(folder, "attnlib-probe", "2.0"), r".*attnlib-probe.*2\.0"),
        (lambda folder: folder.mkdir(), r"\{\}"),
        (lambda folder: None, r"\{\}"),
        (lambda folder: (folder / "attnlib_probe-1.0.dist-info").mkdir(parents=True), ""),
    ],
    ids=["another release", "empty", "missing", "lost its metadata"],
)
def test_a_folder_without_the_release_is_refused_naming_what_it_has(tmp_path, made, has):
    folder = tmp_path / "old"
    made(folder)
    words = rf"old must hold attnlib-probe 1\.0, it has {has}"
    with pytest.raises(ValueError, match=words):
        parse_overlay(f"attnlib-probe==1.0={folder}")
    with pytest.raises(ValueError, match=words):
        overlay_for("attnlib-probe", "1.0", {"attnlib-probe==1.0": folder})


def test_a_folder_given_by_hand_and_the_environments_release_are_used_as_they_are(tmp_path, root):
    folder = hand_made(tmp_path / "old", "attnlib-probe", "1.0")
    assert overlay_for("attnlib-probe", "1.0", {"attnlib-probe==1.0": folder}) == folder
    assert overlay_for("pytest", metadata.version("pytest")) is None
    assert overlay_for("pytest", "") is None
    assert not root.exists()


def test_a_folder_of_wheels_that_is_missing_is_refused(tmp_path, root, monkeypatch):
    monkeypatch.setenv("ATTNLIB_WHEELS", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="ATTNLIB_WHEELS must name a folder of wheels, .*nowhere"):
        overlay_for("attnlib-probe", "1.0")
    assert list(root.iterdir()) == []


def test_with_a_folder_of_wheels_no_index_is_asked(wheels, monkeypatch):
    asked: list[dict[str, str]] = []

    def refuse(command: list[str], *, env: dict[str, str], **_: object):
        asked.append(env)
        return subprocess.CompletedProcess(command, 1, "", "refused")

    monkeypatch.setattr(releases.subprocess, "run", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        overlay_for("attnlib-probe", "1.0")
    assert (asked[0]["PIP_NO_INDEX"], asked[0]["PIP_FIND_LINKS"]) == ("1", str(wheels))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({}, r"(?s)install attnlib-probe==1\.0: .*No matching"),
        ({"probe": "1.0", "mate": "2.0"}, "mate"),
    ],
    ids=["no wheel", "no companion"],
)
def test_an_install_that_fails_leaves_nothing_and_tells_pips_words(
    wheels, root, monkeypatch, made, words
):
    monkeypatch.setattr(releases, "COMPANIONS", {"attnlib-probe": ("attnlib-mate<2",)})
    for name, version in made.items():
        build_wheel(wheels, f"attnlib-{name}", version)
    with pytest.raises(RuntimeError, match=words):
        overlay_for("attnlib-probe", "1.0")
    assert list(root.iterdir()) == []


def test_a_wheel_is_installed_once_with_its_companion(wheels, root, monkeypatch):
    monkeypatch.setattr(releases, "COMPANIONS", {"attnlib-probe": ("attnlib-mate<2",)})
    for name, version in (("probe", "1.0"), ("probe", "1.1"), ("mate", "1.5"), ("mate", "2.0")):
        build_wheel(wheels, f"attnlib-{name}", version)
    folder = overlay_for("attnlib-probe", "1.0")
    assert folder == root / "attnlib-probe-1.0"
    assert (folder / "attnlib_probe.py").read_text() == "VERSION = '1.0'\n"
    assert (folder / "attnlib_mate.py").read_text() == "VERSION = '1.5'\n"
    assert list(root.iterdir()) == [folder]
    monkeypatch.setattr(releases.subprocess, "run", lambda *a, **k: pytest.fail("installed again"))
    assert overlay_for("attnlib-probe", "1.0") == folder


# Which there are


def name_wheel(folder: Path, version: str, tag: str = "py3-none-any") -> None:
    (folder / f"flashinfer_python-{version}-{tag}.whl").touch()


@pytest.fixture
def named_wheels(wheels, monkeypatch) -> Path:
    """The folder of wheels, without an index or a release of the environment."""
    monkeypatch.setattr(releases, "installed_release", lambda package: "")
    monkeypatch.setattr(releases, "index_releases", lambda package: pytest.fail("index asked"))
    return wheels


def test_releases_are_read_from_the_names_of_wheels_in_the_order_of_versions(named_wheels):
    for version in ("0.10.0", "0.6.3", "0.7.2.post1", "0.7.2", "0.7.2rc1"):
        name_wheel(named_wheels, version)
    (named_wheels / "apache_tvm_ffi-0.1-py3-none-any.whl").touch()
    (named_wheels / "notes.txt").touch()
    assert available_releases(PACKAGE) == ["0.6.3", "0.7.2", "0.7.2.post1", "0.10.0"]
    assert "0.7.2rc1" in available_releases(PACKAGE, early=True)


@pytest.mark.parametrize("tag", ["cp27-cp27m-win32", "py3-none-macosx_11_0_arm64"])
def test_a_wheel_for_another_machine_is_refused_unless_one_for_this_stands_by(named_wheels, tag):
    name_wheel(named_wheels, "0.6.3", tag)
    with pytest.raises(ValueError, match=f"for this Python and platform, got .*0.6.3-{tag}"):
        available_releases(PACKAGE)
    name_wheel(named_wheels, "0.6.3")
    assert available_releases(PACKAGE) == ["0.6.3"]


def test_overlays_stand_beside_wheels_and_the_environments_release(named_wheels, monkeypatch):
    name_wheel(named_wheels, "0.6.1")
    monkeypatch.setattr(releases, "installed_release", lambda package: "0.7.2")
    given = [f"{PACKAGE}==0.6.3", f"{PACKAGE}==0.6.4rc1"]
    assert available_releases(PACKAGE, given) == ["0.6.1", "0.6.3", "0.6.4rc1", "0.7.2"]
    monkeypatch.delenv("ATTNLIB_WHEELS")
    assert available_releases(PACKAGE, given) == ["0.6.3", "0.6.4rc1", "0.7.2"]


def pip_says(monkeypatch, code: int, out: str, err: str = "") -> None:
    done = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(releases.subprocess, "run", lambda *a, **k: done)


def test_what_pip_prints_is_parsed_to_releases_oldest_first(monkeypatch):
    text = (
        "flashinfer-python (0.7.2.post1)\n"
        "Available versions: 0.7.2.post1, 0.7.2, 0.7.2rc1, 0.6.10, 0.6.3\n"
        "  INSTALLED: 0.7.2.post1\n  LATEST:    0.7.2.post1\n"
    )
    pip_says(monkeypatch, 0, text)
    found = releases.index_releases(PACKAGE)
    assert found == ["0.6.3", "0.6.10", "0.7.2rc1", "0.7.2", "0.7.2.post1"]


@pytest.mark.parametrize(
    ("said", "words"),
    [((1, "", "ERROR: no\n such thing\n"), "ERROR: no such thing"), ((0, "odd"), "odd")],
)
def test_an_index_that_does_not_answer_is_told_in_pips_words(said, words, monkeypatch):
    pip_says(monkeypatch, *said)
    with pytest.raises(
        RuntimeError, match=f"pip could not list the releases of {PACKAGE}: {words}"
    ):
        releases.index_releases(PACKAGE)
