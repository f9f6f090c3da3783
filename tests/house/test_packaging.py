"""The lock, the ranges and the conda file name one and the same environment.

Dependency markers are read for every supported Python: what only 3.13 needs may not go missing.
"""

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import attnlib
from attnlib.__main__ import main
from attnlib.engines import sglang, vllm

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
# What torch 2.13.0's CUDA build requires and its CPU build does not, from its metadata. Its own
# libraries stay out of the lock: torch pins them to the digit, and on a machine without a GPU they
# would be gigabytes of dead weight. The rest is shared with other packages, so the lock must suit.
TORCH_OWN = {f"nvidia-{name}-cu13" for name in ("cudnn", "cusparselt", "nccl", "nvshmem")}
TORCH_OWN |= {"cuda-toolkit"}
TORCH_SHARED = ("cuda-bindings>=13.0.3,<14", "triton==3.7.1")

LOCK_TEXT = (ROOT / "requirements.txt").read_text()
LOCK_LINES = [line for line in LOCK_TEXT.splitlines() if line and not line.startswith("#")]
LOCK = {
    canonicalize_name(name): Version(version)
    for name, version in (line.split("==") for line in LOCK_LINES)
}
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = TOML["project"]
GROUPS = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
DECLARED = [Requirement(line) for group in GROUPS for line in group]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


@cache
def installed_requirements(name):
    """Nothing for one that is not installed."""
    try:
        return tuple(Requirement(line) for line in metadata.requires(name) or ())
    except metadata.PackageNotFoundError:
        return ()


def is_installed(name):
    return any(True for _ in metadata.distributions(name=name))


def marker_holds(requirement, python, extras):
    """Whether this machine with this Python needs the requirement, given the extras asked for."""
    there = {"python_version": python, "python_full_version": f"{python}.0"}
    marker = requirement.marker
    return marker is None or any(marker.evaluate(there | {"extra": x}) for x in {"", *extras})


def walk(python):
    """Every (who, requirement) reached from pyproject.toml, extras included, on one Python."""
    build = map(Requirement, TOML["build-system"]["requires"])
    todo = [("pyproject.toml", r) for r in [*DECLARED, *build]]
    seen = set()
    while todo:
        who, requirement = todo.pop()
        yield who, requirement
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            needs = (r for r in installed_requirements(name) if r.name not in TORCH_OWN)
            todo += [(name, need) for need in needs if marker_holds(need, python, extras)]


def complaints(edges):
    """What the lock lacks, or has at another version, of these (who, requirement)."""
    found = set()
    for who, requirement in edges:
        pin = LOCK.get(canonicalize_name(requirement.name))
        if pin is None or not requirement.specifier.contains(pin, prereleases=True):
            found.add(f"{who} requires {requirement}, the lock has {pin}")
    return sorted(found)


def test_the_lock_is_sorted_lines_of_a_name_and_one_version():
    # Options, URLs, markers, hashes and local versions such as +cpu all fail to match.
    pin = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.]*")
    assert [line for line in LOCK_LINES if not pin.fullmatch(line)] == []
    names = [canonicalize_name(line.split("==")[0]) for line in LOCK_LINES]
    assert names == sorted(set(names))


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_of_a_locked_package_is_locked_too(python):
    assert complaints(walk(python)) == []


def test_the_python_that_make_asks_for_is_one_that_every_locked_package_takes():
    (least,) = re.findall(r"version_info < \((.+?)\)", (ROOT / "Makefile").read_text())
    least = least.replace(", ", ".")
    asked = {
        name: metadata.metadata(name).get("Requires-Python") for name in LOCK if is_installed(name)
    }
    assert {n: a for n, a in asked.items() if a and not SpecifierSet(a).contains(least)} == {}
    assert f"Python >= {least}" in (ROOT / "README.md").read_text()


def test_the_lock_suits_torchs_cuda_build_and_leaves_it_its_own_libraries():
    assert complaints(("torch with CUDA", Requirement(r)) for r in TORCH_SHARED) == []
    assert TORCH_OWN & set(LOCK) == set()


@pytest.mark.parametrize(
    "group, plugin", [("sglang.srt.plugins", sglang), ("vllm.general_plugins", vllm)]
)
def test_an_engine_finds_its_plugin(group, plugin):
    (door,) = PROJECT["entry-points"][group].values()
    assert pkgutil.resolve_name(door) is plugin.register


INSTALL = re.escape(attnlib.install_with("lab"))


def test_errors_advise_a_command_that_readme_has_too():
    """attnlib is on no index: a name to be looked up there would find nothing, or another's."""
    for extra in ("lab", "cluster"):
        assert extra in PROJECT["optional-dependencies"]
        assert attnlib.install_with(extra).startswith(f'pip install -e ".[{extra}]"')
    assert 'pip install -e ".[lab]"' in (ROOT / "README.md").read_text()
    for path in (ROOT / "attnlib").rglob("*.py"):
        assert "attnlib[" not in path.read_text(), path


