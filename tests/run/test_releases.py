"""Releases: which there are, and each in a folder of its own or not there at all. No network."""

import re
import subprocess
import zipfile
from importlib import metadata
from unittest.mock import Mock

import pytest
from support.studies import hand_made, metadata_of

from attnlib.run import releases
from attnlib.run.releases import (
    available_releases,
    overlay_for,
    own_build,
    parse_overlay,
    parse_releases,
)

PACKAGE = "flashinfer-python"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(releases, "ROOT", tmp_path / "overlays")
    return tmp_path / "overlays"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """An empty folder of wheels, and the only place that pip may look at."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def build_wheel(folder, name, version):
    """The smallest wheel there is: one module that knows its version."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata_of(name, version),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.mark.parametrize("name", ["old", "a=b", "a==b", "with space"])
def test_a_folder_given_by_hand_is_parsed_to_its_full_path_and_used(
    tmp_path, root, monkeypatch, name
):
    folder = hand_made(tmp_path / name, "attnlib-probe", "1.0")
    monkeypatch.chdir(tmp_path)
    given = dict([parse_overlay(f"attnlib-probe==1.0={name}")])
    assert given == {"attnlib-probe==1.0": folder}
    assert overlay_for("attnlib-probe", "1.0", given) == folder
    assert not root.exists()


@pytest.mark.parametrize(
    "argument", ["", "probe", "probe==1.0", "probe==1.0=", "==1.0=old", "probe=1.0=old", "probe=="]
)
def test_what_is_no_overlay_is_refused_with_the_form_it_must_have(argument):
    words = rf"--overlay must be NAME==VERSION=DIR, got {re.escape(repr(argument))}"
    with pytest.raises(ValueError, match=words):
        parse_overlay(argument)


def test_releases_are_those_of_a_package():
    assert parse_releases("probe==1.0,1.1") == ("probe", ["1.0", "1.1"])
    assert parse_releases("probe==1.0") == ("probe", ["1.0"])
    for argument in ("", "probe", "probe==", "==1.0,1.1"):
        words = f"--releases must be NAME==VERSION,VERSION, got {argument!r}"
        with pytest.raises(ValueError, match=re.escape(words)):
            parse_releases(argument)
    with pytest.raises(ValueError, match=r"--releases must be a version such as 0.6.3, got 'x'"):
        parse_releases("probe==1.0,x")


def test_a_folder_without_the_release_is_refused_naming_what_it_has(tmp_path):
    hand_made(tmp_path / "other", "attnlib-probe", "2.0")
    (tmp_path / "lost" / "attnlib_probe-1.0.dist-info").mkdir(parents=True)
    for name, has in {"other": r".*attnlib-probe.*2\.0", "missing": "none", "lost": ""}.items():
        words = rf"{name} must hold attnlib-probe 1\.0, it has {has}"
        with pytest.raises(ValueError, match=words):
            parse_overlay(f"attnlib-probe==1.0={tmp_path / name}")
        with pytest.raises(ValueError, match=words):
            overlay_for("attnlib-probe", "1.0", {"attnlib-probe==1.0": tmp_path / name})


def test_a_wheel_of_ones_own_is_installed_once_and_anew_if_its_bytes_change(wheels, root):
    build_wheel(wheels, "attnlib-probe", "1.0+mine")
    (path,) = wheels.iterdir()
    release, folder = own_build(path, "attnlib-probe")
    assert release == "1.0+mine" and (folder / "attnlib_probe.py").exists()
    assert own_build(path, "attnlib-probe") == own_build(folder, "attnlib-probe")
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("more.py", "")
    assert own_build(path, "attnlib-probe")[1] != folder
    assert len(list(root.iterdir())) == 2


def test_the_environments_release_is_used_as_it_is(root):
    assert overlay_for("pytest", metadata.version("pytest")) is None
    assert overlay_for("pytest", "") is None
    assert releases.installed_version("no-such-distribution") == ""
    assert not root.exists()


