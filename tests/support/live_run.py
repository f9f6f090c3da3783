"""All that needs a GPU, in parts: `make gpu`; with LIMIT=540 in front it stops after so many
seconds, and the same command goes on. Exit status 0: all parts ran, 1: one failed, 3: go on.

A part is a file of GPU tests or a notebook, executed live. build/gpu/parts.jsonl has a line per
part that ran as it is now, build/gpu/data what was measured; what failed runs again, last. When no
part is left, data/live_run.json says what ran, how long, and which verdicts on published claims are
the same here.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

from attnlib.measure.files import write_whole
from attnlib.measure.machine import describe_versions, identify_gpu
from attnlib.report.build import choose_notebooks
from attnlib.run.record import strip_folders

ROOT = Path(__file__).resolve().parents[2]
BUILD, SUMMARY = ROOT / "build" / "gpu", ROOT / "data" / "live_run.json"
EXECUTE = """import pathlib, sys
from attnlib.report.build import execute
execute(pathlib.Path(sys.argv[1]))"""
VERDICTS = """import json
from attnlib.studies import claims
print(json.dumps({each.claim.id: each.finding.verdict for each in claims.verdicts()}))"""
UNTOLD = "open", "not measurable here"
NO_TESTS = 5
"""pytest's exit status where none was chosen."""
LIBRARIES = "torch", "triton", "flashinfer-python", "tokenspeed-fa3", "sgl-flash-mla", "sglang"


def tree(part):
    """A hash of what decides how a part comes out: the package, the part, what tests share."""
    shared = ["attnlib/**/*.py"]
    if not part.endswith(".ipynb"):
        shared += ["tests/**/conftest.py", "tests/support/*.py"]
    digest = hashlib.sha256((ROOT / part).read_bytes())
    for path in sorted(path for pattern in shared for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def parts():
    """Names of the parts: test files that have GPU tests, then notebooks."""
    files = sorted(
        path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    )
    return [str(path.relative_to(ROOT)) for path in (*files, *choose_notebooks(ROOT / "notebooks"))]


def run(name, seconds, environment):
    """A line for a part: what came of it. None if it did not end in time."""
    start, xml = time.monotonic(), BUILD / "tests.xml"
    xml.unlink(missing_ok=True)  # a process that dies leaves none, and the last part's is not its
    tests = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={xml}", name]
    # A process waits for each of FlashInfer's modules to be compiled; what is timed runs alone.
    if name.startswith("tests/core/"):
        tests, environment = [*tests, "-n", "8"], {"MAX_JOBS": "2", **environment}
    command = ["-c", EXECUTE, str(ROOT / name)] if name.endswith(".ipynb") else tests
    try:
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            timeout=seconds,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return None
    told = {
        "part": name,
        "seconds": round(time.monotonic() - start, 1),
        "failed": int(ended.returncode not in (0, NO_TESTS)),
    }
    if xml.exists():
        (suite,) = ElementTree.parse(xml).getroot().iter("testsuite")
        count = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
        failed = count["failures"] + count["errors"]
        told |= {"failed": max(failed, told["failed"]), "skipped": count["skipped"]}
        told |= {"passed": count["tests"] - failed - count["skipped"]}
    if told["failed"]:
        last = (ended.stderr or ended.stdout).strip().splitlines()[-3:]
        told["reason"] = strip_folders("\n".join(last))
    return told


def verdicts(environment):
    ran = subprocess.run(
        [sys.executable, "-c", VERDICTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


def summary(lines, environment):
    """What ran, and how verdicts of claims compare with the published ones."""
    published = verdicts({**os.environ, "ATTNLIB_MODE": "replay"})
    here = {name: word for name, word in verdicts(environment).items() if word not in UNTOLD}
    other = {
        name: [published[name], word] for name, word in here.items() if word != published[name]
    }
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **identify_gpu(),
        "versions": describe_versions(LIBRARIES),
        "parts": lines,
        "verdicts": {"same": len(here) - len(other), "other": other, "of": len(published)},
    }


def main(limit):
    start = time.monotonic()
    # Beside what is measured lie the published records, which some notebooks show on a GPU too.
    published = {"ignore": shutil.ignore_patterns("*.jsonl*"), "dirs_exist_ok": True}
    shutil.copytree(ROOT / "data" / "records", BUILD / "data" / "records", **published)
    journal, now = BUILD / "parts.jsonl", {name: tree(name) for name in parts()}
    found = (
        [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    )
    found = [line for line in found if line.pop("tree") == now.get(line["part"])]
    done = {line["part"]: line for line in found if not line["failed"]}
    failed = {line["part"] for line in found} - {*done}
    environment = {**os.environ, "ATTNLIB_MODE": "live", "ATTNLIB_DATA": str(BUILD / "data")}
    for name in sorted(now, key=failed.__contains__):
        if name not in done:
            left = limit - (time.monotonic() - start)
            told = run(name, left, environment) if left > 5 else None
            if told is None:
                print(f"{name}: no time left; the same command goes on", flush=True)
                return 3
            done[name] = told
            with journal.open("a") as file:
                file.write(json.dumps({**told, "tree": now[name]}) + "\n")
        print(done[name], flush=True)
    said = summary([done[name] for name in now], environment)
    write_whole(SUMMARY, f"{json.dumps(said, indent=1)}\n".encode())
    print(said["verdicts"], flush=True)
    return int(any(line["failed"] for line in said["parts"]))


if __name__ == "__main__":
    sys.exit(main(float(os.environ.get("LIMIT", "1e6"))))
