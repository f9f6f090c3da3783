"""The import diagram of DESIGN.md, held by ast: imports point one way only.

The table below is the diagram. Names are relative to `attnlib`; `name.*` is a package with all that
is in it; an exact name goes before a wildcard. Imports inside functions count too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "attnlib"
ANYTHING = ("*",)

# module -> what of ours it may import
ALLOWED: dict[str, tuple[str, ...]] = {
    # nouns
    "batch": (),
    "extend_case": ("batch",),
    "cases": ("batch", "extend_case"),
    "record": ("cases",),
    # what a case is, what it must give, what it must cost
    "workload": ("batch", "cases", "extend_case"),
    "reference": ("batch",),
    "check": ("batch", "reference"),
    "decode_plan": ("batch", "metadata.facts", "metadata.splits"),
    "decode_time": ("batch", "decode_plan"),
    "cost": ("batch", "cases", "decode_plan", "extend_case", "workload"),
    "extend": ("batch", "extend_case"),
    "extend_workload": ("batch", "extend", "extend_case", "workload"),
    "extend_reference": ("batch", "check", "extend", "reference"),
    "mla": ("batch", "cases"),
    "mla_format": ("cases",),
    "mla_model": ("cases", "cost"),
    "mla_workload": ("cases", "mla", "mla_format", "workload"),
    "mla_reference": ("cases", "check", "mla", "mla_format"),
    # what is measured, and what measures: neither knows the other
    "backends": ("batch", "cases", "extend_case", "backends.*"),
    "backends.base": ("batch",),
    "backends.fa3": (
        "batch",
        "backends.base",
        "extend",
        "extend_case",
        "metadata.facts",
        "metadata.library",
        "metadata.scheduler",
    ),
    "backends.mla": ("cases", "mla", "metadata.flashmla", "backends.base"),
    "backends.prefill": ("batch", "extend", "extend_case", "backends.base"),
    "backends.*": ("batch", "backends.base"),
    # the metadata of attention calls: a model of it, and guards
    "metadata.library": (),
    "metadata.tiles": (),
    "metadata.facts": ("metadata.tiles",),
    "metadata.splits": ("metadata.facts",),
    "metadata.vectors": ("metadata.splits",),
    "metadata.tile_schedule": ("metadata.splits",),
    "metadata.scheduler": ("metadata.arguments", "metadata.splits", "metadata.library"),
    "metadata.flashmla": (),
    "mismatch": (
        "backends.fa3",
        "batch",
        "check",
        "metadata.scheduler",
        "metadata.splits",
        "mismatches",
        "workload",
    ),
    "mismatches": ("batch", "metadata.facts", "metadata.splits", "workload"),
    "measure.*": ("measure.*",),
    # what a step computes from its lengths: knows neither attention nor how it is measured
    "metadata": (),
    "metadata.oracle": (),
    "metadata.launch": (),
    "metadata.lengths": (),
    "metadata.arguments": (),
    "metadata.draft_arguments": ("metadata.arguments",),
    "metadata.eager": ("metadata.arguments", "metadata.draft_arguments"),
    "metadata.rows": (),
    "metadata.splits_triton": ("metadata.splits",),
    "metadata.decode": (
        "metadata.arguments",
        "metadata.launch",
        "metadata.lengths",
        "metadata.rows",
    ),
    # the one of them that also writes FA3's schedule
    "metadata.one_launch": (
        "metadata.arguments",
        "metadata.decode",
        "metadata.launch",
        "metadata.lengths",
        "metadata.rows",
        "metadata.scheduler",
        "metadata.splits",
        "metadata.splits_triton",
    ),
    "metadata.*": (
        "metadata.arguments",
        "metadata.draft_arguments",
        "metadata.launch",
        "metadata.lengths",
    ),
    # from a study to its records; the worker is started by name, in a process of its own
    "overlay": (),
    "lock": (),
    "worker": ("measure.machine", "record", "store", "subjects", "subjects.base"),
    # one a kind of case: a subject knows what is measured and what measures it, nobody else does
    "subjects": ("subjects.base",),
    "subjects.base": ("check", "measure.timer", "measure.trace", "record"),
    "subjects.*": (
        "backends.*",
        "batch",
        "cases",
        "check",
        "cost",
        "measure.*",
        "metadata.*",
        "mismatch",
        "extend_case",
        "extend_reference",
        "extend_workload",
        "mla_reference",
        "mla_workload",
        "record",
        "subjects.base",
        "subjects.call",
        "workload",
    ),
    "jobs": ("record", "store"),
    "store": ("record", "batch", "cases", "extend_case"),
    # which backend a library picks, and the table made of that
    "select": ("measured", "select.*"),
    "select.*": ("batch", "select.*"),
    "features": ("batch", "select", "select.*"),
    "study": ("cases", "record", "store", "overlay", "jobs", "lock"),
    "studies": ("batch", "cases", "cost", "study", "catalog"),
    "catalog.*": (
        "batch",
        "cases",
        "cost",
        "extend_case",
        "study",
        "mismatches",
        "catalog.decode_metadata",
    ),
    "recipe": ("store", "studies", "report.html", "report.refresh"),
    # which release changed the speed
    "releases": ("overlay",),
    "rounds": ("batch", "record", "store", "jobs", "study"),
    "bisect": ("backends", "batch", "measure.stats", "record", "releases", "rounds", "study"),
    # what the records say of published claims; report.rows is the part of the report that draws
    # nothing, it pairs rounds, and that must be done in one place
    "evidence": ("batch", "measure.stats", "report.rows"),
    "claim_checks_metadata": (
        "cases",
        "catalog.*",
        "evidence",
        "report.metadata_rows",
        "report.rows",
    ),
    "claim_checks_mismatch": ("evidence", "mismatches"),
    "claim_checks_mla": ("catalog.*", "evidence", "report.mla_rows"),
    "claim_checks_modes": ("evidence", "extend_case", "report.modes_rows"),
    "claim_checks": (
        "claim_checks_metadata",
        "claim_checks_mismatch",
        "claim_checks_mla",
        "claim_checks_modes",
        "evidence",
        "report.rows",
        "select",
        "studies",
    ),
    "claims": ("claim_checks", "evidence", "store", "studies", "study"),
    # the fastest backend as measured; an engine loads `policy` alone
    "policy": ("batch", "decode_plan", "decode_time"),
    "measured": (
        "batch",
        "decode_time",
        "policy",
        "report.rows",
        "store",
        "studies",
        "study",
        "workload",
    ),
    "cluster": ("batch", "record", "store", "jobs", "study"),
    # from records to what is read
    "report.*": (
        "measure.spans",
        "store",
        "record",
        "batch",
        "cases",
        "cost",
        "measure.stats",
        "select",
        "study",
        "studies",
        "bisect",
        "report.*",
    ),
    # by hand, in JupyterLab: profiles of any callable, and one case, chosen and shown
    "lab": (),
    "lab.*": ANYTHING,
    "report.scheduler": ("measure.stats", "record", "report.*"),
    "report.schedule": ("metadata.*", "report.*", "store"),
    "report.modes": ("batch", "cost", "extend_case", "measure.stats", "report.*"),
    "report.modes_rows": ("batch", "extend_case", "report.*"),
    "report.regret": (
        "batch",
        "catalog.*",
        "decode_plan",
        "measured",
        "policy",
        "report.rows",
        "select",
        "select.names",
        "workload",
    ),
    "report.regret_figures": ("batch", "measured", "policy", "report.*"),
    "report.misfits": ("mismatches", "report.*"),
    "report.mla_rows": ("cases", "catalog.*", "measure.stats", "report.rows"),
    "report.mla": ("cases", "cost", "mla_model", "record", "report.*"),
    "report.mla_figures": ("cost", "mla_model", "report.*"),
    "report.provenance": ("bisect", "store", "studies", "study"),
    "report.fragment": (),
    "report.page": ("claims", "study", "report.cards", "report.fragment", "report.provenance"),
    "report.html": (
        "claims",
        "study",
        "report.fragment",
        "report.page",
        "report.provenance",
    ),
    # the front doors
    "doctor": ("backends", "measured", "measure.machine", "store", "study", "studies"),
    "": ANYTHING,
    "cli": ANYTHING,
    "__main__": ("cli",),
}
# Packages whose imports of ours all wait inside a function, so that importing them costs nothing.
LATE = {
    "": (),
    "backends": ("batch", "cases", "extend_case", "backends.base"),
    "subjects": ("subjects.base",),
}


def module_files() -> dict[str, Path]:
    """Every module of the package, named relative to it; the package itself is ''."""
    files = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = module_files()


def covers(pattern: str, name: str) -> bool:
    if pattern.endswith(".*"):
        return f"{name}.".startswith(pattern[:-1])
    return pattern in ("*", name)


def allowed_imports(module: str) -> tuple[str, ...] | None:
    """The module's row of the table, the exact one first; None for a module that has none."""
    if module in ALLOWED:
        return ALLOWED[module]
    return next(
        (row for pattern, row in ALLOWED.items() if module and covers(pattern, module)), None
    )


