"""One fresh process: a job in, records out. The only place that runs foreign kernels for a study.

    python -m attnlib.run.worker JOB.json          (started by `jobs`, not by hand)
    python -m attnlib.run.worker --describe cuda   prints the machine as JSON

A job is `{"study", "round", "device", "command", "items": [item, ...], "progress": PATH}`.
For each item, in order, the worker writes `start` to the progress file, measures, puts the
record into the store, writes `done`. Whatever kills the process, the parent knows which item did it
and goes on with the rest. With `--end-with-stdin` it ends with its process group, whose leader it
is, when its parent closes stdin, so that an orphan cannot go on using the GPU without the lock.
"""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from ..core.backends.table import RECORDED
from ..measure.calls.base import Bench, Subject
from ..measure.calls.cases import subject_class
from ..measure.calls.form import Item, item_from_dict
from ..measure.machine import describe_machine, describe_state, describe_versions
from . import store
from .rows import Row, row_of, strip_folders
from .schema import COLUMNS

CONTEXT_LOST, CANNOT_WRITE = 75, 74
"""Exit status after a CUDA error that poisons the process (EX_TEMPFAIL: start a new one), and where
a record could not be written, as on a full disk (EX_IOERR)."""
REASON_LENGTH = 300


class Worker:
    """Measures the items of one job, each by its kind's subject (`measure.calls`)."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.device = job["device"]
        self.machine = describe_machine(self.device)
        self.versions = describe_versions(RECORDED)
        self._subjects: dict[object, Subject] = {}

    def measure(self, item: Item) -> Row:
        """The record of one item; every failure that leaves the process sane becomes a status."""
        before = describe_state(self.device)
        asked = {}
        for column in COLUMNS:
            if column.ask:
                asked[column.name] = column.ask(self.device)
        try:
            cls = subject_class(item.case)
            if cls not in self._subjects:
                bench = Bench(self.device, self.machine, self.versions)
                self._subjects[cls] = cls(bench)
            fields = self._subjects[cls].measure(item)
        except Exception as error:
            # These leave the CUDA context unusable; an out-of-memory error does not.
            lost = "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
            fields = {"status": "crashed" if lost else "error", "reason": _reason(error)}
        return row_of(
            item,
            self.machine,
            study=self.job["study"],
            round=self.job["round"],
            versions=self.versions,
            command=self.job["command"],
            state_before=before,
            state_after=describe_state(self.device),
            **asked,
            **fields,
        )


def run_job(path: Path) -> int:
    """Measure every item of the job at `path`; returns the exit status."""
    job = json.loads(path.read_text())
    with Path(job["progress"]).open("a", buffering=1) as progress:
        worker = Worker(job)
        for form in job["items"]:
            progress.write("start\n")
            row = worker.measure(item_from_dict(form))
            try:
                store.keep(row)
            except OSError as error:
                print(error, file=sys.stderr)
                return CANNOT_WRITE
            progress.write("done\n")
            if row["status"] == "crashed":
                return CONTEXT_LOST
    return 0


def _reason(error: Exception) -> str:
    words = strip_folders(f"{type(error).__name__}: {error}")
    reason = " ".join(words.split())[:REASON_LENGTH]
    # A compiler's own complaint stands far below the command line that it got.
    complaint = re.search(r"^.*\berror: .*$", words, re.MULTILINE)
    if complaint is None or complaint[0].strip() in reason:
        return reason
    return f"{reason} ... {complaint[0].strip()[:REASON_LENGTH]}"


def main(arguments: list[str]) -> int:
    """Entry point of the worker process."""
    if arguments[0] == "--describe":
        print(json.dumps(describe_machine(arguments[1])))
        return 0
    if arguments[0] == "--end-with-stdin":
        threading.Thread(target=end_with_stdin, daemon=True).start()
    return run_job(Path(arguments[-1]))


def end_with_stdin() -> None:
    """Wait until stdin is closed, then end this process and its group, whose leader it is."""
    # Blocks without the GIL: it costs the measurement nothing.
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
