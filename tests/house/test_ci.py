"""What CI runs: a browser is there or is installed, and its tests cannot be skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "run"
TOOLS = ("bash", "dirname", "env")
MAKE = 'echo "make $* with ATTNLIB_BROWSER=$ATTNLIB_BROWSER" >> "$LOG"'
INSTALL = 'echo "apt-get $*" >> "$LOG"'
SUDO = 'echo "sudo $*" >> "$LOG"; shift; "$@"'


@pytest.fixture
def run_ci(tmp_path):
    """Run the script with nothing on its path but a few tools and stand-ins; what they noted."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name))

    def run(**programs: str) -> tuple[int, list[str]]:
        for name, body in {"make": MAKE, **programs}.items():
            (folder / name.replace("_", "-")).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (folder / name.replace("_", "-")).chmod(0o755)
        environment = {"PATH": str(folder), "LOG": str(log), "HOME": os.devnull}
        done = subprocess.run([folder / "bash", SCRIPT], env=environment, timeout=30)
        return done.returncode, log.read_text().splitlines()

    return run


REQUIRED = "make test with ATTNLIB_BROWSER=required"


def test_a_browser_that_is_there_is_used(run_ci) -> None:
    assert run_ci(chromium="true", apt_get=INSTALL, id="echo 0") == (0, [REQUIRED])


def test_root_installs_the_browser_that_is_missing(run_ci) -> None:
    status, noted = run_ci(apt_get=INSTALL, id="echo 0")
    assert status == 0 and noted[0] == "apt-get update"
    assert noted[1].startswith("apt-get install") and noted[1].endswith(" chromium")
    assert noted[2:] == [REQUIRED]


def test_others_install_it_with_sudo(run_ci) -> None:
    status, noted = run_ci(apt_get=INSTALL, id="echo 1000", sudo=SUDO)
    assert status == 0 and noted[0] == "sudo -n apt-get update" and noted[-1] == REQUIRED


def test_where_it_cannot_be_installed_the_tests_still_must_not_skip(run_ci) -> None:
    assert run_ci(id="echo 1000", sudo="exit 1") == (0, [REQUIRED])


def test_what_make_says_is_what_ci_says(run_ci) -> None:
    assert run_ci(chromium="true", make=f"{MAKE}; exit 2") == (2, [REQUIRED])