def absolute_name(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    folder = path.relative_to(ROOT).parts[: -node.level]
    return ".".join([*folder, *([node.module] if node.module else [])])


def named_modules(node: ast.AST, path: Path) -> Iterator[str]:
    """Absolute names of the modules one import statement, or `import_module` call, names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        home = absolute_name(node, path)
        for alias in node.names:
            inner = f"{home}.{alias.name}"
            is_module = inner.removeprefix(f"{PACKAGE}.") in FILES
            if inner != f"{PACKAGE}.__version__":
                yield inner if is_module else home
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def own_imports(nodes: Iterator[ast.AST], path: Path) -> set[str]:
    """Our own modules that these nodes import, relative to the package."""
    names = (name for node in nodes for name in named_modules(node, path))
    ours = (name for name in names if f"{name}.".startswith(f"{PACKAGE}."))
    return {name.removeprefix(PACKAGE).removeprefix(".") for name in ours}


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from outside_functions(child)


def loaded_by(statement: str, watched: str) -> str:
    """Which of the watched top-level packages a fresh interpreter has loaded after a statement."""
    probe = f"{statement}; import sys; print(*sorted(set(sys.modules) & set({watched.split()})))"
    result = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_what_the_diagram_allows(module: str) -> None:
    allowed = allowed_imports(module)
    assert allowed is not None, f"new module {module}: add it to the table"
    imported = own_imports(ast.walk(ast.parse(FILES[module].read_text())), FILES[module])
    strays = {name for name in imported if not any(covers(rule, name) for rule in allowed)}
    assert strays == set(), f"{module} may import {allowed or 'nothing of ours'}"


@pytest.mark.parametrize("module", LATE)
def test_a_package_that_lists_many_modules_imports_them_late(module: str) -> None:
    tree = ast.parse(FILES[module].read_text())
    assert own_imports(outside_functions(tree), FILES[module]) <= set(LATE[module])


def test_every_row_of_the_diagram_has_a_module() -> None:
    rows = {row for row in ALLOWED if not any(covers(row, module) for module in FILES)}
    assert rows == set(), "a row without a module: delete it"


def test_importing_attnlib_loads_no_heavy_library() -> None:
    assert loaded_by("import attnlib", "torch matplotlib pandas yaml ipywidgets") == ""


def test_reading_records_and_drawing_tables_needs_no_torch() -> None:
    assert loaded_by("import attnlib.store, attnlib.claims, attnlib.report.tables", "torch") == ""


def test_the_explorer_can_be_imported_without_torch_and_draws_nothing_yet() -> None:
    assert loaded_by("from attnlib import explore, view", "torch matplotlib") == ""


def test_a_profile_that_was_taken_is_shown_and_compared_without_torch() -> None:
    assert loaded_by("import attnlib.lab.profile, attnlib.lab.compare", "torch matplotlib") == ""


def test_explaining_a_choice_needs_no_torch() -> None:
    assert loaded_by("import attnlib.select.text, attnlib.features", "torch pandas numpy") == ""


def test_bisecting_on_record_needs_no_torch_to_be_imported() -> None:
    assert loaded_by("import attnlib.bisect", "torch matplotlib pandas") == ""
