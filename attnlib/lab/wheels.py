"""Wheels of releases: fetched by pip, with its settings, and read without being installed."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile
from zlib import error as ZlibError

from ..run.releases import pip_words
from .definitions import Definitions, definitions_of

REQUIRES = re.compile(r"^Requires-Dist: flashinfer[-_]python\b[^=;\n]*==\s*([\w.]+)", re.I | re.M)

FIRST_YEAR = 2021
"""Reproducible builds give files a day of 1980 or 2020, which says nothing."""


class Wheel:
    """A wheel of a release of a package. Each method raises RuntimeError where it is broken."""

    def __init__(self, path: Path, package: str, release: str) -> None:
        self.release = release
        self.label = f"{package} {release}"
        try:
            self.archive = ZipFile(path)
        except (BadZipFile, OSError) as error:
            raise self._broken(error) from error
        self.paths = self.archive.namelist()
        self._definitions: dict[str, Definitions] = {}

    def _broken(self, error: Exception) -> RuntimeError:
        return RuntimeError(f"the wheel of {self.label} must be whole, got: {error}")

    def definitions(self, path: str) -> Definitions:
        """Name -> definition of everything in a file; none where the wheel has no such file."""
        if path not in self.paths:
            return {}
        if path not in self._definitions:
            self._definitions[path] = self._read(path)
        return self._definitions[path]

    def _read(self, path: str) -> Definitions:
        try:
            with self.archive.open(path) as file:
                return definitions_of(path, file)
        except (BadZipFile, ZlibError, EOFError, OSError) as error:
            raise self._broken(error) from error
        except (SyntaxError, ValueError) as error:
            major, minor, *_ = sys.version_info
            python = f"Python {major}.{minor}"
            words = f"{path} of {self.label} must be code that {python} can read"
            raise RuntimeError(f"{words}, got: {error}") from error

    def text(self, path: str) -> str:
        """The text of a file."""
        try:
            return self.archive.read(path).decode("utf-8", "replace")
        except (BadZipFile, ZlibError, EOFError, OSError) as error:
            raise self._broken(error) from error

    @property
    def built(self) -> date | None:
        """The day of its newest file; None where files have no day of their own."""
        year, month, day = max(entry.date_time[:3] for entry in self.archive.infolist())
        return date(year, month, day) if year >= FIRST_YEAR else None

    @cached_property
    def flashinfer(self) -> str | None:
        """The release of FlashInfer that it requires, None without one."""
        for path in self.paths:
            if path.endswith(".dist-info/METADATA"):
                metadata = self.text(path)
                found = REQUIRES.search(metadata)
                return found[1] if found else None
        raise self._broken(FileNotFoundError("no METADATA"))


@contextmanager
def fetched(package: str, release: str) -> Iterator[Wheel]:
    """The wheel of a release, removed afterwards; RuntimeError with pip's words without one."""
    with TemporaryDirectory(prefix="attnlib-wheel-") as folder:
        command = [sys.executable, "-m", "pip", "download"]
        command += ["--no-deps", "--quiet", "--only-binary=:all:"]
        command += ["--dest", folder, f"{package}=={release}"]
        done = subprocess.run(command, capture_output=True, text=True)
        paths = list(Path(folder).glob("*.whl"))
        if done.returncode or len(paths) != 1:
            words = pip_words(done.stderr)
            raise RuntimeError(f"pip could not fetch the wheel of {package} {release}: {words}")
        wheel = Wheel(paths[0], package, release)
        with wheel.archive:
            yield wheel
