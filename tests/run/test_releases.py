"""Overlays: a release in a folder of its own, complete or not there at all. No network."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from attnlib.run import releases
from attnlib.run.releases import overlay_for, parse_overlay


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


def hand_made(folder: Path, name: str, version: str) -> Path:
    """A folder that holds a distribution's metadata, as `pip install --target` leaves it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(metadata_of(name, version))
    return folder


def metadata_of(name: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


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


def test_a_folder_given_by_hand_is_parsed_to_its_requirement_and_full_path(
    tmp_path, monkeypatch
) -> None:
    hand_made(tmp_path / "old", "attnlib-probe", "1.0")
    monkeypatch.chdir(tmp_path)
    found = parse_overlay("attnlib-probe==1.0=old")
    assert found == ("attnlib-probe==1.0", tmp_path / "old")


@pytest.mark.parametrize("name", ["a=b", "a==b", "with space"])
def test_a_folder_given_by_hand_may_have_any_name(tmp_path, name) -> None:
    folder = hand_made(tmp_path / name, "attnlib-probe", "1.0")
    assert parse_overlay(f"attnlib-probe==1.0={folder}") == ("attnlib-probe==1.0", folder)


@pytest.mark.parametrize(
    "argument", ["", "probe", "probe==1.0", "probe==1.0=", "==1.0=old", "probe=1.0=old", "probe=="]
)
def test_what_is_no_overlay_is_refused_with_the_form_it_must_have(argument) -> None:
    words = rf"--overlay must be NAME==VERSION=DIR, got {re.escape(repr(argument))}"
    with pytest.raises(ValueError, match=words):
        parse_overlay(argument)


def test_a_folder_with_another_release_is_refused_naming_what_it_has(tmp_path) -> None:
    folder = hand_made(tmp_path / "old", "attnlib-probe", "2.0")
    words = r"must hold attnlib-probe 1\.0, it has .*attnlib-probe.*2\.0"
    with pytest.raises(ValueError, match=words):
        parse_overlay(f"attnlib-probe==1.0={folder}")
    with pytest.raises(ValueError, match=words):
        overlay_for("attnlib-probe", "1.0", {"attnlib-probe==1.0": folder})


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_any_package_is_refused(tmp_path, name) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"{name} must hold attnlib-probe 1\.0, it has \{{\}}"):
        parse_overlay(f"attnlib-probe==1.0={tmp_path / name}")


def test_a_folder_with_a_package_that_lost_its_metadata_is_refused(tmp_path) -> None:
    (tmp_path / "old" / "attnlib_probe-1.0.dist-info").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"must hold attnlib-probe 1\.0"):
        parse_overlay(f"attnlib-probe==1.0={tmp_path / 'old'}")


def test_a_folder_given_by_hand_is_used_as_it_is(tmp_path, root) -> None:
    folder = hand_made(tmp_path / "old", "attnlib-probe", "1.0")
    assert overlay_for("attnlib-probe", "1.0", {"attnlib-probe==1.0": folder}) == folder
    assert not root.exists()


def test_the_release_of_the_environment_needs_no_overlay(root) -> None:
    assert overlay_for("pytest", metadata.version("pytest")) is None
    assert overlay_for("pytest", "") is None
    assert not root.exists()


def test_a_folder_of_wheels_that_is_missing_is_refused(tmp_path, root, monkeypatch) -> None:
    monkeypatch.setenv("ATTNLIB_WHEELS", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="ATTNLIB_WHEELS must name a folder of wheels, .*nowhere"):
        overlay_for("attnlib-probe", "1.0")
    assert list(root.iterdir()) == []


def test_with_a_folder_of_wheels_no_index_is_asked(wheels, monkeypatch) -> None:
    asked: list[dict[str, str]] = []

    def refuse(command: list[str], *, env: dict[str, str], **_: object):
        asked.append(env)
        return subprocess.CompletedProcess(command, 1, "", "refused")

    monkeypatch.setattr(releases.subprocess, "run", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        overlay_for("attnlib-probe", "1.0")
    assert (asked[0]["PIP_NO_INDEX"], asked[0]["PIP_FIND_LINKS"]) == ("1", str(wheels))


def test_an_install_that_fails_leaves_nothing_and_tells_pips_words(wheels, root) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)install attnlib-probe==1\.0: .*No matching"):
        overlay_for("attnlib-probe", "1.0")
    assert list(root.iterdir()) == []


def test_an_install_without_its_companion_leaves_nothing(wheels, root, monkeypatch) -> None:
    monkeypatch.setattr(releases, "COMPANIONS", {"attnlib-probe": ("attnlib-mate<2",)})
    build_wheel(wheels, "attnlib-probe", "1.0")
    build_wheel(wheels, "attnlib-mate", "2.0")
    with pytest.raises(RuntimeError, match="attnlib-mate"):
        overlay_for("attnlib-probe", "1.0")
    assert list(root.iterdir()) == []


def test_a_wheel_is_installed_once_with_its_companion(wheels, root, monkeypatch) -> None:
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
