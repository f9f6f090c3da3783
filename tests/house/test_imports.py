"""The import table of DESIGN.md, a row per room, held by ast: imports point one way only.

Imports inside functions count too."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import attnlib
from attnlib.run import store

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "attnlib"

# room -> the rooms below it that it may import
ROOMS = {
    "core": (),
    "measure": ("core",),
    "select": ("core",),
    "engines": ("select", "core"),  # select late, at a server's first step
    "run": ("measure", "core"),
    "studies": ("run", "measure", "engines", "select", "core"),
    "lab": ("studies", "run", "measure", "select", "core"),
    "doctor": ("studies", "run", "measure", "core"),
}
FRONT_DOORS = ("", "__main__", "cli")  # may import any room, late
PATHS = {path: path.relative_to(ROOT / PACKAGE) for path in (ROOT / PACKAGE).rglob("*.py")}
FILES = {
    ".".join((at.parent if at.stem == "__init__" else at.with_suffix("")).parts): path
    for path, at in sorted(PATHS.items())
}
"""Every module of the package, named relative to it; the package itself is ''."""
MODULES = {path: module for module, path in FILES.items()}
trees = cache(lambda: {module: ast.parse(path.read_text()) for module, path in FILES.items()})


def room_of(module):
    return module.split(".")[0]


def named_modules(node, path):
    """Absolute names of the modules one import statement, or `import_module` call, names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        folder = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
        home = ".".join([*folder, *filter(None, [node.module])])
        for alias in node.names:
            inner = f"{home}.{alias.name}"
            is_module = inner.removeprefix(f"{PACKAGE}.") in FILES
            if inner != f"{PACKAGE}.__version__":
                yield inner if is_module else home
    elif isinstance(node, ast.Call) and "import_module" in vars(node.func).values():
        yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def own_imports(nodes, path):
    """Our own modules that these nodes import, relative to the package."""
    names = (name for node in nodes for name in named_modules(node, path))
    ours = (name for name in names if f"{name}.".startswith(f"{PACKAGE}."))
    return {name.removeprefix(PACKAGE).removeprefix(".") for name in ours}


imports = cache(lambda: {m: own_imports(ast.walk(tree), FILES[m]) for m, tree in trees().items()})


def test_every_module_stands_in_a_room():
    assert {room_of(module) for module in FILES} == {*ROOMS, *FRONT_DOORS}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room):
    allowed = {room, *ROOMS[room]}
    strays = {
        f"{module} -> {name}"
        for module, names in imports().items()
        if room_of(module) == room
        for name in names
        if room_of(name) not in allowed and name
    }
    assert strays == set()


def test_modules_import_one_another_in_no_circle():
    parents = {module: {n for n in names if n != module} for module, names in imports().items()}
    try:
        TopologicalSorter(parents).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


LIGHT = {
    "import attnlib, attnlib.core": "torch pandas pyarrow ipywidgets",
    "import attnlib.select.text": "torch pandas",
    "import attnlib.core.fa2.choice, attnlib.core.schedule.splits": "torch pandas scipy yaml",
}
"""What a process imports -> the libraries that it must not load with it."""
MOST_MODULES_OF_DIAGNOSE = 18
MOST_MODULES_OF_KNOWN_PROBLEMS = 24
"""What a diagnosis asks beside: the known problems, their conditions, and the models in them."""


def loaded_by(statement):
    """Modules of a fresh process after `statement`."""
    code = f"import sys; {statement}; print(*sys.modules)"
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120, "check": True}
    return set(
        subprocess.run(
            [
                sys.executable,
                "-c",
                code,
            ],
            **how,
        ).stdout.split()
    )


@pytest.mark.parametrize("statement", LIGHT)
def test_what_needs_no_heavy_library_loads_none(statement):
    assert loaded_by(statement) & set(LIGHT[statement].split()) == set()


def test_there_are_seven_rooms_at_most():
    folders = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert folders <= ROOMS.keys()
    assert len(folders) <= 7


QUESTIONS = {
    "fa3_decode_regression": set(),
    "page_arrays": {
        "attnlib.studies",
        "attnlib.studies.metadata",
        "attnlib.studies.metadata.builders",
        "attnlib.studies.metadata.case",
    },
}
"""Study -> what of `studies` is imported to read its records: its case, and the builders' names."""


@pytest.mark.parametrize("study", QUESTIONS)
def test_records_are_read_without_the_questions(study, published_records):
    code = "from attnlib.run import store; "
    code += f"store.load({study!r}, store.machines({study!r})[0])"
    found = {name for name in loaded_by(code) if name.startswith("attnlib.studies")}
    assert found == QUESTIONS[study]


ON_THE_WAY = {
    "run.study",
    "run.store",
    "run.rows",
    "run.frame",
    "measure.calls.form",
    "measure.calls.decode.case",
    "core.spec",
}
"""Modules from `load_or_measure`, in the first, to a table of decode calls."""


def test_a_table_is_six_modules_of_three_rooms_away(published_records):
    study = attnlib.STUDIES["fa3_decode_regression"]
    attnlib.load_or_measure(study)  # imports are done, and records come from the file once more
    store._frame_of.cache_clear()
    entered = set()
    by_file = {str(path): module for path, module in MODULES.items()}

    def note(frame, event, _):
        entered.add(by_file.get(frame.f_code.co_filename, ""))

    sys.setprofile(note)
    try:
        attnlib.load_or_measure(study)
    finally:
        sys.setprofile(None)
    assert entered - {""} == ON_THE_WAY
    assert {room_of(module) for module in ON_THE_WAY} == {"run", "measure", "core"}


def test_a_worker_finds_the_case_of_a_question_without_its_study():
    code = "from attnlib.measure.calls.form import class_of; class_of('step')"
    assert loaded_by(code) & {"torch", "pandas", "pyarrow", "attnlib.run"} == set()


def test_a_diagnosis_needs_few_modules_and_no_study():
    ours = {
        name for name in loaded_by("import attnlib.lab.diagnose") if name.startswith("attnlib.")
    }
    modules = {name for name in ours if Path(FILES.get(name[8:], "")).name != "__init__.py"}
    beside = modules & loaded_by("import attnlib.select.situation, attnlib.select.known")
    assert len(modules - beside) <= MOST_MODULES_OF_DIAGNOSE, sorted(modules - beside)
    assert len(beside) <= MOST_MODULES_OF_KNOWN_PROBLEMS, sorted(beside)
    assert not [name for name in ours if ".studies" in name]
