"""The journal of the study `demo`, on the machine of `make_record`."""

from pathlib import Path

from attnlib.run import store
from attnlib.run.record import Record

MACHINE = "test-gpu-0badcafe"
OTHER = {"gpu": "Other", "gpu_id": "1"}


def append(*records: Record) -> list[Record]:
    for record in records:
        store.append(record)
    return list(records)


def demo_path() -> Path:
    return store.journal_path("demo", MACHINE)


def tear(fragment: bytes) -> None:
    """What a writer leaves that was killed in the middle of a line."""
    demo_path().parent.mkdir(parents=True, exist_ok=True)
    with demo_path().open("ab") as file:
        file.write(fragment)
