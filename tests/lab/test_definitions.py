"""Planted changes of small sources are seen under the name of what changed, and nothing else is."""

from io import BytesIO

import pytest

from attnlib.lab.definitions import STATEMENTS, WHOLE, definitions_of

PYTHON = '''\
"""Which kernel runs."""

import os
from math import ceil

LIMIT = 64  # heads
NAMES = ("fa2", "fa3")
FAST: bool = True


def pick(heads, page_size=16, *, window=None):
    """The kernel of a call."""
    if heads > LIMIT:  # many
        return "fa3"
    return "fa2" if window is None else NAMES[0]


class Planner:
    """Plans."""

    chunk = 128

    def __init__(self, size):
        """Keep the size."""
        self.size = size

    def plan(self, lens):
        return [ceil(length / self.chunk) for length in lens]


if os.environ.get("SLOW"):

    def wait():
        return 1

else:

    def wait():
        return 0
'''
CUDA = """\
// Splits of a request.
#pragma once
#include <cstdint>
#define MAX_SPLITS 128
namespace sched {
enum class Mask { None, Causal };
struct Info {
  int64_t tiles;
  bool split = false;
};
template <typename T>
inline T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
/* The cap
   of splits. */
__global__ void __launch_bounds__(128) cap(const int* lens, int n, int sms = 132) {
  if (n > 4) { lens += 1; }
  auto name = "cap // of";
}
}  // namespace sched
"""
SEEN_IN_PYTHON = {
    "a renamed parameter": ("page_size=16", "page=16", "pick"),
    "a flipped default": ("window=None", "window=0", "pick"),
    "a changed default": ("page_size=16", "page_size=32", "pick"),
    "a new parameter": ("heads, page_size", "heads, tp, page_size", "pick"),
    "parameters in another order": ("heads, page_size=16", "page_size, heads=16", "pick"),
    "a keyword that may stand in order": (" *,", "", "pick"),
    "a changed comparison": ("heads > LIMIT", "heads >= LIMIT", "pick"),
    "a negated condition": ("window is None", "window is not None", "pick"),
    "a changed text": ('return "fa3"', 'return "fa4"', "pick"),
    "a changed constant": ("LIMIT = 64", "LIMIT = 128", "LIMIT"),
    "a constant of another order": ('"fa2", "fa3"', '"fa3", "fa2"', "NAMES"),
    "a flipped constant": ("FAST: bool = True", "FAST: bool = False", "FAST"),
    "a changed constant of a class": ("chunk = 128", "chunk = 256", "Planner.chunk"),
    "a changed method": ("ceil(length", "int(length", "Planner.plan"),
    "a decorator": ("    def plan", "    @staticmethod\n    def plan", "Planner.plan"),
    "a base class": ("class Planner:", "class Planner(Base):", "Planner"),
    "a renamed method": ("def plan(", "def make_plan(", "Planner.make_plan Planner.plan"),
    "a function that is gone": ("def pick(", "def choose(", "choose pick"),
    "another condition around": ('"SLOW"', '"FAST"', "wait"),
    "a changed branch": ("return 0\n", "return 2\n", "wait"),
    "an import from elsewhere": ("from math import", "from numpy import", "ceil"),
}
SEEN_IN_CUDA = {
    "a changed macro": ("MAX_SPLITS 128", "MAX_SPLITS 64", STATEMENTS),
    "a new case": ("None, Causal", "None, Causal, Local", "Mask"),
    "fields in another order": ("int64_t tiles", "int32_t tiles", "Info"),
    "a flipped default of a field": ("split = false", "split = true", "Info"),
    "a changed operator": ("a + b - 1", "a + b + 1", "ceil_div"),
    "a renamed parameter": ("const int* lens, int n", "const int* lens, int m", "cap"),
    "a changed default": ("sms = 132", "sms = 148", "cap"),
    "other launch bounds": ("bounds__(128)", "bounds__(256)", "cap"),
    "a changed text": ('"cap // of"', '"cap // on"', "cap"),
    "a renamed function": ("ceil_div", "div_up", "ceil_div div_up"),
}
UNSEEN_IN_PYTHON = {
    "a comment": ("# heads", "# heads of a GPU"),
    "a comment that is gone": ("  # many", ""),
    "a docstring": ("The kernel of a call.", "Which kernel a call takes."),
    "a docstring of a class": ('    """Plans."""\n\n', ""),
    "a docstring of the module": ('"""Which kernel runs."""', ""),
    "quotes": ('"fa2", "fa3"', "'fa2', 'fa3'"),
    "brackets": ("heads > LIMIT", "(heads > LIMIT)"),
    "blank lines": ("\n\nclass Planner", "\n\n\n\nclass Planner"),
    "a line for each parameter": ("heads, page_size=16,", "heads,\n    page_size=16,\n   "),
    "a trailing comma": ("self, lens)", "self, lens,)"),
    "a number written otherwise": ("chunk = 128", "chunk = 0x80"),
}
UNSEEN_IN_CUDA = {
    "a comment": ("// Splits", "// How many splits"),
    "a comment over lines": ("The cap\n   of splits", "The cap"),
    "a comment that is gone": ("  // namespace sched", ""),
    "spaces": ("int64_t tiles;", "int64_t   tiles ;"),
    "a line for each parameter": ("lens, int n, int", "lens,\n    int n,\n    int"),
    "braces on lines of their own": ("T b) {", "T b)\n{"),
    "tabs": ("  return", "\t\treturn"),
}


def seen(path, before, old, new):
    """Names of the definitions that a replacement changes, adds or removes."""
    assert before.count(old) >= 1
    first, second = (
        definitions_of(path, BytesIO(text.encode())) for text in (before, before.replace(old, new))
    )
    names = first | second
    texts = {name: [side[name].text for side in (first, second) if name in side] for name in names}
    return {name for name, both in texts.items() if len(both) < 2 or both[0] != both[1]}


@pytest.mark.parametrize("planted", SEEN_IN_PYTHON)
def test_a_change_of_python_is_seen_where_it_is(planted):
    old, new, names = SEEN_IN_PYTHON[planted]
    assert seen("pick.py", PYTHON, old, new) == set(names.split())


@pytest.mark.parametrize("planted", SEEN_IN_CUDA)
def test_a_change_of_cuda_is_seen_where_it_is(planted):
    old, new, names = SEEN_IN_CUDA[planted]
    expected = {names} if names == STATEMENTS else set(names.split())
    assert seen("cap.cuh", CUDA, old, new) == expected


@pytest.mark.parametrize("planted", UNSEEN_IN_PYTHON)
def test_formatting_of_python_is_no_change(planted):
    assert seen("pick.py", PYTHON, *UNSEEN_IN_PYTHON[planted]) == set()


@pytest.mark.parametrize("planted", UNSEEN_IN_CUDA)
def test_formatting_of_cuda_is_no_change(planted):
    assert seen("cap.cuh", CUDA, *UNSEEN_IN_CUDA[planted]) == set()


def test_a_binary_changes_with_any_byte():
    one, same, other = (
        definitions_of("kernel.so", BytesIO(content))[WHOLE].text
        for content in (b"\x7fELF" * 10**6, b"\x7fELF" * 10**6, b"\x7fELF" * 10**6 + b"\0")
    )
    assert one == same != other
