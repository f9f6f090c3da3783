"""Run all that needs a GPU, part by part: `make gpu`.

A part is a test file with GPU tests, or a notebook, executed live. data/live_run.json gets a line
per part as soon as it ends. LIMIT=540 stops after so many seconds; the same command then goes on
with the parts that failed or did not run on this commit. Exit status 0: all parts passed, 1: one
failed, 3: some are left.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import torch

from attnlib.measure.files import write_whole
from attnlib.measure.machine import describe_versions, identify_gpu
from attnlib.report.build import choose_notebooks
from attnlib.run.record import strip_folders

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
SUMMARY = ROOT / "data" / "live_run.json"
EXECUTE = "import pathlib, sys; from attnlib.report.build import execute; "
EXECUTE += "execute(pathlib.Path(sys.argv[1]))"
LIBRARIES = "torch", "triton", "flashinfer-python", "tokenspeed-fa3", "sgl-flash-mla", "sglang"
LEAST_SECONDS = 5


def commit() -> str:
    """The commit under test: of git, or `COMMIT` where the tree came without it."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True)
    return os.environ.get("COMMIT") or found.stdout.strip() or "unknown"


def parts() -> list[str]:
    """Test files that have GPU tests, then notebooks."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [path for path in tests if "mark.gpu" in path.read_text()]
    files += choose_notebooks(ROOT / "notebooks")
    return [str(path.relative_to(ROOT)) for path in files]


def run(part: str, seconds: float) -> dict[str, object] | None:
    """What came of a part; None if it did not end in time."""
    xml = BUILD / "tests.xml"
    xml.unlink(missing_ok=True)
    command = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={xml}"]
    if part.endswith(".ipynb"):
        command = ["-c", EXECUTE]
    environment = {**os.environ, "ATTNLIB_MODE": "live", "ATTNLIB_DATA": str(BUILD / "data")}
    started = time.monotonic()
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    try:
        ended = subprocess.run([sys.executable, *command, part], timeout=seconds, **how)
    except subprocess.TimeoutExpired:
        return None
    told: dict[str, object] = {"part": part, "seconds": round(time.monotonic() - started, 1)}
    told |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit()}
    told |= counts(xml) if xml.exists() else {"failed": int(ended.returncode != 0)}
    if told["failed"]:
        last_lines = (ended.stdout + ended.stderr).strip().splitlines()[-3:]
        told["reason"] = strip_folders("\n".join(last_lines))
    return told


def counts(xml: Path) -> dict[str, object]:
    """Tests passed, failed and skipped, with the reasons of skips."""
    suite = next(ElementTree.parse(xml).getroot().iter("testsuite"))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skips = Counter(each.get("message") for each in suite.iter("skipped"))
    passed = int(suite.get("tests", 0)) - failed - skips.total()
    return {"passed": passed, "failed": failed, "skipped": skips.total(), "skips": dict(skips)}


def main(limit: float) -> int:
    """Run what is left; returns the exit status."""
    if not torch.cuda.is_available():
        raise SystemExit("make gpu must have a CUDA GPU, got none")
    end = time.monotonic() + limit
    shutil.copytree(ROOT / "data" / "records", BUILD / "data" / "records", dirs_exist_ok=True)
    here = {"gpu": identify_gpu()["gpu"], "versions": describe_versions(LIBRARIES)}
    before = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}
    same_place = all(before.get(name) == value for name, value in here.items())
    done = {each["part"]: each for each in before["parts"]} if same_place else {}
    done = {name: each for name, each in done.items() if each.get("commit") == commit()}
    for part in parts():
        if part in done and not done[part]["failed"]:
            continue
        left = end - time.monotonic()
        told = run(part, left) if left > LEAST_SECONDS else None
        if told is None:
            break
        done[part] = told
        print(told, flush=True)
        rest = [name for name in parts() if name not in done]
        summary = {**here, "parts": list(done.values()), "left": rest}
        write_whole(SUMMARY, f"{json.dumps(summary, indent=1)}\n".encode())
    if len(done) < len(parts()):
        return 3
    return int(any(each["failed"] for each in done.values()))


if __name__ == "__main__":
    sys.exit(main(float(os.environ.get("LIMIT", "1e6"))))
