"""What CI runs: what a developer runs, on all Pythons."""

from pathlib import Path

import pytest
import yaml
from test_packaging import PYTHONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "job", "commands"), [("ci", "test", [".ci/run"]), ("report", "build", ["make report"])]
)
def test_a_workflow_runs_what_a_developer_runs_on_pythons_that_the_lock_is_for(name, job, commands):
    found = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"][job]
    assert [step["run"] for step in found["steps"] if "run" in step] == commands
    given = found["steps"][1]["with"]
    pythons = found.get("strategy", {}).get("matrix", {}).get("python", [given["python-version"]])
    assert set(pythons) <= set(PYTHONS) and (name == "report" or pythons == [*PYTHONS])
    assert (ROOT / given["cache-dependency-path"]).exists()
