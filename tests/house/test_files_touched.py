"""How many files a new backend, column and kernel touch: each is added to a copy of the tree.

A backend of a new library, in two modes, is its module and its rows in the table, also where the
library needs Hopper and tests have no stand-in for it. A column is its entry in the schema. A
kernel of metadata is itself, its rival and oracle, and its row of the contract. A study is one
file, also one with a mistake. All else follows: contracts, measuring, the versions of records,
frames, the doctor.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKEND = '''"""A library that no release of ours knows: attention by matrix products, anywhere."""

from importlib import import_module

from ..batch import PagedKV
from ..extend import ExtendBatch
from .base import Backend
from .sdpa import Sdpa
from .table import Entry


class Toy(Sdpa):
    """The same attention, by another name."""

    @classmethod
    def unsupported(cls, entry: Entry, spec, mask: str) -> str:
        """One head_dim less than the class above."""
        if spec.head_dim == 256:
            return "head_dim must be at most 128, got 256"
        return super().unsupported(entry, spec, mask)


class ToyExtend(Backend[ExtendBatch, PagedKV]):
    """Several queries per request, by a library that no machine has."""

    def prepare(self, batch, held):
        """Nothing is planned."""
        import_module("toy_attention")

    def attend(self, q, cache, plan):
        """The library's call."""
        return import_module("toy_attention").extend(q, cache, plan)
'''
ROWS = {
    "LIBRARIES = {\n": (
        "LIBRARIES = {\n"
        '    "toy": Library(("packaging",)),\n'
        '    "toy-extend": Library(("toy-attention-nobody-has",)),\n'
    ),
    "FAMILIES = {\n": 'FAMILIES = {\n    "toy": Family(("toy_kernel",), True, library="Toy"),\n',
    "_ENTRIES = (\n": (
        "_ENTRIES = (\n"
        '    Entry("toy-extend", "extend", "toy:ToyExtend", "toy"),\n'
        '    Entry("toy-attention", "decode", "toy:Toy", label="toy", words=("TOY",)),\n'
    ),
}
COLUMN = {
    "COLUMNS = (\n": (
        'COLUMNS = (\n    Column("host.letters", COUNT, "of the device", in_frame=True, ask=len),\n'
    ),
}
KERNEL = '''"""Page arrays, by another name."""

from .kv_indices import OUTPUTS, build_kv_indices

build_toy = build_kv_indices
'''
BUILDER = '''"""Our kernel, and what is right."""

from ....core.metadata.toy import OUTPUTS, build_toy
from .. import oracle
from . import Builder

