"""A command with all that it starts, which never outlives us. Run as a file; imports nothing of us.

    python guard.py COMMAND...

It passes its own stdin on. When its stdin ends, as when the process that started it dies, or when
COMMAND ends, it kills whatever COMMAND has started, in other process groups too, so that nothing
stays on the GPU.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GONE_S = 10.0
"""How long a killed process that held a GPU may take to disappear."""
LEFT = 125
"""The exit status where one has not."""
SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER: orphans become our children; a container may have no init."""


def guard(command: list[str]) -> int:
    """Run `command` until it or our stdin ends; its exit status, 128 + a signal, or LEFT."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    leader = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
    thread = threading.Thread(
        target=pass_stdin_on,
        args=(leader,),
        daemon=True,
    )
    thread.start()
    code = leader.wait()
    if not kill_rest():
        return LEFT
    return code if code >= 0 else 128 - code


def pass_stdin_on(leader: "subprocess.Popen[bytes]") -> None:
    """Copy our stdin to the leader's; kill the leader when ours ends."""
    assert leader.stdin is not None
    while data := os.read(0, 1 << 16):
        with contextlib.suppress(BrokenPipeError):  # it may have closed its stdin
            leader.stdin.write(data)
    leader.kill()


def kill_rest() -> bool:
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
