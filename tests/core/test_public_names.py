"""Docstrings of `attnlib.core`: what each public name takes, and a worked example that runs."""

import doctest
import inspect
import re

import pytest

from attnlib import core
from attnlib.core.metadata.launch import interpreting

ON_GPU_ALONE = {"Fa2Planner", "precompute", "without_overlap"}
"""Names whose examples need a GPU and a library: they are shown, not run."""
LAUNCHES = {
    "build_decode_metadata",
    "build_fa2_plan",
    "build_kv_indices",
    "build_step_schedules",
}
"""Names whose examples launch a kernel on the CPU, in Triton's interpreter."""


def section(name, title):
    """The text of a section of a docstring, or the empty string."""
    docstring = inspect.cleandoc(getattr(core, name).__doc__)
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\w+\n-+$|\Z)", docstring, re.M | re.S)
    return found[1] if found else ""


def documented(text):
    """The names that the lines `name, name : type` of a section explain."""
    lines = re.findall(r"^([\w, *]+) : ", text, re.M)
    return {name.strip(" *") for line in lines for name in line.split(",")}


def wanted(name):
    """Parameters by their names, those that are collected by `**` aside."""
    parameters = inspect.signature(getattr(core, name)).parameters.values()
    collected = inspect.Parameter.VAR_KEYWORD
    return {each.name for each in parameters if each.kind != collected and each.name[0] != "_"}


@pytest.mark.parametrize("name", core.HOME)
def test_the_table_of_the_package_says_where_a_name_belongs(name):
    assert re.search(rf"^\| .* \|.*`{name}`.*\|$", core.__doc__, re.M)


@pytest.mark.parametrize("name", core.HOME)
def test_a_docstring_explains_each_parameter(name):
    fields = section(name, "Parameters") or section(name, "Attributes")
    assert wanted(name) <= documented(fields)


@pytest.mark.parametrize("name", core.HOME)
def test_a_docstring_says_what_a_function_returns(name):
    value = getattr(core, name)
    returned = inspect.signature(value).return_annotation
    gives_nothing = (
        inspect.isclass(value) or returned in (None, "None") or "Iterator" in str(returned)
    )
    assert bool(section(name, "Returns")) != gives_nothing


@pytest.mark.parametrize("name", core.HOME)
def test_the_example_of_a_name_runs(name):
    assert ">>>" in section(name, "Examples")
    if name in LAUNCHES and not interpreting():
        pytest.skip("the example has tensors of the CPU")
    value = getattr(core, name)
    globs = {each: getattr(core, each) for each in core.HOME}
    parser = doctest.DocTestParser()
    example = parser.get_doctest(inspect.cleandoc(value.__doc__), globs, name, None, None)
    printed = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    result = runner.run(example, out=printed.append)
    assert result.failed == 0, "".join(printed)
    assert (result.attempted == 0) == (name in ON_GPU_ALONE)


def test_a_star_import_has_every_public_name():
    names = {}
    exec("from attnlib.core import *", names)
    assert {*core.HOME} <= names.keys()
