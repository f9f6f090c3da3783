"""A process with all that it starts, which never outlives us: JSON lines go in and come out.

    python tests/support/process_group.py COMMAND...     (started by `Group`, not by hand)

That guard starts COMMAND and passes its own stdin on. When its stdin ends, as when the process that
started it dies, or when COMMAND ends, it kills whatever COMMAND has started, in other process
groups too, so that nothing stays on the GPU.
"""

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GONE_S = 10.0
"""How long a killed process that held a GPU may take to disappear."""
LEFT = 125
"""The guard's exit status where one has not."""
SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER: orphans become our children; a container may have no init."""


class EndedError(Exception):
    """A process that ended without an answer: `status` is timeout, crashed or error."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status


class Group:
    """The process of `command` and what it starts."""

    def __init__(self, command, env):
        self._guard = subprocess.Popen(
            [sys.executable, __file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,  # a signal to our own group must not end the guard first
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self._guard.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, question):
        """Send a line; if the process has ended, `answer` says so."""
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write((json.dumps(question) + "\n").encode())
            self._guard.stdin.flush()

    def answer(self, limit_s):
        """The next line. EndedError after `limit_s`, or if the process ended before."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self.close()
            raise EndedError("timeout", f"no answer after {limit_s:g} s") from None
        if line is None:
            code = self.close()
            raise EndedError("crashed" if code > 128 else "error", f"ended with status {code}")
        return json.loads(line)

    def close(self):
        """End all processes and wait until they are gone; the exit status, 128 + a signal."""
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        code = self._guard.wait(2 * GONE_S)
        if code == LEFT:
            raise RuntimeError(f"processes of a group must be gone after {GONE_S:g} s")
        return code


def guard(command):
    """Run `command` until it or our stdin ends; its exit status, 128 + a signal, or LEFT."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    leader = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
    threading.Thread(target=pass_stdin_on, args=(leader,), daemon=True).start()
    code = leader.wait()
    if not kill_rest():
        return LEFT
    return code if code >= 0 else 128 - code


def pass_stdin_on(leader):
    """Copy our stdin to the leader's; kill the leader when ours ends."""
    while data := os.read(0, 1 << 16):
        with contextlib.suppress(BrokenPipeError):  # it may have closed its stdin
            leader.stdin.write(data)
    leader.kill()


def kill_rest():
    """Kill what the leader left to us, and theirs; whether all are gone in time."""
    end = time.monotonic() + GONE_S
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while time.monotonic() < end:
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        time.sleep(0.01)
    return False


if __name__ == "__main__":
    os._exit(guard(sys.argv[1:]))
