"""Run all that needs a GPU, part by part: `make gpu`, or the parts that are named as arguments.

A part is a test file with GPU tests, or a notebook, executed live. data/live_run.json is written
after each, so a run that was stopped goes on with what failed or did not run on this commit
(`COMMIT` names it where no git is), GPU and libraries. Exit status 1: a part failed. At the end the
claims are judged by this GPU's own records of the notebooks' few shapes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from attnlib.core.backends.table import RECORDED
from attnlib.measure.files import write_whole
from attnlib.measure.machine import describe_versions, identify_gpu
from attnlib.run.rows import strip_folders

BUILD = Path("build/gpu").resolve()
RECORDS = Path("data/records")
SUMMARY = Path("data/live_run.json")
LIVE = {**os.environ, "ATTNLIB_MODE": "live", "ATTNLIB_DATA": str(BUILD / "data")}
REPLAY = {**os.environ, "ATTNLIB_MODE": "replay"}
PYTEST = ["-m", "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider"]
EXECUTE = (
    "import sys; from attnlib.lab.report.build import Path, execute; execute(Path(sys.argv[1]))"
)


def find_commit() -> str:
    """What git says: "-dirty" if other files than the results differ."""
    status = ["git", "status", "--porcelain", "--", ".", f":(exclude){SUMMARY}"]
    dirty = "-dirty" if subprocess.check_output(status) else ""
    return subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip() + dirty


def parts() -> list[str]:
    """Test files that have GPU tests, then notebooks."""
    files = [p for p in sorted(Path("tests").rglob("test_*.py")) if "mark.gpu" in p.read_text()]
    return [str(path) for path in files + sorted(Path("notebooks").glob("*.ipynb"))]


def run(part: str) -> dict[str, object]:
    """What came of a part."""
    command = ["-c", EXECUTE] if part.endswith(".ipynb") else PYTEST
    started = time.monotonic()
    how = {"env": LIVE, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, *command, part], **how)
    result = {"part": part, "seconds": round(time.monotonic() - started, 1)}
    result |= count_tests(ended.stdout)
    if ended.returncode != 0:
        last_lines = (ended.stdout + ended.stderr).strip().splitlines()[-3:]
        result["failed"] = result["failed"] or 1
        result["reason"] = strip_folders("\n".join(last_lines))
    return result


def count_tests(output: str) -> dict[str, object]:
    """Tests by outcome, from pytest's last line, and its reasons of skips; none of a notebook."""
    counts = dict.fromkeys(("passed", "skipped", "failed"), 0)
    last_line = output.splitlines()[-1:]
    found = re.findall(r"(\d+) (passed|skipped|failed|error)", "".join(last_line))
    for number, word in found:
        counts["failed" if word == "error" else word] += int(number)
    return {**counts, "skips": re.findall(r"^SKIPPED (\[\d+\] .*)$", output, re.MULTILINE)}


def compare_claims() -> str:
    """How many claims get the published verdict by this GPU's records, and which get another."""
    command = [sys.executable, "-m", "attnlib", "claims", "--json"]
    here, published = (json.loads(subprocess.check_output(command, env=e)) for e in (LIVE, REPLAY))
    judged = [pair for pair in zip(here, published, strict=True) if pair[0]["records"]]
    others = [ours["id"] for ours, theirs in judged if ours["verdict"] != theirs["verdict"]]
    return f"{len(judged) - len(others)} of {len(judged)} claims, not {others}"


def main(chosen: list[str]) -> int:
    """Run what is left of the chosen parts, or of all; returns the exit status."""
    if not torch.cuda.is_available():
        raise SystemExit("make gpu must have a CUDA GPU, got none")
    names = parts()
    commit = os.environ.get("COMMIT") or find_commit()
    shutil.copytree(RECORDS, BUILD / RECORDS, dirs_exist_ok=True)
    here = {"gpu": identify_gpu()["gpu"], "versions": describe_versions(RECORDED)}
    before = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {"parts": []}
    earlier = before["parts"] if {name: before.get(name) for name in here} == here else []
    done = {part["part"]: part for part in earlier if part["commit"] == commit}
    for name in chosen or names:
        if name not in done or done[name]["failed"]:
            done[name] = run(name) | {"date": time.strftime("%Y-%m-%d"), "commit": commit}
            print(done[name], flush=True)
            left = [name for name in names if name not in done]
            agrees = "not compared" if left else compare_claims()
            summary = {
                **here,
                "parts": list(done.values()),
                "left": left,
                "agrees": agrees,
            }
            write_whole(SUMMARY, f"{json.dumps(summary, indent=1)}\n".encode())
    return int(any(part["failed"] for part in done.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