BUILDER = Builder({"metadata-fused": build_toy}, outputs=OUTPUTS, oracle=oracle.kv_indices)
'''
CONTRACT = {
    "import decode, device, kv_indices, schedules\n": (
        "import decode, device, kv_indices, schedules, toy\n"
    ),
    "BUILDERS = {\n": 'BUILDERS = {\n    "toy": replace(KV_INDICES, ours=toy.build_toy),\n',
}
KERNEL_MEASURED = """
import os

os.environ["TRITON_INTERPRET"] = "1"

from support.records import measure

from attnlib.measure.calls.form import Item
from attnlib.studies.metadata.case import MetadataCase

record = measure(Item("metadata-fused", "host", MetadataCase("toy", 2, 16, 64)))
assert (record.status, record.oracle_error) == ("ok", 0.0), record
"""
MEASURED = """
from support.studies import SPEC, grid_of, study_of

from attnlib.core import backends
from attnlib.core.backends.table import FAMILY_OF, RECORDED
from attnlib.doctor import examine
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.run import store
from attnlib.run.frame import LABELS
from attnlib.run.study import Sweep

if __name__ == "__main__":
    study = study_of(grid_of(DecodeCase(SPEC, 1, 8), backends=("toy-attention",)))
    assert Sweep().measure(study) == 1
    frame = store.find("demo", store.machines("demo")[0])
    row = store.read("demo", store.machines("demo")[0]).to_pylist()[0]
    assert (row["status"], row["host.letters"]) == ("ok", len("cpu")), row
    assert examine()["backends"]["toy-attention"] == ""
    assert row["versions.packaging"] and "packaging" in RECORDED
    assert frame.letters.tolist() == [3] and frame.backend.tolist() == ["toy-attention"]
    assert LABELS["toy-attention"] == "toy" and FAMILY_OF["toy_kernel"] == "toy"
    store.publish("demo")
    assert store.find("demo", store.machines("demo")[0]).letters.tolist() == [3]
"""


def change(path, rows):
    text = path.read_text()
    for before, after in rows.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path.write_text(text)


@pytest.fixture
def copy(tmp_path):
    """The package and the tests of backends and records, as a copy that may be changed."""
    left_out = shutil.ignore_patterns("__pycache__", "data")
    shutil.copytree(ROOT / "attnlib", tmp_path / "attnlib", ignore=left_out)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for place in ("data", "attnlib/data"):
        (tmp_path / place).symlink_to(ROOT / "data")
    return tmp_path


def run(folder, *command, stream="stdout"):
    (folder / "records").mkdir(exist_ok=True)
    paths = [str(folder), str(folder / "tests")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "ATTNLIB_DATA": str(folder / "records"),
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return getattr(done, stream)


QUICK = ("-m", "pytest", "-q", "-p", "no:nbval", "-p", "no:cacheprovider")


@pytest.mark.slow
def test_a_backend_of_a_new_library_touches_two_files_and_a_column_one(copy):
    backends = copy / "attnlib" / "core" / "backends"
    (backends / "toy.py").write_text(BACKEND)
    change(backends / "table.py", ROWS)
    change(copy / "attnlib" / "run" / "schema.py", COLUMN)
    (copy / "measured.py").write_text(MEASURED)
    run(copy, "measured.py")
    contract = run(copy, *QUICK, "tests/core/test_backends.py", "-k", "toy or new_backend")
    assert "passed" in contract and "test_a_new_backend" not in contract, contract
    run(copy, *QUICK, "tests/run/test_schema.py", "-k", "not readme")


@pytest.mark.slow
def test_a_kernel_of_metadata_touches_three_files(copy):
    (copy / "attnlib" / "core" / "metadata" / "toy.py").write_text(KERNEL)
    (copy / "attnlib" / "studies" / "metadata" / "builders" / "toy.py").write_text(BUILDER)
    change(copy / "tests" / "support" / "metadata_cases.py", CONTRACT)
    contract = run(copy, *QUICK, "tests/core/test_metadata_contract.py", "-k", "toy")
    assert "passed" in contract, contract
    (copy / "measured.py").write_text(KERNEL_MEASURED)
    run(copy, "measured.py")


def study_of_the_checklist():
    """The template of CONTRIBUTING.md, named `toy_cost`, of host code as its first item says."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, section = text.partition("## A study")
    study = section.partition("```python\n")[2].partition("```")[0]
    study = re.sub(r'\("flashinfer-fa2", .*\)', '("sdpa",)', study)
    study = study.replace("16, 8192)", "2, 64)").replace("NAME", "toy_cost")
    starts = {"Study": "Study(", "Grid": "Grid(CASES, BACKENDS, "}
    for noun, arguments in re.findall(r"`(Study|Grid)\(([^`]+)\)`", section):
        study = study.replace(starts[noun], f"{starts[noun]}{arguments}, ")
    assert study.count("timers=") == 2 and study.count("ceilings=") == 1
    return study


ASKED_OF_STUDIES = """
import sys

from attnlib import load_or_measure
from attnlib.cli import main

heads = ["--heads", "32/8", "--lens", "8192x16"]
assert main(["advise", "--gpu", "h100", *heads]) == 0
for name in ("toy_cost", "toy_folder", "toy_name", "toy_none"):
    assert main(["measure", name]) == 2
    assert main(["bisect", "--package", "flashinfer-python", "--good", "0.5.3", "--bad", "0.6.3",
                 "--study", name, "--case", "heads=32/8 lens=8192x16"]) == 2
    try:
        load_or_measure(name)
    except ValueError as error:
        print("load:", error, file=sys.stderr)
"""
MISTAKES = {
    "toy_cost": "toy_cost.py:10: TypeError: Study.__init__() got an unexpected keyword argument",
    "toy_folder": "toy_folder/__init__.py:1: SyntaxError: invalid syntax",
    "toy_name": "toy_name.py: ValueError: name must be 'toy_name', as the file's, got 'other'",
    "toy_none": "toy_none.py: ValueError: STUDY must be a Study, got 3",
}


@pytest.mark.slow
def test_a_study_is_one_file_and_one_of_host_code_is_measured_anywhere(copy):
    studies = copy / "attnlib" / "studies"
    study = study_of_the_checklist()
    (studies / "toy_cost.py").write_text(study)
    run(copy, "-m", "attnlib", "measure", "toy_cost")
    records = list((copy / "records" / "records").glob("*/toy_cost/*.json"))
    assert len(records) == 4 * 2  # rounds x (a call, its A/A item); the second grid is a part


@pytest.mark.slow
def test_a_mistake_in_a_study_is_one_sentence_and_stops_no_other(copy):
    studies = copy / "attnlib" / "studies"
    study = study_of_the_checklist()
    (studies / "toy_cost.py").write_text(study.replace("question=", "timers=(), question="))
    (studies / "toy_folder").mkdir()
    (studies / "toy_folder" / "__init__.py").write_text("__all__ = = []\n")
    (studies / "toy_name.py").write_text(study.replace('"toy_cost"', '"other"'))
    (studies / "toy_none.py").write_text("STUDY = 3\n")
    (copy / "records").symlink_to(ROOT / "data")
    script = copy / "asked.py"
    script.write_text(ASKED_OF_STUDIES)
    told = run(copy, str(script), stream="stderr")
    assert "Traceback" not in told
    for name, mistake in MISTAKES.items():
        sentence = f"study {name!r} must be importable, attnlib/studies/{mistake}"
        lines = [line for line in told.splitlines() if sentence in line]
        assert len(lines) == 4, told
        starts = ["left out: ", "attnlib measure: ", "attnlib bisect: ", "load: "]
        assert [line.partition("study ")[0] for line in lines] == starts
