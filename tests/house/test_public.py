"""The public names: listed once, all there, and the only ones that notebooks import."""

import ast
from pathlib import Path

import nbformat
import pytest

import attnlib
from attnlib import core, studies

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"captured", "claims", "vllm_steps"}
"""Of `attnlib.studies`, beside the studies themselves."""
PUBLIC = {
    "attnlib": {*attnlib.HOME, "doctor", "__version__"},
    "attnlib.core": set(core.HOME),
    "attnlib.studies": {"STUDIES", *studies.STUDIES, *MODULES},
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def imported(code):
    lines = [line for line in code.splitlines() if not line.lstrip().startswith(("%", "!"))]
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnlib"):
            yield from ((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((a.name, "__version__") for a in node.names if a.name.startswith("attnlib"))


@pytest.mark.parametrize("name", [*attnlib.HOME, *(f"core.{name}" for name in core.HOME)])
def test_a_public_name_is_there(name):
    module, _, last = name.rpartition(".")
    assert getattr(core if module else attnlib, last) is not None


def test_a_name_that_is_not_public_lists_those_that_are():
    with pytest.raises(AttributeError, match=r"attnlib\.core has no 'nothing'; it has AttnSpec"):
        core.nothing  # noqa: B018 - the attribute is asked for
    assert {*dir(core)} == {*core.HOME} and {*dir(attnlib)} == {*attnlib.HOME, "__version__"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_readers_see_imports_public_names_alone(path):
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    found = set(imported(code))
    assert found
    assert {pair for pair in found if pair[1] not in PUBLIC.get(pair[0], ())} == set()
