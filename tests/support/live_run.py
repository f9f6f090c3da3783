"""Run all that needs a GPU, part by part: `make gpu`, or the parts that are named as arguments.

A part is a test file with GPU tests, or a notebook, executed live. data/live_run.json is written
after each, so a run that was stopped goes on with what failed or did not run on this commit
(`COMMIT` names it where no git is), GPU and libraries. Exit status 1: a part failed. At the end the
claims are judged by this GPU's own records of the notebooks' few shapes.

`--limit S` ends a part after so many seconds, as failed. `--workers N` runs N parts side by side:
they disturb each other's times, which then say nothing. `--notebooks` runs the notebooks alone.
What a part printed stays in build/gpu/logs.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from attnlib.core.backends.table import RECORDED
from attnlib.measure.files import write_whole
from attnlib.measure.machine import describe_versions, identify_gpu
from attnlib.run.rows import strip_folders

BUILD = Path("build/gpu").resolve()
DATA = Path("data")
LOGS = BUILD / "logs"
SUMMARY = DATA / "live_run.json"
LIVE = {**os.environ, "ATTNLIB_MODE": "live", "ATTNLIB_DATA": str(BUILD / DATA)}
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


def run(part: str, limit_s: float, own_lock: bool) -> dict[str, object]:
    """What came of a part within its seconds; with a lock of its own others may use the GPU."""
    command = ["-c", EXECUTE] if part.endswith(".ipynb") else PYTEST
    log = LOGS / f"{Path(part).stem}.log"
    locks = LOGS / Path(part).stem
    locks.mkdir(parents=True, exist_ok=True)
    env = {**LIVE, "ATTNLIB_LOCKS": str(locks)} if own_lock else LIVE
    started = time.monotonic()
    with log.open("w") as output:
        status = ended_within(
            limit_s,
            [sys.executable, *command, part],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    printed = log.read_text(errors="replace")
    result = {"part": part, "seconds": round(time.monotonic() - started, 1)}
    result |= count_tests(printed)
    if status != 0:
        reason = "\n".join(printed.strip().splitlines()[-3:])
        if status is None:
            reason = f"not done after {limit_s:g} s: {reason}"
        result["failed"] = result["failed"] or 1
        result["reason"] = strip_folders(reason)
    return result


def ended_within(limit_s: float, command: list[str], **options: object) -> int | None:
    """Exit status of a command, or None: it and its children are killed after `limit_s`."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:  # after Ctrl-C, too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def count_tests(output: str) -> dict[str, object]:
    """Tests by outcome, from pytest's last line, and its reasons of skips; none of a notebook."""
    counts = dict.fromkeys(("passed", "skipped", "failed"), 0)
    ends = [line for line in output.splitlines() if re.search(r" in [\d.]+s\b", line)]
    found = re.findall(r"(\d+) (passed|skipped|failed|error)", "".join(ends[-1:]))
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


def asked(arguments: list[str]) -> argparse.Namespace:
    """The options and the chosen parts of a command line."""
    parser = argparse.ArgumentParser(description="GPU tests and notebooks, live")
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of a part")
    parser.add_argument("--workers", type=int, default=1, help="parts side by side")
    parser.add_argument("--notebooks", action="store_true", help="no test files")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run what is left of the chosen parts, or of all; returns the exit status."""
    if not torch.cuda.is_available():
        raise SystemExit("make gpu must have a CUDA GPU, got none")
    options = asked(arguments)
    names = parts()
    commit = os.environ.get("COMMIT") or find_commit()
    shutil.copytree(DATA, BUILD / DATA, dirs_exist_ok=True)
    here = {"gpu": identify_gpu()["gpu"], "versions": describe_versions(RECORDED)}
    done = done_before(here, commit)
    chosen = options.parts or names
    if options.notebooks:
        chosen = [name for name in chosen if name.endswith(".ipynb")]
    to_run = [name for name in chosen if name not in done or done[name]["failed"]]
    side_by_side = options.workers > 1
    with ThreadPoolExecutor(options.workers) as pool:
        running = [pool.submit(run, name, options.limit, side_by_side) for name in to_run]
        for future in as_completed(running):
            result = future.result() | {"date": time.strftime("%Y-%m-%d"), "commit": commit}
            done[result["part"]] = result
            print_result(result)
            keep_summary(here, names, done)
    return int(any(part["failed"] for part in done.values()))


def done_before(here: dict[str, object], commit: str) -> dict[str, dict[str, object]]:
    """Name -> what came of the parts that ran on this GPU, these libraries and this commit."""
    before = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {"parts": []}
    if {name: before.get(name) for name in here} != here:
        return {}
    return {part["part"]: part for part in before["parts"] if part["commit"] == commit}


def print_result(result: dict[str, object]) -> None:
    """A line: the part, its seconds, and what failed."""
    outcome = f"FAILED: {result['reason']}" if result["failed"] else "ok"
    print(f"{result['seconds']:7.1f} s  {result['part']}: {outcome}", flush=True)


def keep_summary(
    here: dict[str, object],
    names: list[str],
    done: dict[str, dict[str, object]],
) -> None:
    """Write what has run so far; once nothing is left, judge the claims."""
    left = [name for name in names if name not in done]
    summary = {
        **here,
        "parts": list(done.values()),
        "left": left,
        "agrees": "not compared" if left else compare_claims(),
    }
    write_whole(SUMMARY, f"{json.dumps(summary, indent=1)}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
