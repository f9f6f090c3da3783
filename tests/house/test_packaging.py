"""The lock, the ranges and the conda file name one and the same environment.

requirements.txt pins, pyproject.toml accepts, environment.yml includes. Dependency markers are read
for every supported Python, not just for the one that runs the tests, so that a pin that only
3.13 needs cannot go missing on 3.11.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
CARD_PACKAGES = (
    "flashinfer-python",
    "jupyterlab",
    "nbval",
    "pandas",
    "seaborn",
    "torch",
    "triton",
)
EXACT_PINS = {"torch": "2.13.0", "triton": "3.7.1", "flashinfer-python": "0.7.2.post1"}
# What torch 2.13.0's CUDA build requires and its CPU build does not, from its metadata. Its own
# libraries stay out of the lock: torch pins them to the digit, and on a machine without a GPU they
# would be gigabytes of dead weight. The rest is shared with other packages, so the lock must suit.
TORCH_OWN = {
    "cuda-toolkit",
    "nvidia-cudnn-cu13",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
}
TORCH_SHARED = ("cuda-bindings>=13.0.3,<14", "triton==3.7.1")


def lock_lines() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def read_lock() -> dict[str, Version]:
    pairs = (line.split("==") for line in lock_lines())
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def read_project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared_requirements() -> list[Requirement]:
    project = read_project()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


@cache
def installed_requirements(name: str) -> tuple[Requirement, ...]:
    """What an installed distribution requires; nothing for one that is not installed."""
    try:
        return tuple(Requirement(line) for line in metadata.requires(name) or ())
    except metadata.PackageNotFoundError:
        return ()


def is_installed(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))


def marker_holds(requirement: Requirement, python: str, extras: frozenset[str]) -> bool:
    """Whether Linux x86-64 with this Python needs the requirement, given the extras asked for."""
    linux = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    marker = requirement.marker
    return marker is None or any(marker.evaluate(linux | {"extra": x}) for x in {"", *extras})


def walk(python: str) -> Iterator[tuple[str, Requirement]]:
    """Every (who, requirement) reached from pyproject.toml, extras included, on one Python."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    todo = [("pyproject.toml", r) for r in [*declared_requirements(), *map(Requirement, build)]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        who, requirement = todo.pop()
        yield who, requirement
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            needs = (r for r in installed_requirements(name) if r.name not in TORCH_OWN)
            todo += [(name, need) for need in needs if marker_holds(need, python, extras)]


def complaint(who: str, requirement: Requirement, lock: dict[str, Version]) -> str | None:
    pin = lock.get(canonicalize_name(requirement.name))
    if pin is None:
        return f"{who} requires {requirement}, which is not locked"
    if not requirement.specifier.contains(pin, prereleases=True):
        return f"{who} requires {requirement}, the lock has {pin}"
    return None


def test_every_line_of_the_lock_is_a_name_and_one_version() -> None:
    # Options, URLs, markers, hashes and local versions such as +cpu all fail to match.
    pin = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.]*")
    assert [line for line in lock_lines() if not pin.fullmatch(line)] == []


def test_the_lock_is_sorted_and_names_no_package_twice() -> None:
    names = [canonicalize_name(line.split("==")[0]) for line in lock_lines()]
    assert names == sorted(set(names))


def test_every_range_of_the_project_holds_the_locked_version() -> None:
    lock = read_lock()
    found = [complaint("pyproject.toml", r, lock) for r in declared_requirements()]
    assert [line for line in found if line] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_of_a_locked_package_is_locked_too(python: str) -> None:
    lock = read_lock()
    assert sorted({line for edge in walk(python) if (line := complaint(*edge, lock))}) == []


def test_the_lock_suits_torchs_cuda_build_and_leaves_it_its_own_libraries() -> None:
    lock = read_lock()
    found = [complaint("torch with CUDA", Requirement(r), lock) for r in TORCH_SHARED]
    assert [line for line in found if line] == []
    assert TORCH_OWN & set(lock) == set()


def test_nothing_is_locked_that_nothing_needs() -> None:
    if missing := [name for name in read_lock() if not is_installed(name)]:
        pytest.skip(f"needs the whole lock installed, missing {', '.join(missing)}")
    reached = {canonicalize_name(r.name) for python in PYTHONS for _, r in walk(python)}
    assert sorted(set(read_lock()) - reached) == []


@pytest.mark.parametrize("name", CARD_PACKAGES)
def test_the_packages_the_project_is_about_are_locked(name: str) -> None:
    assert name in read_lock()


@pytest.mark.parametrize(("name", "version"), EXACT_PINS.items())
def test_the_pins_that_results_depend_on_change_only_on_purpose(name: str, version: str) -> None:
    assert read_lock()[name] == Version(version)


def test_the_conda_file_installs_the_lock_and_the_project() -> None:
    parts = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert "pip" in parts
    assert parts[-1] == {"pip": ["-r requirements.txt", "-e ."]}


def test_the_conda_files_python_is_one_the_project_supports() -> None:
    parts = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (python,) = [p.removeprefix("python=") for p in parts if str(p).startswith("python=")]
    assert python in PYTHONS
    assert SpecifierSet(read_project()["requires-python"]).contains(python)


def test_the_running_environment_is_the_locked_one() -> None:
    lock = read_lock()
    torch_version = Version(Version(metadata.version("torch")).public)
    if torch_version != lock["torch"]:
        pytest.skip(f"runs on torch {torch_version}, not on the locked {lock['torch']}")
    here = {name: Version(metadata.version(name)) for name in lock if is_installed(name)}
    drift = {n: str(v) for n, v in here.items() if Version(v.public) != lock[n]}
    assert drift == {}
