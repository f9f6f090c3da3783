"""What CI runs: a browser is there or is installed, its tests cannot be skipped, on all Pythons."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from test_packaging import PYTHONS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "run"
MAKE = 'echo "make $* with ATTNLIB_BROWSER=$ATTNLIB_BROWSER"'
APT = "apt-get update\napt-get install --yes --no-install-recommends chromium\n"
STAND_INS = {"apt-get": 'echo "apt-get $*"', "sudo": 'echo -n "sudo "; shift; "$@"'}
CAN = STAND_INS
CANNOT = STAND_INS | {"sudo": "exit 1"}


@pytest.mark.parametrize(
    "programs, noted, status",
    [
        ({**CAN, "chromium": "true", "id": "echo 0"}, "", 0),
        ({**CAN, "id": "echo 0"}, APT, 0),
        ({**CAN, "id": "echo 1000"}, APT.replace("apt-get ", "sudo apt-get "), 0),
        ({**CANNOT, "id": "echo 1000"}, "", 0),
        ({**CAN, "chromium": "true", "id": "echo 0", "make": f"{MAKE}; exit 2"}, "", 2),
    ],
    ids=["there", "root installs", "sudo installs", "cannot be installed", "make fails"],
)
def test_ci_has_a_browser_if_it_can_and_never_skips_its_tests(tmp_path, programs, noted, status):
    for name in ("bash", "dirname", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for name, body in {"make": MAKE, **programs}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "HOME": os.devnull}
    done = subprocess.run(
        ["bash", SCRIPT],
        env=environment,
        timeout=30,
        stdout=-1,
        text=True,
    )
    said = f"{noted}make test with ATTNLIB_BROWSER=required\n"
    assert done.stdout == said
    assert done.returncode == status


@pytest.mark.parametrize(
    "name, job, command",
    [
        ("ci", "test", ".ci/run"),
        ("report", "build", "make report"),
        ("watch", "watch", "make watch"),
    ],
)
def test_a_workflow_runs_what_a_developer_runs_on_pythons_that_the_lock_is_for(name, job, command):
    found = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"][job]
    first, *others = [step for step in found["steps"] if "run" in step]
    assert first["run"] == command
    assert all("GITHUB_STEP_SUMMARY" in step["run"] for step in others)
    given = found["steps"][1]["with"]
    pythons = found.get("strategy", {}).get("matrix", {}).get("python", [given["python-version"]])
    assert set(pythons) <= set(PYTHONS)
    assert name != "ci" or pythons == [*PYTHONS]
    assert (ROOT / given["cache-dependency-path"]).exists()
