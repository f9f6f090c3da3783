"""The records on disk: what was appended is read, what is broken is named, nothing is lost."""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace

import pytest
from support.records import MACHINE, OTHER, append, demo_path, full_disk, tear

from attnlib.kinds.extend.case import ExtendCase
from attnlib.kinds.item import Item
from attnlib.run import store


def append_rounds(make_record, count):
    return append(*(make_record(round=round_) for round_ in range(count)))


def test_records_are_read_as_they_were_appended_and_of_one_id_the_newest(make_record, data):
    path = store.append(make_record())
    assert path == demo_path() == data / "records" / MACHINE / "demo.jsonl"
    assert path.read_text() == make_record().to_json() + "\n"
    other, new = append(make_record(round=1), make_record(run_us=(99.0,)))
    assert store.read("demo", MACHINE) == [other, new]


@pytest.mark.parametrize("lines", [0, 2])
def test_wherever_a_line_is_cut_reading_refuses_it_and_the_next_writer_goes_on(make_record, lines):
    records = append_rounds(make_record, lines)
    whole = demo_path().read_bytes() if lines else b""
    last, late = make_record(round=7).to_json().encode(), make_record(round=8)
    torn_path = store.torn_path("demo", MACHINE)
    for cut in (*range(1, len(last), 29), len(last)):
        for path in (demo_path(), torn_path):
            path.unlink(missing_ok=True)
        tear(whole + last[:cut])
        with pytest.raises(ValueError, match=rf"demo\.jsonl line {lines + 1} .*cut short"):
            store.read("demo", MACHINE)
        assert demo_path().read_bytes() == whole + last[:cut]
        store.append(late)
        assert store.read("demo", MACHINE) == [*records, late]
        assert torn_path.read_bytes() == last[:cut] + b"\n"


@pytest.mark.parametrize("room", [0, 1, 500])
def test_a_full_disk_leaves_the_journal_as_it_was_and_is_told_with_its_name(make_record, room):
    records = append_rounds(make_record, 2)
    whole = demo_path().read_bytes()
    with full_disk(len(whole) + room):
        with pytest.raises(OSError, match=rf"^\[Errno 27\] .*: '{demo_path()}'$"):
            store.append(make_record(round=2))
    assert demo_path().read_bytes() == whole
    assert store.read("demo", MACHINE) == records
    store.append(make_record(round=2))
    assert len(store.read("demo", MACHINE)) == 3


def test_a_new_sweep_moves_torn_lines_and_nothing_else_to_those_set_aside_before(make_record):
    assert store.recover("demo", MACHINE) == []
    records = append_rounds(make_record, 2)
    assert store.recover("demo", MACHINE) == records
    assert not store.torn_path("demo", MACHINE).exists()
    for words in (b'{"half', b"two"):
        tear(words)
        assert store.recover("demo", MACHINE) == records
    assert store.torn_path("demo", MACHINE).read_bytes() == b'{"half\ntwo\n'


def test_a_line_that_is_no_record_of_this_machine_is_named_with_its_file(make_record):
    append_rounds(make_record, 3)
    first, second, third = demo_path().read_text().splitlines()
    flat = json.loads(second)
    for words, line in {
        "a record: .*content key": json.dumps({**flat, "round": 9}),
        "a record: page_size": json.dumps(flat | {"case": flat["case"] | {"page_size": 12}}),
        "a record: Expecting": "not json",
        "a record: 'list'": "[1, 2]",
        "a record: 'NoneType'": "null",
        f"of '{MACHINE}', it is of 'other-1'": make_record(machine=OTHER).to_json(),
    }.items():
        demo_path().write_text("\n".join([first, line, third, ""]))
        with pytest.raises(ValueError, match=rf"^{demo_path()} line 2 must be {words}"):
            store.read("demo", MACHINE)


def test_a_study_nobody_measured_is_missing_with_the_machines_that_have_it(make_record):
    with pytest.raises(FileNotFoundError, match="'demo' on 'nowhere'; machines: none"):
        store.read("demo", "nowhere")
    (mine,) = append_rounds(make_record, 1)
    store.append(make_record(machine=OTHER))
    assert store.read("demo", MACHINE) == [mine]
    assert store.machines("demo") == ["other-1", MACHINE]
    assert store.machines("another") == []
    with pytest.raises(FileNotFoundError, match=f"machines: other-1, {MACHINE}"):
        store.load("demo", "nowhere")