IN_BOTH = (
    "numpy==2.3.5",
    "packaging==26.4",
    "pyyaml==6.0.4",
    "jinja2==3.1.6",
    "tqdm==4.70.1",
    "triton==3.8.0",
)
IN_ENGINES = {
    "SGLang 0.5.23": ("torch==2.14.1", "pandas==3.1.1", "pyarrow==26.0.1", "scipy==1.17.1"),
    "vLLM 0.33.0": ("torch==2.14.0", "flashinfer-python==0.7.2.post1"),
    "both": IN_BOTH,
    "later": ("torch==2.15.0", "triton==3.9.0"),
    "earlier": ("numpy==1.26.4", "packaging==24.0"),
}
"""Of what we require, what pip installs with an engine (resolved from its wheel on 2026-11-28)."""


@pytest.mark.parametrize("engine", IN_ENGINES)
def test_an_install_keeps_the_torch_and_the_kernels_of_an_engines_environment(engine):
    """Bounds would change them: `triton<3.8` replaced Triton 3.8 and the torch that pins it."""
    for pin in map(Requirement, IN_ENGINES[engine]):
        (version,) = pin.specifier
        for requirement in DECLARED:
            if canonicalize_name(requirement.name) == pin.name:
                assert requirement.specifier.contains(version.version), f"{requirement} and {pin}"


def test_pins_and_upper_bounds_live_in_the_lock_alone():
    for requirement in DECLARED:
        operators = {bound.operator for bound in requirement.specifier}
        assert operators <= {">="}, requirement


OF_ENGINES = {"flash_mla", "flashinfer", "sgl_kernel", "sglang", "vllm"}
"""What `core` and the plugins import where it is installed."""
DISTRIBUTIONS = {
    "yaml": "pyyaml",
}
"""Module -> its distribution, where that has another name."""


def test_what_core_and_the_plugins_import_is_declared():
    imported = set()
    for room in ("core", "engines"):
        for path in (ROOT / "attnlib" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.partition(".")[0])
    needed = imported - sys.stdlib_module_names - OF_ENGINES
    declared = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert {DISTRIBUTIONS.get(name, name) for name in needed} == declared


def test_attnlib_is_a_command():
    door = PROJECT["scripts"]["attnlib"]
    assert pkgutil.resolve_name(door) is main


WITHOUT_LAB = """
import pkgutil, runpy, sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in LAB:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import attnlib
LAB = attnlib.LAB - {"jinja2"}  # torch requires it
sys.meta_path.insert(0, Missing())
"""


def run_without_lab(code):
    command = [sys.executable, "-c", WITHOUT_LAB + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_what_an_engine_imports_is_there_without_the_workbench():
    code = "from attnlib import core\nimport attnlib.engines.sglang\n"
    code += "for module in pkgutil.walk_packages(core.__path__, 'attnlib.core.'):\n"
    code += "    __import__(module.name)\n"
    code += "for name in core.HOME:\n    getattr(core, name)\n"
    done = run_without_lab(code)
    assert done.returncode == 0, done.stderr


def test_what_needs_the_workbench_says_what_to_install():
    done = run_without_lab("attnlib.view")
    assert re.search(rf"attnlib.view: needs \w+: {INSTALL}", done.stderr)
    code = "sys.argv[1:] = ['doctor']\nrunpy.run_module('attnlib', run_name='__main__')"
    done = run_without_lab(code)
    wanted = rf"python -m attnlib needs (\w+): {INSTALL}\n"
    assert done.returncode == 2 and re.fullmatch(wanted, done.stderr), done.stderr


def test_nothing_is_locked_that_nothing_needs():
    if missing := [name for name in LOCK if not is_installed(name)]:
        pytest.skip(f"needs the whole lock installed, missing {', '.join(missing)}")
    reached = {canonicalize_name(r.name) for python in PYTHONS for _, r in walk(python)}
    assert sorted(set(LOCK) - reached) == []


def test_the_conda_file_installs_the_lock_and_the_project_on_a_python_it_supports():
    assert "pip" in CONDA
    assert CONDA[-1] == {"pip": ["-r requirements.txt", "-e ."]}
    (python,) = [p.removeprefix("python=") for p in CONDA if str(p).startswith("python=")]
    assert python in PYTHONS and SpecifierSet(PROJECT["requires-python"]).contains(python)


def test_a_citation_names_the_version_and_license_of_the_package():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {name: cited[name] for name in ("version", "license")}.items() <= PROJECT.items()
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_running_environment_is_the_locked_one():
    torch_version = Version(Version(metadata.version("torch")).public)
    if torch_version != LOCK["torch"]:
        pytest.skip(f"runs on torch {torch_version}, not on the locked {LOCK['torch']}")
    here = {name: Version(metadata.version(name)) for name in LOCK if is_installed(name)}
    assert {n: str(v) for n, v in here.items() if Version(v.public) != LOCK[n]} == {}
