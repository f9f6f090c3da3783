"""All that needs a GPU, in parts: `make gpu`; with LIMIT=540 in front it stops after so many
seconds, and the same command goes on. Exit status 0: all parts ran, 1: one failed, 3: go on.

A part is a file of GPU tests or a notebook, executed live; several GPUs of one kind take turns.
build/gpu/parts.jsonl has a line per part that ran as it is now, build/gpu/data what was measured;
what failed runs again, last. data/live_run.json says what ran, where, how long, which parts are
left, and at the end which verdicts on published claims are the same here. With GO_ON=1 parts in
that file count as run: another machine with such a GPU and these versions goes on.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from xml.etree import ElementTree

import torch

from attnlib import HOME
from attnlib.measure.files import write_whole
from attnlib.measure.machine import describe_versions, identify_gpu
from attnlib.report.build import choose_notebooks
from attnlib.run.record import strip_folders
from attnlib.studies import STUDIES
from attnlib.studies.claims import load_claims

ROOT = Path(__file__).resolve().parents[2]
BUILD, SUMMARY = ROOT / "build" / "gpu", ROOT / "data" / "live_run.json"
EXECUTE = """import pathlib, sys
from attnlib.report.build import execute
execute(pathlib.Path(sys.argv[1]))"""
VERDICTS = """import json
from attnlib.studies import claims
print(json.dumps({each.claim.id: each.finding.verdict for each in claims.verdicts()}))"""
UNTOLD = "open", "not measurable here"
IDLE = re.compile(
    r'\nSTUDY = Study\(\n.*?\n\)(?=\n)|\n *"""(?:(?!""").)*"""(?=\n)|nvidia-\w+-[0-9a-f]{8}',
    re.DOTALL,
)
"""What of a module's text decides nothing about a live part; see `tree`."""
NO_TESTS = 5
"""pytest's exit status where none was chosen."""
LIBRARIES = "torch", "triton", "flashinfer-python", "tokenspeed-fa3", "sgl-flash-mla", "sglang"


def code(part):
    """What a part runs: the text of its file, or a notebook's code cells."""
    text = (ROOT / part).read_text()
    if not part.endswith(".ipynb"):
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "code")


def tree(part):
    """A hash of what decides how a part comes out: its code, what tests share but for this file,
    and the package but for its report and files of studies that none of these needs.

    A notebook needs all of a study whose name it says, and what the lab imports for a public name
    in it; Python code what it imports or lists. Of a study's own definition only what a notebook
    measures counts, its headline jobs. Docstrings, and which machine's records are published,
    decide nothing.
    """
    own, shared, book = code(part), [], part.endswith(".ipynb")
    if not book:
        names = "**/conftest.py", "support/*.py"
        paths = (path for name in names for path in (ROOT / "tests").glob(name))
        shared = sorted(path for path in paths if path.name != "live_run.py")
    public = (f".{home}" for name, home in HOME.items() if book and re.search(rf"\b{name}\b", own))
    said = "\n".join([own, *public, *(path.read_text() for path in shared)])
    studies, lab = ({*(ROOT / "attnlib").glob(each)} for each in ("studies/*/*.py", "lab/*.py"))
    left = studies | lab

    def needed(path):
        study = path.parent.name
        ways = (
            rf"\.{study}\.{path.stem}\b|\.{study}\. import [^.]*\b{path.stem}\b",
            rf'STUDIES\["{study}"|studies import [^.]*\b{study}\b',
        )
        return re.search("|".join(ways), said) or (book and re.search(rf"\b{study}\b", own))

    while found := {*filter(needed, left)}:
        left -= found
        near = (re.sub(r"from \.(?!\.)", f"from .{p.parent.name}.", p.read_text()) for p in found)
        said = "\n".join([said, *near])
    digest = hashlib.sha256(own.encode())
    for path in (*sorted(ROOT.glob("attnlib/**/*.py")), *shared):
        if ROOT / "attnlib" / "report" not in path.parents and path not in left & studies:
            digest.update(IDLE.sub("", path.read_text()).encode())
    for name in sorted({*re.findall(r'"(\w+)"', own)} & {*STUDIES}) if book else ():
        digest.update(repr(STUDIES[name].jobs(headline=True)).encode())
    return digest.hexdigest()[:12]


def parts():
    """Names of the parts: test files that have GPU tests, then notebooks."""
    files = sorted(
        path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    )
    return [str(path.relative_to(ROOT)) for path in (*files, *choose_notebooks(ROOT / "notebooks"))]


def chains(names):
    """`names` in lists, each for one GPU: notebooks that measure a study in common do it once."""
    found = []
    for name in names:
        measured = {*re.findall(r'load_or_measure\(STUDIES\["(\w+)"', code(name))}
        akin = [each for each in found if measured & each[1]]
        found = [each for each in found if each not in akin]
        chain = [*(n for names, _ in akin for n in names), name]
        found.append((chain, measured.union(*(more for _, more in akin))))
    return [chain for chain, _ in found]


