"""What no text may say. Style is ruff's and mypy's."""

import re
from pathlib import Path

import pytest
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[2]


def project_texts():
    """Everything a reader opens: the top level, code, notebooks, tests, and what lies in data/."""
    texts = ".py .md .toml .yml .yaml .txt .cfg .ipynb .json .jsonl .parquet .css .cff"
    suffixes = {"", *texts.split()}
    folders = ("attnlib", "notebooks", "tests", "data", ".ci", ".github")
    top = (path for path in ROOT.iterdir() if path.name != ".git")
    found = [
        *top,
        *(p for folder in folders for p in (ROOT / folder).rglob("*")),
    ]
    skipped = {"__pycache__", ".ipynb_checkpoints"}
    for path in sorted(found):
        if path.is_file() and path.suffix in suffixes and not skipped & set(path.parts):
            yield path


def text_of(path):
    """What a file says; of published records, a line for each value in them but times."""
    if path.suffix != ".parquet":
        return path.read_text(errors="replace")
    columns = parquet.read_table(path).drop_columns(["run_us", "plan_us"]).columns
    return "\n".join({str(value) for column in columns for value in column.to_pylist()})


# One letter of each host in brackets, so that this line does not name them either.
HOSTS = r"py[p]i\.org|pythonhoste[d]\.org|npmj[s]\.(org|com)|anacond[a]\.(org|com)"
FOREIGN = re.compile(rf"(?<![\w.~])/(?:work|root|home|Users)/|{HOSTS}")


@pytest.mark.slow
def test_no_text_carries_a_path_of_somebodys_machine_or_the_host_of_a_package_registry():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in project_texts()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if FOREIGN.search(line)
    ]
    assert found == []
