"""An engine in a process group of its own, which never outlives the process that started it.

    python -m attnlib.kinds.engine.group COMMAND...     (started by `EngineGroup`, not by hand)

That guard starts COMMAND as leader of a new group, hands on what comes in on its own stdin, and
kills the whole group as soon as its stdin ends, which it does when whoever started it dies, or as
soon as the leader has ended, so that no rank and no scheduler is left on the GPU.
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
from typing import Any

GONE_S = 10.0
"""A killed process that held a GPU takes a moment to be gone."""
LAST_WORDS = 300
ADOPT = 36
"""Linux's PR_SET_CHILD_SUBREAPER: orphans are ours to wait for; a container may have no init."""


class EngineEndedError(Exception):
    """An engine that gave no answer, and is no more; `status` is that of a record."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class EngineGroup:
    """The group that runs `command`: a JSON line to its stdin, a JSON line from its stdout."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the group
        self._guard = subprocess.Popen(
            [sys.executable, "-m", __name__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(env),
            start_new_session=True,  # what ends our own group would end it before the engine
            bufsize=0,
        )
        self._heard, self._words = b"", ""

    def tell(self, question: Mapping[str, Any]) -> None:
        """Send a line; an engine that has ended is found out by `answer`."""
        assert self._guard.stdin
        try:
            self._guard.stdin.write((json.dumps(question) + "\n").encode())
        except BrokenPipeError:
            pass

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next line. EngineEndedError after `limit_s`, or if the engine ended before."""
        assert self._guard.stdout
        end = time.monotonic() + limit_s
        while b"\n" not in self._heard:
            left = max(0.0, end - time.monotonic())
            if not select.select([self._guard.stdout], [], [], left)[0]:
                self.close()
                raise EngineEndedError("timeout", f"no answer after {limit_s:g} s; {self._words}")
            if not (data := os.read(self._guard.stdout.fileno(), 1 << 16)):
                code = self.close()
                how = "crashed" if code > 128 else "error"
                raise EngineEndedError(how, f"the engine ended, status {code}; {self._words}")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def close(self) -> int:
        """End the group, and wait until it is gone; the engine's exit status, 128 + a signal."""
        assert self._guard.stdin and self._guard.stdout
        self._guard.stdin.close()
        self._guard.stdout.close()
        try:
            code = self._guard.wait(2 * GONE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            code = self._guard.wait()
        if not self._log.closed:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
            last = (raised[0][:LAST_WORDS], *lines[-1:]) if raised else lines[-3:]
            self._words = " / ".join(dict.fromkeys(last))[-2 * LAST_WORDS :] or "it said nothing"
            self._log.close()
        return code


def guard(command: Sequence[str]) -> int:
    """Run `command` to its end or to that of our stdin; its exit status, 128 + a signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
    threading.Thread(target=_hand_on, args=(engine,), daemon=True).start()
    code = engine.wait()
    _kill(engine.pid)
    return code if code >= 0 else 128 - code


def _hand_on(engine: "subprocess.Popen[bytes]") -> None:
    assert engine.stdin
    with contextlib.suppress(BrokenPipeError, ProcessLookupError):
        while data := os.read(0, 1 << 16):
            engine.stdin.write(data)
        os.killpg(engine.pid, signal.SIGKILL)


def _kill(group: int) -> None:
    """Kill a process group and wait until nothing of it is left, as far as it can be seen."""
    end = time.monotonic() + GONE_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-group, os.WNOHANG)
            time.sleep(0.01)


if __name__ == "__main__":
    os._exit(guard(sys.argv[1:]))