def gpus():
    """The GPUs that PyTorch sees, all of one kind: CUDA's word for each -> its name and id."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    found = {}
    for number in range(torch.cuda.device_count()):
        with torch.cuda.device(number):
            found[words[number] if words[0] else str(number)] = identify_gpu()
    if len({each["gpu"] for each in found.values()}) != 1:
        raise SystemExit(f"make gpu must have CUDA GPUs of one kind, got {found or 'none'}")
    return found


def run(name, seconds, environment):
    """A line for a part: what came of it. None if it did not end in time."""
    start, xml = time.monotonic(), BUILD / f"tests-{environment['CUDA_VISIBLE_DEVICES']}.xml"
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
        told["skips"] = dict(Counter(each.get("message") for each in suite.iter("skipped")))
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


def published_run(here):
    """Parts, verdicts and versions of `SUMMARY`, if it is to be gone on with from `here`."""
    if os.environ.get("GO_ON") != "1" or not SUMMARY.exists():
        return [], {}, {}
    told = json.loads(SUMMARY.read_text())
    both = told["versions"].keys() & here["versions"]
    wrong = sorted(name for name in both if told["versions"][name] != here["versions"][name])
    if wrong or told["gpu"] != here["gpu"]:
        raise SystemExit(
            f"GO_ON must be on a machine as in {SUMMARY.name}, {told['gpu']} {told['versions']}, "
            f"got {here['gpu']} with other {', '.join(wrong) or 'GPU'}"
        )
    return told["parts"], told["verdicts"], told["versions"]


def compare(told, environments):
    """`told` with each verdict that is told on a GPU beside the published one; others go first."""
    with ThreadPoolExecutor() as pool:
        published, *live = pool.map(
            verdicts, ({**os.environ, "ATTNLIB_MODE": "replay"}, *environments)
        )
    found = [pair for each in live for pair in each.items() if pair[1] not in UNTOLD]
    found.sort(key=lambda pair: pair[1] != published[pair[0]])  # the last of a name stays
    return told | {name: [published[name], word] for name, word in found}


class Run:
    """What ran of `now` (part -> its hash), where it is written, and until when it may go on."""

    def __init__(self, now, found, here, told, limit):
        self.now, self.here, self.told = now, here, told
        self.end, self.lock = time.monotonic() + limit, Lock()
        found = [part for part in found if part["tree"] == now.get(part["part"])]
        self.done = {part["part"]: part for part in found if not part["failed"]}
        self.failed = {part["part"] for part in found} - {*self.done}

    def left(self):
        return [name for name in self.now if name not in self.done]

    def write(self):
        """Say in `SUMMARY` what ran and what is left; returns it."""
        said = {
            **self.here,
            "parts": [self.done[name] for name in self.now if name in self.done],
            "left": self.left(),
            "verdicts": self.told,
            "of": len(load_claims()),
        }
        write_whole(SUMMARY, f"{json.dumps(said, indent=1)}\n".encode())
        return said

    def take(self, todo, gpu, environment):
        """Run chains of `todo`, an iterator that GPUs share, until none or no time is left."""
        for chain in todo:
            for name in chain:
                left = self.end - time.monotonic()
                part = run(name, left, environment) if left > 5 else None
                if part is None:
                    print(f"{name}: no time left; the same command goes on", flush=True)
                    return
                date = time.strftime("%Y-%m-%d", time.gmtime())
                line = {**part, "gpu_id": gpu["gpu_id"], "date": date, "tree": self.now[name]}
                print(line, flush=True)
                with self.lock, (BUILD / "parts.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                    self.done[name] = line
                    self.write()


def main(limit):
    kinds = gpus()
    # Beside what is measured lie the published records, which some notebooks show on a GPU too.
    published = {"ignore": shutil.ignore_patterns("*.jsonl*"), "dirs_exist_ok": True}
    shutil.copytree(ROOT / "data" / "records", BUILD / "data" / "records", **published)
    here = {"gpu": [*kinds.values()][0]["gpu"], "versions": describe_versions(LIBRARIES)}
    found, told, versions = published_run(here)
    here["versions"] = versions | here["versions"]
    journal = BUILD / "parts.jsonl"
    found += map(json.loads, journal.read_text().splitlines()) if journal.exists() else []
    ours = Run({name: tree(name) for name in parts()}, found, here, told, limit)
    todo = iter(chains(sorted(ours.left(), key=ours.failed.__contains__)))
    live = {**os.environ, "ATTNLIB_MODE": "live", "ATTNLIB_DATA": str(BUILD / "data")}
    environments = [live | {"CUDA_VISIBLE_DEVICES": word} for word in kinds]
    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(ours.take, [todo] * len(kinds), kinds.values(), environments))
    ours.told = compare(told, environments)
    said = ours.write()
    print(said["verdicts"], flush=True)
    return 3 if said["left"] else int(any(part["failed"] for part in said["parts"]))


if __name__ == "__main__":
    sys.exit(main(float(os.environ.get("LIMIT", "1e6"))))
