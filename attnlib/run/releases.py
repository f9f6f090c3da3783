"""Releases of a distribution: which there are, and each in a folder of its own.

Releases are strings that packaging.version can order, oldest first. One that the environment does
not have is an overlay, a folder in front of a worker's sys.path: `build/overlays/NAME-RELEASE`. It
appears when it is complete, with the distribution and the companions it cannot be imported without;
torch and all else stay the environment's. pip finds the wheels, so its own settings hold: with
`PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR` they come from a folder and from nowhere else.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ..core.backends.table import installed_version

ROOT = Path(__file__).resolve().parents[2] / "build" / "overlays"
MOST_WORDS = 600
"""Letters of what pip says that are told."""
COMPANIONS = {"flashinfer-python": ("apache-tvm-ffi<0.2",)}
"""What a release needs at import beyond this project's own requirements (its Requires-Dist)."""


def available_releases(
    distribution: str,
    overlays: Iterable[str] = (),
) -> list[str]:
    """The releases that can be had here; `overlays` are requirements `NAME==VERSION` given.

    Beside them the environment's, and without overlays those that pip finds (`PIP_PRE`: the early
    ones too). ValueError for an overlay of another distribution, and what `index_releases` raises.
    """
    given = [_release_of(requirement, distribution) for requirement in overlays]
    releases = given or index_releases(distribution)
    installed = installed_version(distribution)
    if installed:
        releases = [*releases, installed]
    return ordered(releases)


def pip_words(printed: str) -> str:
    """What pip says, in one line without the releases that it lists."""
    words = " ".join(printed.split())
    return re.sub(r" ?\(from versions: [^)]*\)", "", words)[-MOST_WORDS:]


def index_releases(distribution: str) -> list[str]:
    """Releases that pip finds for this Python and platform; RuntimeError with pip's words."""
    command = [sys.executable, "-m", "pip", "index", "versions", distribution]
    done = subprocess.run(command, capture_output=True, text=True)
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or listed is None:
        words = pip_words(f"{done.stdout} {done.stderr}")
        raise RuntimeError(f"pip could not list the releases of {distribution}: {words}")
    return ordered(listed[1].split(", "))


def releases_between(
    releases: Iterable[str],
    first: str,
    last: str,
) -> list[str]:
    """The releases from `first` to `last`; ValueError with those there are if an end is missing."""
    known = ordered(releases)
    versions = [Version(release) for release in known]
    low = parse_release("first", first)
    high = parse_release("last", last)
    for name, end in ((first, low), (last, high)):
        if end not in versions:
            raise ValueError(f"releases must hold {name}, got {', '.join(known) or 'none'}")
    return [release for release in known if low <= Version(release) <= high]


def parse_release(name: str, text: str) -> Version:
    """`text` as a version; ValueError naming the argument `name`."""
    try:
        return Version(text)
    except InvalidVersion:
        raise ValueError(f"{name} must be a version such as 0.6.3, got {text!r}") from None


def ordered(releases: Iterable[str]) -> list[str]:
    """Releases oldest first, each once."""
    by_version = {parse_release("release", text): text for text in releases}
    return [text for _, text in sorted(by_version.items())]


def overlay_for(
    distribution: str,
    release: str,
    given: dict[str, Path] | None = None,
) -> Path | None:
    """Folder with `distribution==release`; None where the environment has that very release.

    `given` maps `NAME==VERSION` to folders made by hand. Otherwise the overlay is installed once.
    Raises RuntimeError with pip's words when the release cannot be had.
    """
    requirement = f"{distribution}=={release}"
    if given and requirement in given:
        return _checked(given[requirement], distribution, release)
    if not release or installed_version(distribution) == release:
        return None
    target = ROOT / f"{distribution}-{release}"
    if not target.is_dir():
        _install(requirement, target)
    return target


