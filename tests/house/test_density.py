"""The package reads at first sight: few tokens a line, and none of some dense spellings."""

import ast
from functools import cache
from pathlib import Path

import pytest
from support.density import (
    LONG_FUNCTION,
    LONG_LINE,
    ROOT,
    Density,
    long_functions,
    long_functions_in,
    modules,
)

MOST_TOKENS_A_LINE = 7.5
MOST_LONG_LINES = 0.005
"""Share of code lines with `LONG_LINE` tokens or more."""
PACKAGE = ROOT / "attnlib"
WRITTEN_OUT = (
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.GeneratorExp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
)


def splats(tree):
    """What is written in place only to be taken apart again: `*(a, b)`, `**{"a": 1}`."""
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, ast.Starred):
            parts = [node.value]
        elif isinstance(node, ast.keyword) and node.arg is None:
            parts = [node.value]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            parts = [value for key, value in pairs if key is None]
        for part in parts:
            if isinstance(part, WRITTEN_OUT):
                yield part


def split_texts(tree):
    """A constant list as the words of a text: `"a b".split()`."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and node.func.attr == "split" and isinstance(node.func.value, ast.Constant):
            yield node


def nested_choices(tree):
    """A conditional expression inside another one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            inner = [each for each in ast.walk(node) if isinstance(each, ast.IfExp)]
            if len(inner) > 1:
                yield node


@cache
def texts():
    return {path: path.read_text() for path in modules(PACKAGE)}


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def require_none(check):
    """Fail with the places in the package that a check finds."""
    found = []
    for path, text in texts().items():
        for node in check(ast.parse(text)):
            found.append(place(path, node.lineno))
    assert not found, "\n".join(found)


def test_lines_have_few_tokens():
    tokens = {}
    for path, text in texts().items():
        for line, count in Density.of(text).tokens.items():
            tokens[place(path, line)] = count
    long_lines = [where for where, count in tokens.items() if count >= LONG_LINE]
    assert len(long_lines) <= MOST_LONG_LINES * len(tokens), "\n".join(long_lines)
    mean = sum(tokens.values()) / len(tokens)
    densest = sorted(tokens, key=tokens.__getitem__)[-20:]
    assert mean <= MOST_TOKENS_A_LINE, "\n".join(densest)


def test_functions_are_short():
    found = long_functions(PACKAGE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "above, docstring, lines, is_long",
    [
        ("", "", LONG_FUNCTION - 1, False),
        ("", "", LONG_FUNCTION, True),
        ("", '    """One.\n\n    Two.\n    """\n', LONG_FUNCTION - 1, False),
        ("", '    """One.\n\n    Two.\n    """\n', LONG_FUNCTION, True),
        ("@triton.jit\n", "", LONG_FUNCTION, False),
        ("@triton.jit(do_not_specialize=['n'])\n", "", LONG_FUNCTION, False),
        ("@cache\n", "", LONG_FUNCTION, True),
    ],
)
def test_only_kernels_and_docstrings_may_be_long(above, docstring, lines, is_long):
    text = f"{above}def name():\n{docstring}" + lines * "    pass\n"
    assert bool(list(long_functions_in(text))) == is_long


def test_nothing_is_written_out_to_be_splatted():
    require_none(splats)


def test_no_constant_list_is_a_text_that_is_split():
    require_none(split_texts)


def test_no_conditional_expression_is_in_another():
    require_none(nested_choices)


@pytest.mark.parametrize(
    "check, bad, good",
    [
        (splats, "f(*(a, b))", "f(*names)"),
        (splats, "[*(x for x in y)]", "[*y]"),
        (splats, "f(**{'a': 1})", "f(**options)"),
        (splats, "{**{k: 1 for k in y}}", "{**y}"),
        (split_texts, "'a b'.split()", "text.split()"),
        (nested_choices, "a if b else c if d else e", "a if b else c"),
    ],
)
def test_the_checks_find_what_they_name(check, bad, good):
    assert list(check(ast.parse(bad)))
    assert not list(check(ast.parse(good)))