def pip_says(monkeypatch, code, out, err=""):
    pip = Mock(return_value=subprocess.CompletedProcess([], code, out, err))
    monkeypatch.setattr(releases.subprocess, "run", pip)
    return pip


def test_a_wheel_is_installed_once_with_its_companion_and_without_it_nothing_is_left(
    wheels, root, monkeypatch
):
    monkeypatch.setattr(releases, "COMPANIONS", {"attnlib-probe": ("attnlib-mate<2",)})
    for name, version in (
        ("probe", "1.0"),
        ("probe", "1.1"),
        ("mate", "2.0"),
    ):
        build_wheel(wheels, f"attnlib-{name}", version)
    with pytest.raises(RuntimeError, match=r"(?s)install attnlib-probe==1\.0: .*No matching.*mate"):
        overlay_for("attnlib-probe", "1.0")
    assert list(root.iterdir()) == []
    build_wheel(wheels, "attnlib-mate", "1.5")
    (root / "unfinished" / "of an install that was killed").mkdir(parents=True)
    folder = overlay_for("attnlib-probe", "1.0")
    assert folder == root / "attnlib-probe-1.0"
    assert (folder / "attnlib_probe.py").read_text() == "VERSION = '1.0'\n"
    assert (folder / "attnlib_mate.py").read_text() == "VERSION = '1.5'\n"
    assert not (folder / "of an install that was killed").exists()
    assert list(root.iterdir()) == [folder]
    monkeypatch.setattr(releases.subprocess, "run", lambda *a, **k: pytest.fail("installed again"))
    assert overlay_for("attnlib-probe", "1.0") == folder


def test_releases_are_those_that_pip_finds_here_in_the_order_of_versions(wheels):
    for version in ("0.10.0", "0.6.3", "0.7.2.post1", "0.7.2rc1"):
        build_wheel(wheels, "attnlib-probe", version)
    (wheels / "attnlib_probe-9.0-cp27-cp27m-win32.whl").touch()
    assert available_releases("attnlib-probe") == ["0.6.3", "0.7.2.post1", "0.10.0"]


def test_overlays_stand_beside_the_environments_release_and_pip_is_not_asked(monkeypatch):
    monkeypatch.setattr(releases, "installed_version", lambda package: "0.7.2")
    monkeypatch.setattr(releases, "index_releases", lambda package: pytest.fail("index asked"))
    given = [f"{PACKAGE}==0.6.3", f"{PACKAGE}==0.6.4rc1"]
    assert available_releases(PACKAGE, given) == ["0.6.3", "0.6.4rc1", "0.7.2"]


def test_what_pip_prints_is_parsed_to_releases_oldest_first(monkeypatch):
    listed = "Available versions: 0.7.2.post1, 0.7.2, 0.7.2rc1, 0.6.10, 0.6.3"
    pip_says(monkeypatch, 0, f"{PACKAGE} (0.7.2.post1)\n{listed}\n  LATEST:    0.7.2.post1\n")
    found = releases.index_releases(PACKAGE)
    assert found == ["0.6.3", "0.6.10", "0.7.2rc1", "0.7.2", "0.7.2.post1"]


@pytest.mark.parametrize(
    "said, words",
    [((1, "", "ERROR: no\n such thing\n"), "ERROR: no such thing"), ((0, "odd"), "odd")],
)
def test_an_index_that_does_not_answer_is_told_in_pips_words(said, words, monkeypatch):
    pip_says(monkeypatch, *said)
    with pytest.raises(RuntimeError, match=f"not list the releases of {PACKAGE}: {words}"):
        releases.index_releases(PACKAGE)


def test_what_pip_says_has_no_list_of_releases():
    listed = ", ".join(f"0.6.{number}" for number in range(200))
    printed = f"ERROR: No version of x==9\n (from versions: {listed})\nERROR: none found"
    assert releases.pip_words(printed) == "ERROR: No version of x==9 ERROR: none found"