def build_version(path: Path, distribution: str) -> str:
    """The release of a build of one's own, a wheel or a folder where one is installed.

    Nothing is installed. Raises ValueError for what is none and for another platform's.
    """
    if path.is_dir():
        release = _installed(path).get(distribution, "of any release")
        _checked(path, distribution, release)
        return release
    if path.suffix == ".whl" and not path.exists():
        raise ValueError(f"{path} must be a wheel that is there: no such file")
    if path.suffix != ".whl" or not path.is_file():
        raise ValueError(f"{path} must be a release of {distribution}, a wheel or a folder")
    name, version, _, tags = parse_wheel_filename(path.name)
    fits_here = not tags.isdisjoint(sys_tags())
    if name != canonicalize_name(distribution) or not fits_here:
        raise ValueError(f"{path} must be of {distribution}, for this Python and platform")
    return str(version)


def own_build(path: Path, distribution: str) -> tuple[str, Path]:
    """Release and folder of a build of one's own; a wheel is installed once.

    Raises what `build_version` raises, RuntimeError with pip's words.
    """
    version = build_version(path, distribution)
    if path.is_dir():
        return version, path.resolve()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    target = ROOT / f"{distribution}-{version}-{digest}"
    requirement = f"{distribution} @ {path.resolve().as_uri()}"
    if not target.is_dir():
        _install(requirement, target)
    return version, target


def parse_overlay(argument: str) -> tuple[str, Path]:
    """`NAME==VERSION=DIR` as (requirement, folder); ValueError says what was wrong with it."""
    form = re.fullmatch(r"([^=]+)==([^=]+)=(.+)", argument)
    if form is None:
        raise ValueError(f"--overlay must be NAME==VERSION=DIR, got {argument!r}")
    name, version, folder = form.groups()
    _checked(Path(folder), name, version)
    return f"{name}=={version}", Path(folder).resolve()


def parse_releases(argument: str) -> tuple[str, list[str]]:
    """`NAME==VERSION,VERSION` as (name, releases); ValueError says what was wrong with it."""
    name, _, listed = argument.partition("==")
    if not name or not listed:
        raise ValueError(f"--releases must be NAME==VERSION,VERSION, got {argument!r}")
    releases = listed.split(",")
    for release in releases:
        parse_release("--releases", release)
    return name, releases


def _release_of(requirement: str, distribution: str) -> str:
    name, _, release = requirement.partition("==")
    if canonicalize_name(name) != canonicalize_name(distribution):
        raise ValueError(f"overlay must be of {distribution}, got {requirement}")
    parse_release("overlay", release)
    return release


def _checked(
    folder: Path,
    distribution: str,
    release: str,
) -> Path:
    installed = _installed(folder)
    if installed.get(canonicalize_name(distribution)) != release:
        raise ValueError(
            f"overlay {folder} must hold {distribution} {release}, it has "
            f"{installed or 'none; pip install --target FOLDER SOURCE fills one'}"
        )
    return folder


def _installed(folder: Path) -> dict[str, str]:
    """Distribution -> release in a folder; what has no metadata is none."""
    found = metadata.distributions(path=[str(folder)])
    # Without metadata Python has an empty message; importlib_metadata, which Dask loads, has None.
    named = [distribution for distribution in found if distribution.metadata]
    return {canonicalize_name(each.name or ""): each.version for each in named}


def _install(requirement: str, target: Path) -> None:
    """Install into `target`, which appears when it is whole; one process at a time.

    What an install leaves that was killed, the next one removes.
    """
    distribution = re.split("==| @ ", requirement)[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.parent / "unfinished"
    # Not a resolver's job: --no-deps, or an old release would bring its own torch.
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        str(unfinished),
        requirement,
        *COMPANIONS.get(distribution, ()),
    ]
    lock = os.open(target.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pip holds it too, should it outlive us
        shutil.rmtree(unfinished, ignore_errors=True)
        if not target.is_dir():
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                pass_fds=(lock,),
            )
            has_it = canonicalize_name(distribution) in _installed(unfinished)
            if done.returncode or not has_it:
                shutil.rmtree(unfinished, ignore_errors=True)
                words = pip_words(done.stderr)
                raise RuntimeError(f"pip could not install {requirement}: {words}")
            unfinished.rename(target)
    finally:
        os.close(lock)
