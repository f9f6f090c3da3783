"""The journal of the study `demo`, on the machine of `make_record`."""

from attnlib.run import store

MACHINE = "test-gpu-0badcafe"
OTHER = {"gpu": "Other", "gpu_id": "1"}


def append(*records):
    for record in records:
        store.append(record)
    return list(records)


def demo_path():
    return store.journal_path("demo", MACHINE)


def tear(fragment):
    """What a writer leaves that was killed in the middle of a line."""
    demo_path().parent.mkdir(parents=True, exist_ok=True)
    with demo_path().open("ab") as file:
        file.write(fragment)
