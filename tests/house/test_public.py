"""The public names: listed once, all there, described, and the only ones that notebooks import."""

import ast
import doctest
import inspect
import re
from pathlib import Path

import nbformat
import pytest

import attnlib
from attnlib import core, studies

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"captured", "judged_splits", "vllm_steps"}
"""Of `attnlib.studies`, beside the studies themselves."""
PUBLIC = {
    "attnlib": {*attnlib.HOME, "doctor", "__version__"},
    "attnlib.core": set(core.HOME),
    "attnlib.studies": {"STUDIES", *studies.STUDIES, *MODULES},
    "attnlib.lab": {"claims"},
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DONE = set(attnlib.HOME) - {"STUDIES"}
"""Names of `attnlib` whose docstrings have the sections of numpydoc; `STUDIES` is a mapping."""


def is_python(line):
    """Whether a line of a cell is no magic and no command of the shell."""
    return not line.lstrip().startswith(("%", "!"))


def imported(code):
    """Module and name of each import of ours; the name of a module itself is `__version__`."""
    lines = filter(is_python, code.splitlines())
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnlib"):
            for alias in node.names:
                yield node.module, alias.name
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("attnlib"):
                    yield alias.name, "__version__"


@pytest.mark.parametrize("name", attnlib.HOME)
def test_a_public_name_is_there(name):
    assert getattr(attnlib, name) is not None


@pytest.mark.parametrize("name", core.HOME)
def test_a_public_name_of_core_is_there(name):
    assert getattr(core, name) is not None


def test_a_name_that_is_not_public_lists_those_that_are():
    with pytest.raises(AttributeError, match=r"attnlib\.core has no 'nothing'; it has AttnSpec"):
        core.nothing  # noqa: B018 - the attribute is asked for
    assert set(dir(core)) == set(core.HOME)
    assert set(dir(attnlib)) == {*attnlib.HOME, "__version__"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_readers_see_imports_public_names_alone(path):
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    found = set(imported(code))
    assert found
    for module, name in found:
        assert name in PUBLIC.get(module, ()), f"{module}.{name}"


def sections(value):
    """The sections of a docstring of numpydoc: heading -> text."""
    text = inspect.getdoc(value)
    found = re.findall(
        r"^(\w+)\n-{3,}\n(.*?)(?=^\w+\n-{3,}\n|\Z)",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return dict(found)


@pytest.mark.parametrize("name", sorted(DONE))
def test_a_public_name_says_what_it_takes_returns_and_raises(name):
    value = getattr(attnlib, name)
    found = sections(value)
    wanted = ["Parameters", "Returns", "Raises", "Examples"]
    if inspect.isclass(value):
        wanted.remove("Returns")
    parameters = list(inspect.signature(value).parameters)
    if not parameters:
        wanted.remove("Parameters")
    assert list(found) == wanted
    described = re.findall(r"^(\S.*?) : \S", found.get("Parameters", ""), flags=re.MULTILINE)
    names = [name.lstrip("*") for line in described for name in line.split(", ")]
    assert names == parameters


@pytest.mark.parametrize("name", sorted(DONE))
def test_the_example_of_a_public_name_runs(name, published_records):
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(getattr(attnlib, name), name, globs={})
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 0
    assert result.failed == 0