def test_a_row_of_several_queries_a_request_says_mode_mask_and_heads(make_record):
    record = make_record()
    case = ExtendCase(record.item.case, "target_verify", 4)
    store.append(replace(record, item=Item("flashinfer-prefill-fa2", "graph", case)))
    row = store.load("demo", MACHINE).iloc[0]
    assert (row["mode"], row["mask"], row.q_len, row.heads) == ("target_verify", "tree", 4, "8/2")
    assert (row.kind, row.batch_size, row.kv_len, row.lengths) == ("extend", 3, 40, "ragged")


def test_failures_and_ceilings_load_beside_times_without_one(make_record):
    store.append(make_record())
    store.append(make_record(round=1, status="crashed", reason="signal SIGSEGV"))
    ceiling = make_record(item=Item("copy", "graph"), oracle_error=None, oracle_budget=None)
    store.append(replace(ceiling, plan_us=()))
    table = store.load("demo", MACHINE)
    assert table["status"].tolist() == ["ok", "crashed", "ok"]
    assert table.run_us.isna().tolist() == [False, True, False]
    assert table.plan_us.isna().tolist() == [False, True, True]
    assert table.kv_len.isna().tolist() == [False, False, True]


def test_provenance_names_both_files_hashes_machine_versions_and_days(make_record):
    append_rounds(make_record, 2)
    assert store.provenance("demo", MACHINE)["measured"] == "2026-01-02"
    files = [store.publish("demo"), demo_path()]
    late = {"started_at": "2026-01-04T09:00:00", "versions": {"torch": "2.13.1"}}
    store.append(make_record(round=2, **late))
    assert store.provenance("demo", MACHINE) == {
        "study": "demo",
        "file": f"data/records/{MACHINE}/demo.parquet, data/records/{MACHINE}/demo.jsonl",
        "sha256": ", ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files),
        "records": 3,
        "machine": make_record().machine,
        "versions": {"flashinfer-python": ["0.6.3"], "torch": ["2.13.0", "2.13.1"]},
        "measured": "2026-01-02 to 2026-01-04",
        "commands": ["python -m attnlib measure demo"],
    }


KILLERS, KILLS_EACH = 2, 40


def write(record, report, next_round):
    """Append rounds until the end, and report each when `append` has returned."""
    os.write(report, b"!")
    while True:
        append_long(record, next_round)
        os.write(report, b"%d\n" % next_round)
        next_round += 1


def append_long(record, round_):
    """Pages long, so that a kill can fall inside a write."""
    store.append(replace(record, round=round_, reason=f"{round_} " * 4_000))


def kill_writers(record, first):
    """The rounds that writers reported; each is killed at a random instant of one of its first four
    writes. An unfinished report is no report."""
    chance, reported, began = random.Random(first), [], time.monotonic()
    for round_ in range(990, 995):
        append_long(record, first + round_)
    write_s = (time.monotonic() - began) / 5
    for kill in range(KILLS_EACH):
        receive, report = os.pipe()
        child = os.fork()
        if not child:
            write(record, report, first + 1_000 * kill)
        os.close(report)
        os.read(receive, 1)
        with os.fdopen(receive) as pipe:
            reported += [pipe.readline() for _ in range(chance.randrange(4))]
            time.sleep(chance.uniform(0.0, write_s))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            reported += [line for line in pipe if line.endswith("\n")]
    return reported


def test_writers_killed_at_eighty_instants_lose_nothing_they_reported(make_record):
    record = make_record(status="error", reason="r")
    with multiprocessing.get_context("spawn").Pool(KILLERS) as killers:
        told = killers.starmap(kill_writers, [(record, n * 1_000_000) for n in range(KILLERS)])
    reported = {int(line) for lines in told for line in lines}
    found = store.recover("demo", MACHINE)
    assert len(reported) > KILLERS * KILLS_EACH
    assert reported <= {record.round for record in found}
    assert all(record.reason == f"{record.round} " * 4_000 for record in found)
