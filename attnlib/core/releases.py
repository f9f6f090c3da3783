"""Which releases of other packages were read, as `python -m attnlib watch` keeps them."""

import json
from functools import cache
from pathlib import Path

PATH = Path(__file__).resolve().parents[1] / "data" / "releases.json"
"""Package -> release that was read, oldest first -> the FlashInfer that it requires, or null."""
FLASHINFER = "flashinfer-python"
Releases = dict[str, dict[str, str | None]]


def read_releases(package: str) -> dict[str, str | None]:
    """The releases of a package that were read, oldest first, and the FlashInfer each requires.

    `package` is its name on the index. ValueError for one of which none was read.
    """
    releases = all_releases()
    if package not in releases:
        raise ValueError(f"package must be one of {', '.join(releases)}, got {package!r}")
    return releases[package]


@cache
def all_releases() -> Releases:
    """The releases of every package."""
    return json.loads(PATH.read_text())
