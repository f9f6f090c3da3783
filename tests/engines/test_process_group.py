"""The processes of an engine: whatever ends them, none of them stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.process_group import EndedError, Group

TESTS = Path(__file__).resolve().parents[1]
SERVER = """
import json, os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
child = subprocess.Popen(sleep, start_new_session=True)
print(json.dumps({"child": child.pid}), flush=True)
for line in sys.stdin:
    exec(json.loads(line)["run"])
    print(line, end="", flush=True)
"""


@pytest.fixture
def started():
    """A group whose process has a child in a session of its own, and that child's number."""
    group = Group((sys.executable, "-c", SERVER), os.environ)
    yield group, group.answer(20)["child"]
    group.close()


def gone(pid, within=5.0):
    """Whether a process ends, or has ended and nobody has asked how."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            said = Path(f"/proc/{pid}/stat").read_text()
            if said.rpartition(")")[2].startswith(" Z"):  # a zombie
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_line_is_answered_by_a_line_until_the_group_is_closed(started):
    group, child = started
    for number in range(2):
        question = {"run": f"{number}"}
        group.send(question)
        assert group.answer(20) == question
    assert group.close() == 128 + signal.SIGKILL
    assert gone(child)


@pytest.mark.parametrize(
    "run, limit_s, status, reason",
    [
        ("sys.exit(3)", 20, "error", "ended with status 3"),
        ("os.kill(os.getpid(), 11)", 20, "crashed", "ended with status 139"),
        ("time.sleep(60)", 0.2, "timeout", "no answer after 0.2 s"),
    ],
)
def test_how_it_ended_is_told_and_nothing_is_left(started, run, limit_s, status, reason):
    group, child = started
    group.send({"run": run})
    with pytest.raises(EndedError, match=reason) as ended:
        group.answer(limit_s)
    assert ended.value.status == status and gone(child)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_the_process_that_started_it(number):
    code = (
        "import os, sys, time; from support.process_group import Group\n"
        f"group = Group((sys.executable, '-c', {SERVER!r}), os.environ)\n"
        "print(group.answer(20)['child'], flush=True); time.sleep(100)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=TESTS, stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        child = int(parent.stdout.readline())
        os.killpg(parent.pid, number)
    assert gone(child)
