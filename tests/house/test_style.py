"""House style, measured: sizes, docstrings, annotations, comments, and what text may not say.

Lengths are of a function from its `def` line to its last, without the lines of its docstring: a
contract is never too long. A decorator does not count, a nested function counts in its parent too.
"""

import ast
import io
import json
import re
import statistics
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[2]
MODULES = {p.relative_to(ROOT).as_posix(): p for p in sorted((ROOT / "attnlib").rglob("*.py"))}
trees = cache(lambda: {name: ast.parse(path.read_text()) for name, path in MODULES.items()})

MEDIAN_LINES, P90_LINES, MAX_LINES = 10, 30, 60
MAX_LINES_TRITON = 90  # a kernel and its launcher are one piece of work
MAX_FILE_LINES = 400
MAX_FILES_PER_FOLDER = 14  # a study is one file, so their folder has more
MAX_ROOMS = 9
BUDGETS = json.loads(Path(__file__).with_name("budgets.json").read_text())
"""Lines of package, core and tests: every budget so far, oldest first. A budget may only fall."""
MAX_POSITIONAL = 5
MAX_COMMENT_SHARE = 0.12

Function = ast.FunctionDef | ast.AsyncFunctionDef


def every_function():
    for name, tree in trees().items():
        found = (node for node in ast.walk(tree) if isinstance(node, Function))
        yield from ((f"{name}::{function.name}", function) for function in found)


def code_lines(function):
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = first.end_lineno - first.lineno + 1 if has_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


def is_kernel(function):
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_launcher(function):
    """Whether it launches a Triton kernel, `kernel[grid](...)`."""
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    launched = (ast.unparse(f.value) for f in calls if isinstance(f, ast.Subscript))
    return any(name.endswith("_kernel") for name in launched)


def line_limit(function):
    return MAX_LINES_TRITON if is_kernel(function) or is_launcher(function) else MAX_LINES


def own_arguments(function):
    """Positional arguments without self and cls."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return [a for i, a in enumerate(arguments) if i or a.arg not in ("self", "cls")]


def unannotated(function):
    """Arguments, and the return, that carry no annotation; a kernel's pointers need none."""
    if is_kernel(function):
        return []
    spec = function.args
    rest = [*spec.kwonlyargs, *(a for a in (spec.vararg, spec.kwarg) if a)]
    bare = [a.arg for a in [*own_arguments(function), *rest] if a.annotation is None]
    return bare if function.returns else [*bare, "return"]


def comment_share(text):
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = sum(token.type == tokenize.COMMENT for token in tokens)
    return comments / max(1, len(text.splitlines()))


def test_half_of_the_functions_fit_in_ten_lines_nine_in_ten_in_thirty_and_all_in_their_limit():
    lengths = [code_lines(function) for _, function in every_function()]
    median, p90 = statistics.median(lengths), statistics.quantiles(lengths, n=10)[-1]
    assert (median <= MEDIAN_LINES, p90 <= P90_LINES) == (True, True), f"{median=} {p90=}"
    found = [(name, code_lines(f), line_limit(f)) for name, f in every_function()]
    assert [each for each in found if each[1] > each[2]] == []


LENGTHS = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}


def test_package_core_and_tests_keep_to_their_budgets_of_lines():
    core = sum(count for name, count in LENGTHS.items() if name.startswith("attnlib/core/"))
    tests = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    lines = {"package": sum(LENGTHS.values()), "core": core, "tests": tests}
    assert {name: n for name, n in lines.items() if n > BUDGETS[name][-1]} == {}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_only_falls(name):
    assert BUDGETS[name] == sorted(BUDGETS[name], reverse=True)


def test_rooms_folders_and_modules_stay_few_and_small_and_none_is_named_after_nothing():
    folders = Counter(Path(name).parent.as_posix() for name in MODULES)
    rooms = {folder.split("/")[1] for folder in folders if "/" in folder}
    assert len(rooms) <= MAX_ROOMS, rooms
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [name for name, path in MODULES.items() if path.stem in vague] == []
    del folders["attnlib/studies"]
    assert {folder: n for folder, n in folders.items() if n > MAX_FILES_PER_FOLDER} == {}
    assert {name: n for name, n in LENGTHS.items() if n > MAX_FILE_LINES} == {}


def test_a_function_takes_five_positional_arguments_at_most_all_annotated_as_its_return_is():
    # A kernel is called by keyword, from the one launcher beside it.
    own = [(name, len(own_arguments(f))) for name, f in every_function() if not is_kernel(f)]
    assert [(name, n) for name, n in own if n > MAX_POSITIONAL] == []
    assert {name: bare for name, f in every_function() if (bare := unannotated(f))} == {}


def test_comments_stay_under_an_eighth_of_a_module():
    shares = {name: round(comment_share(path.read_text()), 3) for name, path in MODULES.items()}
    assert {name: share for name, share in shares.items() if share > MAX_COMMENT_SHARE} == {}


def project_texts():
    """Everything a reader opens: the top level, code, notebooks, tests, and what lies in data/."""
    texts = ".py .md .toml .yml .yaml .txt .cfg .ipynb .json .jsonl .parquet .css .cff"
    suffixes = {"", *texts.split()}
    folders = ("attnlib", "notebooks", "tests", "data", ".ci", ".github")
    top = (path for path in ROOT.iterdir() if path.name != ".git")
    found = [*top, *(p for folder in folders for p in (ROOT / folder).rglob("*"))]
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


def test_no_text_carries_a_path_of_somebodys_machine_or_the_host_of_a_package_registry():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in project_texts()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if FOREIGN.search(line)
    ]
    assert found == []
