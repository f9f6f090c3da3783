"""Which releases of a distribution there are: in a folder of wheels, on the index, or given.

| source | when |
|---|---|
| `--overlay` | some are given |
| wheels in the folder `ATTNLIB_WHEELS` | it is set; beside those given |
| `pip index versions` | neither |

The release of the environment needs no overlay, so it belongs to each list. Releases are strings
that packaging.version can order, oldest first.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from .overlay import installed_release, wheel_folder


def available_releases(
    distribution: str, overlays: Iterable[str] = (), *, early: bool = False
) -> list[str]:
    """The releases that can be had here; `overlays` are requirements `NAME==VERSION` given.

    Pre-releases that nobody gave count only if `early`. Raises ValueError for an overlay of another
    distribution, and what the sources raise.
    """
    given = [_release_of(requirement, distribution) for requirement in overlays]
    folder = wheel_folder()
    found = wheel_releases(folder, distribution) if folder else []
    if not folder and not given:
        found = index_releases(distribution)
    found = [release for release in found if early or not Version(release).is_prerelease]
    return ordered([*given, *found, *filter(None, [installed_release(distribution)])])


def wheel_releases(folder: Path, distribution: str) -> list[str]:
    """Releases of `distribution` among the wheels in `folder`, by their file names.

    Raises ValueError for a release whose wheels are all for another Python or platform.
    """
    here = frozenset(sys_tags())
    fits: dict[str, bool] = {}
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.whl")):
        name, version, _, tags = parse_wheel_filename(path.name)
        if name == canonicalize_name(distribution):
            release = str(version)
            fits[release] = fits.get(release, False) or not here.isdisjoint(tags)
            names[release] = path.name
    foreign = [names[release] for release, fit in fits.items() if not fit]
    if foreign:
        raise ValueError(
            f"ATTNLIB_WHEELS must hold wheels for this Python and platform, got {foreign[0]}"
        )
    return ordered(fits)


def index_releases(distribution: str) -> list[str]:
    """Releases on the package index, pre-releases too; RuntimeError with pip's words."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--pre", distribution]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = " ".join(done.stderr.split())[-300:]
        raise RuntimeError(f"pip could not list the releases of {distribution}: {words}")
    return parse_index(done.stdout)


def parse_index(text: str) -> list[str]:
    """The releases in what `pip index versions` prints; RuntimeError where it has none."""
    for line in text.splitlines():
        head, _, tail = line.partition(":")
        if head.strip() == "Available versions":
            return ordered(part.strip() for part in tail.split(",") if part.strip())
    raise RuntimeError(f"pip index versions must list available versions, got {text.strip()!r}")


def releases_between(releases: Iterable[str], first: str, last: str) -> list[str]:
    """The releases from `first` to `last`, oldest first; both must be among them.

    Raises ValueError naming the end that is missing, with the releases there are.
    """
    known = ordered(releases)
    low, high = parse_release("first", first), parse_release("last", last)
    for name, end in ((first, low), (last, high)):
        if end not in map(Version, known):
            raise ValueError(f"release must be one of {', '.join(known) or 'none'}, got {name!r}")
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


def _release_of(requirement: str, distribution: str) -> str:
    name, _, release = requirement.partition("==")
    if canonicalize_name(name) != canonicalize_name(distribution):
        raise ValueError(f"overlay must be of {distribution}, got {requirement}")
    parse_release("overlay", release)
    return release
