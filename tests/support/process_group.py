"""A process with all that it starts, which never outlives us: JSON lines go in and come out.

`attnlib.studies.serving.guard` starts it, and kills in the end whatever it has started.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading

from attnlib.studies.serving import guard


class EndedError(Exception):
    """A process that ended without an answer: `status` is timeout, crashed or error."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status


class Group:
    """The process of `command` and what it starts."""

    def __init__(self, command, env):
        self._guard = subprocess.Popen(
            [sys.executable, guard.__file__, *command],
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
        code = self._guard.wait(2 * guard.GONE_S)
        if code == guard.LEFT:
            raise RuntimeError(f"processes of a group must be gone after {guard.GONE_S:g} s")
        return code
