"""One-line mutations drawn by a seed, and whether the tests that run the line notice them.

    python tests/support/drawn_mutations.py SEED COUNT DATA FILE...     in a copy of the tree

DATA is what `coverage` with `dynamic_context = test_function` wrote of the tests as they are. A
line comes out per mutation, with the test that failed; each file is put back. Of a line that many
tests run some are drawn, so try a survivor again with all tests of its module.
"""

import ast
import io
import random
import subprocess
import sys
import tokenize
from pathlib import Path

from coverage import CoverageData

SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "//": "*",
    "/": "*",
    "and": "or",
    "or": "and",
    "not": "",
    "in": "not in",
    "is": "is not",
    "if": "if not",
    "True": "False",
    "False": "True",
    "continue": "break",
}
ROOT = Path(__file__).resolve().parents[2]
MOST_TESTS = 60
COMMAND = [
    sys.executable,
    "-m",
    "pytest",
    "-x",
    "-q",
    "-p",
    "no:nbval",
    "-m",
    "not gpu and not slow",
]


def mutations(path):
    """Every (path, number of a line, the module with that line mutated) that Python can read."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        new = SWAPS.get(token.string)
        if token.string.isdigit():
            new = str(int(token.string) + 1)
        if new is None:
            continue
        lines = text.splitlines(keepends=True)
        number, begin = token.start
        line = lines[number - 1]
        lines[number - 1] = line[:begin] + new + line[token.end[1] :]
        mutated = "".join(lines)
        try:
            ast.parse(mutated)
        except SyntaxError:
            continue
        yield path, number, mutated


def tests_of(contexts):
    """The tests of coverage's contexts, such as `test_stats.test_a_ratio`, as pytest names them."""
    for context in contexts:
        module, _, test = context.partition(".")
        name = test.rpartition(".")[2]
        for path in (ROOT / "tests").rglob(f"{module}.py"):
            if f"def {name}(" in path.read_text():
                yield f"{path}::{name}"


def first_failure(tests):
    """The last line of pytest, or that it took too long; nothing where all passed."""
    try:
        run = subprocess.run(
            [*COMMAND, *tests],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            timeout=90,
        )
    except subprocess.TimeoutExpired:
        return "too long"
    lines = run.stdout.decode().splitlines()
    return run.returncode and next(
        (x for x in lines if x.startswith(("FAILED", "ERROR"))),
        lines,
    )


def main(seed, count, data_file, *files):
    """Draw, mutate, test and print."""
    data = CoverageData(data_file)
    data.read()
    pick = random.Random(int(seed))
    every = [each for name in sorted(files) for each in mutations(Path(name).resolve())]
    for path, number, mutated in pick.sample(every, int(count)):
        text = path.read_text()
        ran = data.contexts_by_lineno(str(path))
        of_line = {*ran.get(number, [])} - {""}
        # What an import runs is of no test: all tests of the module see it.
        contexts = of_line or {name for names in ran.values() for name in names}
        tests = sorted(tests_of(contexts))
        tests = pick.sample(tests, min(len(tests), MOST_TESTS))
        path.write_text(mutated)
        try:
            end = (first_failure(tests) or "SURVIVED") if tests else "NO TEST"
        finally:
            path.write_text(text)
        change = [module.splitlines()[number - 1].strip() for module in (text, mutated)]
        print(f"{path.relative_to(ROOT)}:{number}", *change, end, sep=" | ", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
