"""Run all that needs a GPU, part by part: `make gpu`, or the parts that are named as arguments.

A part is a test file with GPU tests, or a notebook, executed live. data/live_run.json is written
after each part, so a run that was stopped (`timeout 540 make gpu`) goes on with the parts that
failed or did not run on this commit, GPU and libraries. Exit status 0: all passed, 1: one failed.
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
from attnlib.run.record import strip_folders

BUILD = Path("build/gpu").resolve()
RECORDS = Path("data/records")
SUMMARY = Path("data/live_run.json")
EXECUTE = "import sys; from attnlib.report.build import Path, execute; execute(Path(sys.argv[1]))"
LIBRARIES = "torch", "triton", "flashinfer-python", "tokenspeed-fa3", "sgl-flash-mla", "sglang"


def find_commit() -> str:
    """`COMMIT`, or what git says: "-dirty" if other files than the results differ."""
    if named := os.environ.get("COMMIT"):
        return named
    status = ["git", "status", "--porcelain", "--", ".", f":(exclude){SUMMARY}"]
    changed = subprocess.check_output(status, text=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    return f"{head}-dirty" if changed else head


def parts() -> list[str]:
    """Test files that have GPU tests, then notebooks."""
    tests = sorted(Path("tests").rglob("test_*.py"))
    files = [path for path in tests if "mark.gpu" in path.read_text()]
    return [str(path) for path in files + sorted(Path("notebooks").glob("*.ipynb"))]


def run(part: str) -> dict[str, object]:
    """What came of a part."""
    xml = BUILD / "tests.xml"
    xml.unlink(missing_ok=True)
    command = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={xml}"]
    if part.endswith(".ipynb"):
        command = ["-c", EXECUTE]
    settings = {**os.environ, "ATTNLIB_MODE": "live", "ATTNLIB_DATA": str(BUILD / "data")}
    how = {"env": settings, "capture_output": True, "text": True}
    started = time.monotonic()
    ended = subprocess.run([sys.executable, *command, part], **how)
    result = {"part": part, "seconds": round(time.monotonic() - started, 1), **count_tests(xml)}
    if ended.returncode != 0:
        last_lines = (ended.stdout + ended.stderr).strip().splitlines()[-3:]
        result["failed"] = result["failed"] or 1
        result["reason"] = strip_folders("\n".join(last_lines))
    return result


def count_tests(xml: Path) -> dict[str, object]:
    """Tests passed, failed and skipped, with the reasons of skips; a notebook has no tests."""
    suites = ElementTree.parse(xml).getroot().findall("testsuite") if xml.exists() else []
    failed = sum(int(suite.get("failures", 0)) + int(suite.get("errors", 0)) for suite in suites)
    skips = Counter(skip.get("message") for suite in suites for skip in suite.iter("skipped"))
    passed = sum(int(suite.get("tests", 0)) for suite in suites) - failed - skips.total()
    return {"passed": passed, "failed": failed, "skipped": skips.total(), "skips": dict(skips)}


def main(chosen: list[str]) -> int:
    """Run what is left of the chosen parts, or of all; returns the exit status."""
    if not torch.cuda.is_available():
        raise SystemExit("make gpu must have a CUDA GPU, got none")
    names, commit = parts(), find_commit()
    shutil.copytree(RECORDS, BUILD / RECORDS, dirs_exist_ok=True)
    here = {"gpu": identify_gpu()["gpu"], "versions": describe_versions(LIBRARIES)}
    before = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}
    is_same_place = all(before.get(name) == value for name, value in here.items())
    earlier = before["parts"] if is_same_place else []
    done = {part["part"]: part for part in earlier if part["commit"] == commit}
    for name in chosen or names:
        if name in done and not done[name]["failed"]:
            continue
        date = time.strftime("%Y-%m-%d", time.gmtime())
        done[name] = {**run(name), "date": date, "commit": commit}
        print(done[name], flush=True)
        left = [name for name in names if name not in done]
        summary = {**here, "parts": list(done.values()), "left": left}
        write_whole(SUMMARY, f"{json.dumps(summary, indent=1)}\n".encode())
    return int(any(part["failed"] for part in done.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
