"""An engine in a process group of its own, which never outlives the process that started it.

    python -m attnlib.kinds.engine.group COMMAND...     (started by `EngineGroup`, not by hand)

That guard starts COMMAND as the leader of a new process group and passes its own stdin on. When
its stdin ends, as when the process that started it dies, or the leader does, it kills the group and
what is left of it in other groups, so that no rank and no scheduler stays on the GPU.
"""

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GONE_S = 10.0
"""How long a killed process that held a GPU may take to disappear."""
LEFT = "processes of an engine must be gone after"
LAST_WORDS = 300
"""Characters of the log that an error quotes."""
SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER: orphans become our children; a container may have no init."""


class EngineEndedError(Exception):
    """An engine that ended without an answer; `status` is that of its record."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class EngineGroup:
    """The process group of `command`: a JSON line to its stdin, a JSON line from its stdout."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the group
        self._guard = subprocess.Popen(
            [sys.executable, "-m", __name__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(env),
            start_new_session=True,  # a signal to our own group must not end it before the engine
            bufsize=0,
        )
        self._received, self._last_words = b"", ""

    def send(self, question: Mapping[str, Any]) -> None:
        """Send a line; if the engine has ended, `answer` says so."""
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write((json.dumps(question) + "\n").encode())

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next line. EngineEndedError after `limit_s`, or if the engine ended before."""
        assert self._guard.stdout
        end = time.monotonic() + limit_s
        while b"\n" not in self._received:
            remaining = max(0.0, end - time.monotonic())
            if not select.select([self._guard.stdout], [], [], remaining)[0]:
                self.close()
                raise EngineEndedError(
                    "timeout", f"no answer after {limit_s:g} s; {self._last_words}"
                )
            if not (data := os.read(self._guard.stdout.fileno(), 1 << 16)):
                code = self.close()
                status = "crashed" if code > 128 else "error"
                raise EngineEndedError(
                    status, f"the engine ended, status {code}; {self._last_words}"
                )
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def log(self) -> str:
        """What the engine's processes have printed so far, but for its answers."""
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def close(self) -> int:
        """End the group and wait until it is gone; the engine's exit status, 128 + a signal."""
        assert self._guard.stdin and self._guard.stdout
        self._guard.stdin.close()
        self._guard.stdout.close()
        try:
            code = self._guard.wait(2 * GONE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            code = self._guard.wait()
        if not self._log.closed:
            self._last_words = _last_words(self.log())
            self._log.close()
        if LEFT in self._last_words:
            raise RuntimeError(self._last_words)
        return code


def _last_words(log: str) -> str:
    """The first exception of a log and its last line, or its last three lines."""
    lines = log.strip().splitlines()
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    quoted = [raised[0][:LAST_WORDS], lines[-1]] if raised else lines[-3:]
    return " / ".join(dict.fromkeys(quoted))[-2 * LAST_WORDS :] or "it said nothing"


def guard(command: Sequence[str]) -> int:
    """Run `command` until it or our stdin ends; its exit status, 128 + a signal."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
    threading.Thread(target=_pass_stdin_on, args=(engine,), daemon=True).start()
    code = engine.wait()
    _kill_rest()
    return code if code >= 0 else 128 - code


def _pass_stdin_on(engine: "subprocess.Popen[bytes]") -> None:
    assert engine.stdin
    while data := os.read(0, 1 << 16):
        with contextlib.suppress(BrokenPipeError):  # the engine may have closed its stdin
            engine.stdin.write(data)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)


def _kill_rest() -> None:
    """Kill what an engine that ended left to us, and theirs; RuntimeError if some stay."""
    end = time.monotonic() + GONE_S
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while time.monotonic() < end:
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(0.01)
    raise RuntimeError(f"{LEFT} {GONE_S:g} s, got {children.read_text()}")


if __name__ == "__main__":
    os._exit(guard(sys.argv[1:]))
