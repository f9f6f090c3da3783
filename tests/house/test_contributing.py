"""CONTRIBUTING.md: every step has its check, and names only what there is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
CODE = re.findall(r"`([^`]+)`", TEXT)


@pytest.mark.parametrize("section", ["A backend", "A kernel", "A study"])
def test_every_step_ends_with_the_command_that_checks_it(section):
    steps = re.split(r"^\d+\. ", SECTIONS[section], flags=re.M)[1:]
    assert len(steps) >= 7
    for step in steps:
        assert re.search(r"^ +Check: .*`[^`]+`$", step.strip(), re.M), step


def test_every_file_it_names_and_every_link_of_readme_is_there():
    words = {word for part in CODE for word in part.split()}
    paths = {word for word in words if "/" in word and not re.search(r"NAME|NN_|<machine>", word)}
    paths -= {".venv/bin/activate"}  # `make setup` makes it
    paths |= set(re.findall(r"\]\(([^)#]+)", TEXT + (ROOT / "README.md").read_text()))
    assert paths and [path for path in sorted(paths) if not (ROOT / path).exists()] == []
