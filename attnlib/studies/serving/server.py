"""One server of an engine: started, ready, checked by its log, ended with all that it started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ...engines.arms import RUNS, SGLANG, VLLM
from ...run.lock import hold, lock_path
from . import guard
from .engine import Arm, Served, ServerError

PACKAGE = Path(__file__).resolve().parents[3]
HOST = "127.0.0.1"
START_S = 300.0
"""Limit of a start: the first one on a machine compiles kernels."""
POLL_S = 0.2
END_OF_LOG = 1500
"""Characters of a log in an error."""
POINTS = """[sglang.srt.plugins]
attnlib = attnlib.engines.sglang:register
[vllm.general_plugins]
attnlib = attnlib.engines.vllm:register
"""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True)
class Setup:
    """What all servers of a run share: the engine, the model's folder, options, where logs go."""

    engine: Served
    model: Path
    options: tuple[str, ...]
    logs: Path

    def command(self, arm: Arm, port: int) -> list[str]:
        """What starts a server of this arm."""
        has_weights = any(next(self.model.glob(each), None) for each in WEIGHTS)
        options = () if has_weights else self.engine.dummy
        if self.engine.inner_port:
            options += (self.engine.inner_port, str(port + 1))
        return [
            sys.executable,
            "-m",
            self.engine.module,
            self.engine.model_option,
            str(self.model),
            "--host",
            HOST,
            "--port",
            str(port),
            *options,
            *self.engine.options,
            *self.options,
            *arm.options,
        ]

    def environment(self, arm: Arm) -> dict[str, str]:
        """Ours, with the variables of this arm and of no other, and with our plugin."""
        ours = {}
        for name, value in os.environ.items():
            if not name.startswith((SGLANG.prefix, VLLM.prefix)):
                ours[name] = value
        paths = [str(PACKAGE), os.environ.get("PYTHONPATH", "")]
        if not is_installed():
            paths.insert(0, str(_made_installed(self.logs)))
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return ours | arm.environment(self.engine)


class Server:
    """A server that was started; `wait` until it is ready, `stop` it in the end."""

    def __init__(self, setup: Setup, arm: Arm, port: int, name: str) -> None:
        self.setup = setup
        self.arm = arm
        self.port = port
        self.log_path = setup.logs / f"{name}.log"
        self._started = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, guard.__file__, *setup.command(arm, port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=setup.environment(arm),
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it has said."""
        return self.log_path.read_text(errors="replace")

    def error(self, why: str) -> ServerError:
        """An error with the end of the log."""
        said = " ".join(self.log[-END_OF_LOG:].split())
        return ServerError(f"the server {self.arm.text!r} {why}; its log ends: {said or 'empty'}")

    def wait(self, limit_s: float = START_S) -> float:
        """Wait until it is ready; seconds since it was started. ServerError if it is not."""
        while not self._answers():
            self.require_alive()
            if time.monotonic() - self._started > limit_s:
                raise self.error(f"was not ready after {limit_s:.0f} s")
            time.sleep(POLL_S)
        self.require_alive()  # another one may answer on its port
        return time.monotonic() - self._started

    def require_alive(self) -> None:
        """ServerError if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise self.error(f"ended with status {code}")

    def runs(self) -> str:
        """What its log says it runs, `fa3 splits=bounded`; ServerError unless the arm says so."""
        log = self.log
        found = ["".join(groups) for groups in self._backends(log)]
        if not found:
            raise self.error("does not name its attention backend")
        backend = found[-1]
        asked = self.arm.asked_backend
        if asked and asked.lower() != backend.lower():
            raise self.error(f"must run the attention backend {asked}, it runs {backend}")
        words = [backend]
        for name, value in self.arm.variables:
            if f"{RUNS} {name}={value}" not in log:
                raise self.error(f"does not run {name}={value}")
            words.append(f"{name}={value}")
        return " ".join(words)

    def _backends(self, log: str) -> Iterator[tuple[str, ...]]:
        for match in self.setup.engine.backend.finditer(log):
            yield tuple(group or "" for group in match.groups())

    def stop(self) -> None:
        """End it and all that it started. RuntimeError if one of them stays."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        code = self._process.wait(2 * guard.GONE_S)
        if code == guard.LEFT:
            raise RuntimeError(f"processes of a server must be gone after {guard.GONE_S:g} s")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False
        except Exception as error:  # no HTTP at all: another program's port
            raise self.error(f"must answer HTTP on port {self.port}: {error}") from error


def port_of(first: int, number: int) -> int:
    """The port of this arm, counted from 0; the engine takes ports of its own behind it."""
    return first + 1000 * number


@contextmanager
def hold_ports(first: int, count: int) -> Iterator[list[int]]:
    """Ports that no other run of ours and no program uses, for the block.

    RuntimeError that names the port which is taken.
    """
    ports = [port_of(first, number) for number in range(count)]
    with ExitStack() as held:
        for port in ports:
            path = lock_path("cpu").with_name(f"attnlib-port-{port}.lock")
            held.enter_context(hold(path, f"port {port} must be used by one run (--port)"))
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except OSError as error:
                    raise RuntimeError(f"port {port} must be free (--port): {error}") from error
        yield ports


def is_installed() -> bool:
    """Whether engines find our plugin by itself."""
    points = metadata.entry_points(group="sglang.srt.plugins")
    return any(point.value.startswith("attnlib.") for point in points)


def _made_installed(folder: Path) -> Path:
    """A folder in `folder` that says to importlib that attnlib is installed."""
    home = folder / "plugin"
    info = home / "attnlib-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attnlib\nVersion: 0\n")
    (info / "entry_points.txt").write_text(POINTS)
    return home
