"""Overlays: another release of a distribution in a folder of its own, put in front of sys.path.

    build/overlays/flashinfer-python-0.6.3/      what PYTHONPATH gets for a worker of that release

Only the distribution and the companions it cannot be imported without go into the folder; torch
and all else stay the environment's. Wheels come from the package index, or from the folder that
`ATTNLIB_WHEELS` names and then from nowhere else. A folder appears only when it is complete.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "build" / "overlays"
COMPANIONS = {"flashinfer-python": ("apache-tvm-ffi<0.2",)}
"""What a release needs at import beyond this project's own requirements (its Requires-Dist)."""


def overlay_for(
    distribution: str, release: str, given: dict[str, Path] | None = None
) -> Path | None:
    """Folder with `distribution==release`; None where the environment has that very release.

    `given` maps `NAME==VERSION` to folders made by hand. Otherwise the overlay is installed once.
    Raises RuntimeError with pip's words when the release cannot be had.
    """
    requirement = f"{distribution}=={release}"
    if given and requirement in given:
        return _checked(given[requirement], distribution, release)
    if not release or installed_release(distribution) == release:
        return None
    target = ROOT / f"{distribution}-{release}"
    return target if target.is_dir() else _install(requirement, target)


def parse_overlay(argument: str) -> tuple[str, Path]:
    """`NAME==VERSION=DIR` as (requirement, folder); ValueError says what was wrong with it."""
    form = re.fullmatch(r"([^=]+)==([^=]+)=(.+)", argument)
    if form is None:
        raise ValueError(f"--overlay must be NAME==VERSION=DIR, got {argument!r}")
    name, version, folder = form.groups()
    _checked(Path(folder), name, version)
    return f"{name}=={version}", Path(folder).resolve()


def wheel_folder() -> Path | None:
    """The folder of wheels that `ATTNLIB_WHEELS` names, if it does; ValueError if there is none."""
    folder = os.environ.get("ATTNLIB_WHEELS")
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise ValueError(f"ATTNLIB_WHEELS must name a folder of wheels, got {folder!r}")
    return Path(folder).resolve()


def installed_release(distribution: str) -> str:
    """The release that the environment has, or empty."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _checked(folder: Path, distribution: str, release: str) -> Path:
    found = {_name_and_version(dist) for dist in metadata.distributions(path=[str(folder)])}
    if (distribution, release) not in found:
        raise ValueError(
            f"overlay {folder} must hold {distribution} {release}, it has {found or {}}"
        )
    return folder


def _name_and_version(dist: metadata.Distribution) -> tuple[str, str]:
    # Without metadata the standard library has None; the backport that Dask loads may raise.
    try:
        fields = dist.metadata
    except FileNotFoundError:
        fields = None
    if fields is None:
        return "", ""
    return str(fields["Name"]).replace("_", "-"), str(fields["Version"])


def _install(requirement: str, target: Path) -> Path:
    distribution = requirement.partition("==")[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # Not a resolver's job: --no-deps, or an old release would bring its own torch.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        wanted = [requirement, *COMPANIONS.get(distribution, ())]
        done = subprocess.run(
            [*command, "--target", f"{scratch}/site", *wanted],
            env={**os.environ, **_pip_sources()},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"pip could not install {requirement}: {done.stderr.strip()[-800:]}")
        try:
            Path(scratch, "site").rename(target)
        except OSError:
            # Another process installed the same release meanwhile; a folder is whole or not there.
            if not target.is_dir():
                raise
    return target


def _pip_sources() -> dict[str, str]:
    folder = wheel_folder()
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)} if folder else {}
