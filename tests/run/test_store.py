"""The records on disk: what was kept is read, what is broken is named, nothing is lost."""

import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import signal
import time
from pathlib import Path

import pyarrow.parquet
import pytest
from support.records import (
    CASE,
    CEILING,
    GPU,
    MACHINE,
    OTHER,
    OTHER_MACHINE,
    found,
    full_disk,
    keep,
    measured_folder,
    right_row,
    whole,
)
from test_rows import INVALID, UNTYPED, some_rows

from attnlib import cli
from attnlib.measure import files
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.form import Item
from attnlib.run import rows, store

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = sorted((ROOT / "data" / "records").glob("*/*.parquet"))
FORK = multiprocessing.get_context("fork")
MAX_DATA_BYTES = 9_000_000
MAX_FILE_BYTES = 1_000_000
"""What a clone carries for ever, of data/ and of one file of it: to raise these is a decision, with
its reason in the commit."""


def rounds(count, first=0):
    """Records in the order in which they were measured."""
    return [
        right_row(round=first + number, started_at=f"2026-01-02T03:04:{first + number:02}+00:00")
        for number in range(count)
    ]


def published(*made):
    keep(*made)
    return store.publish("demo")


def write_table(table):
    """Write a published file without asking whether it is right."""
    path = store.published_path("demo", MACHINE)
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path)
    return path


def names_in(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


READERS = {
    "load": lambda: store.load("demo", MACHINE),
    "find": lambda: store.find("demo", MACHINE),
    "read": lambda: store.read("demo", MACHINE),
    "provenance": lambda: store.provenance("demo", MACHINE),
}


def assert_refused(words):
    """Whoever reads the records refuses them."""
    for name, reader in READERS.items():
        with pytest.raises(ValueError, match=words):
            pytest.fail(f"{name} takes {reader()}")


def test_a_record_is_a_file_and_of_one_id_the_newest_stands(data):
    row = right_row()
    path = store.keep(row)
    assert path == data / "records" / MACHINE / "demo" / f"{row['id']}.json"
    seen = rows.flat_row(json.loads(path.read_bytes()))
    assert seen == json.loads(json.dumps(row))
    new = right_row(run_us=(99.0,))
    other, _ = keep(right_row(round=1, started_at="2025"), new)
    assert found() == [other, *whole(new)]
    assert len(names_in(measured_folder())) == 2


@pytest.mark.parametrize("wrong", sorted({*INVALID, *UNTYPED} - {"another machine"}))
def test_no_writer_keeps_what_is_no_record(wrong):
    row, words = {**INVALID, **UNTYPED}[wrong]
    with pytest.raises(ValueError, match=words.removeprefix("must be a record: ")):
        store.keep(row)
    assert names_in(measured_folder()) == []


@pytest.mark.parametrize("wrong", INVALID)
def test_every_reader_refuses_a_published_file_with_a_row_that_is_no_record(wrong):
    row, words = INVALID[wrong]
    table = rows.table_of([*rounds(1), row, *rounds(1, 2)])
    path = write_table(table)
    assert_refused(rf"^{path} row 1 .*{words}")


@pytest.mark.parametrize("wrong", [*INVALID, *UNTYPED])
def test_every_reader_and_publish_refuse_a_measured_file_that_is_no_record(wrong):
    row, words = {**INVALID, **UNTYPED}[wrong]
    keep(*rounds(2))
    path = measured_folder() / "wrong.json"
    path.write_text(json.dumps(row))
    assert_refused(rf"^{path} .*{words}")
    with pytest.raises(ValueError, match=words):
        store.publish("demo")
    assert not store.published_path("demo", MACHINE).exists()


@pytest.mark.parametrize("text", ["not json", "[1, 2]", "null", '{"half', "", "[" * 100_000])
def test_a_file_that_holds_no_record_is_named(text):
    keep(*rounds(1))
    path = measured_folder() / "wrong.json"
    path.write_text(text)
    assert_refused(rf"^{path} must be a record")


def test_a_doubled_row_is_refused():
    table = rows.table_of(rounds(3))
    path = write_table(pyarrow.concat_tables([table, table]))
    assert_refused(rf"^{path} row 3 id must stand once")


def with_column(table, name, values):
    """The table with other values of a column."""
    if name in table.column_names:
        table = table.drop_columns(name)
    return table.append_column(name, [values])


def test_a_file_with_other_columns_is_refused():
    table = rows.table_of(rounds(2))
    for words, changed in {
        "must have the columns .*; differs in .'status'": table.drop_columns("status"),
        "must have the columns .*; differs in .'news'": with_column(table, "news", [1, 2]),
        "must have .*; differs in .'versions.news'": with_column(table, "versions.news", ["", ""]),
        "must have .*; differs in .'machine.gpu_id'": table.drop_columns("machine.gpu_id"),
        "must have the columns .*; differs in .'round'": table.append_column("round", [[1, 2]]),
        "must have run_us of type list.* got list": with_column(table, "run_us", [["1"], ["2"]]),
        "must have run_us in every row": with_column(table, "run_us", [[1.0], None]),
        "must hold a record, it has none": table.slice(0, 0),
    }.items():
        path = write_table(changed)
        assert_refused(rf"^{re.escape(str(path))} {words}")


def test_a_file_that_is_not_whole_is_refused():
    path = published(*rounds(2))
    whole_file = path.read_bytes()
    for broken in (
        whole_file[:-9],
        b"",
        whole_file[:200] + bytes(200) + whole_file[400:],
    ):
        path.write_bytes(broken)
        assert_refused(rf"^{re.escape(str(path))} must be a whole Parquet file")


@pytest.mark.parametrize("written", ["as committed", "now"])
def test_a_flipped_bit_is_refused_or_changes_nothing(written):
    """At 1,000 places of a published file; without checksums of pages 30 % change a value."""
    path = min(PUBLISHED, key=lambda path: path.stat().st_size)
    table = rows.decode(path.read_bytes())
    data = path.read_bytes() if written == "as committed" else rows.encode(table)
    chance = random.Random(0)
    refused = 0
    for _ in range(1000):
        flipped = bytearray(data)
        flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            seen = rows.decode(bytes(flipped))
            rows.validate(seen, path.parent.name)
        except ValueError:
            refused += 1
        else:
            assert seen.equals(table)
    assert refused > 500


def test_readers_and_publish_verify_a_file_that_a_flipped_bit_altered():
    """The same flip of a time's bytes: refused by whoever reads, not by `decode` alone."""
    path = published(*rounds(3))
    data = bytearray(path.read_bytes())
    at = next(at for at in range(4, len(data)) if not decodes_with_a_flip_at(data, at))
    data[at] ^= 1
    path.write_bytes(bytes(data))
    assert_refused(rf"^{re.escape(str(path))} must be a whole Parquet file")
    keep(*rounds(1, 3))
    with pytest.raises(ValueError, match="must be a whole Parquet file"):
        store.publish("demo")


def decodes_with_a_flip_at(data, at):
    flipped = bytearray(data)
    flipped[at] ^= 1
    try:
        rows.decode(bytes(flipped))
    except ValueError as error:
        return "whole Parquet file" not in str(error)
    return True


def test_a_file_older_than_a_column_loads_with_it_empty():
    table = rows.table_of(rounds(2)).drop_columns(["work_per_call", "settle_us", "again", "reason"])
    write_table(table)
    frame = store.load("demo", MACHINE)
    assert frame.work_per_call.tolist() == frame.settle_us.tolist() == [0.0, 0.0]
    assert frame.reason.tolist() == ["", ""]
    assert frame.repeat.tolist() == [False, False]
    keep(*rounds(1, 2))
    assert len(store.load("demo", MACHINE)) == 3


def test_a_study_nobody_measured_is_missing_with_the_machines_that_have_it():
    with pytest.raises(FileNotFoundError, match="'demo' on 'nowhere'; machines: none"):
        store.read("demo", "nowhere")
    keep(right_row(), right_row(machine=OTHER))
    assert found() == whole(right_row())
    assert store.machines("demo") == [OTHER_MACHINE, MACHINE]
    assert store.machines("another") == []
    assert store.find("another", MACHINE).empty
    with pytest.raises(FileNotFoundError, match=f"machines: other-1, {MACHINE}"):
        store.load("demo", "nowhere")


def test_a_row_of_several_queries_a_request_says_mode_mask_and_heads():
    case = ExtendCase(CASE, "target_verify", 4)
    keep(right_row(item=Item("flashinfer-prefill-fa2", "graph", case)))
    row = store.load("demo", MACHINE).iloc[0]
    assert row["mode"] == "target_verify"
    assert row["mask"] == "tree"
    assert row.q_len == 4
    assert row.heads == "8/2"
    assert row.kind == "extend"
    assert row.batch_size == 3
    assert row.kv_len == 40
    assert row.lengths == "ragged"


def test_failures_and_ceilings_load_beside_times_without_one():
    first, second, third = (f"2026-01-02T03:04:0{number}" for number in range(3))
    keep(
        right_row(started_at=first),
        right_row(round=1, status="crashed", reason="signal SIGSEGV", started_at=second),
        right_row(**CEILING, plan_us=(), started_at=third),
    )
    table = store.load("demo", MACHINE)
    assert table["status"].tolist() == ["ok", "crashed", "ok"]
    assert table.run_us.isna().tolist() == [False, True, False]
    assert table.plan_us.isna().tolist() == [False, True, True]
    assert table.kv_len.isna().tolist() == [False, False, True]


def test_a_frame_is_made_once_and_again_of_other_records():
    path = published(*rounds(1))
    frame = store.load("demo", MACHINE)
    frame["run_us"] = 0.0
    assert store.load("demo", MACHINE).run_us[0] == 11.0, "a copy"
    # As long as the old one, and of the same time.
    before = path.stat()
    other = rows.table_of([right_row(run_us=(10.25, 12.0, 13.0))])
    files.write_whole(path, rows.encode(other))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.load("demo", MACHINE).run_us[0] == 12.0
    stamp = store.stamp("demo", MACHINE)
    keep(right_row(round=1))
    assert store.stamp("demo", MACHINE) != stamp
    assert len(store.load("demo", MACHINE)) == 2


def test_provenance_names_file_and_folder_hashes_machine_versions_and_days():
    keep(*rounds(2))
    assert store.provenance("demo", MACHINE)["measured"] == "2026-01-02"
    path = store.publish("demo")
    late = {"started_at": "2026-01-04T09:00:00", "versions": {"torch": "2.13.1"}}
    measured = store.keep(right_row(round=2, **late))
    sums = [hashlib.sha256(each.read_bytes()).hexdigest() for each in (path, measured)]
    assert store.provenance("demo", MACHINE) == {
        "study": "demo",
        "file": f"data/records/{MACHINE}/demo.parquet, data/records/{MACHINE}/demo",
        "sha256": ", ".join(sums),
        "records": 3,
        "machine": GPU,
        "versions": {"flashinfer-python": ["0.6.3"], "torch": ["2.13.0", "2.13.1"]},
        "measured": "2026-01-02 to 2026-01-04",
    }


def test_published_at_once_or_in_parts_records_become_one_file_of_the_same_bytes():
    made = rounds(4)
    path = published(*made)
    assert path == store.published_path("demo", MACHINE)
    assert names_in(path.parent) == ["demo.parquet"]
    assert found() == whole(*made)
    assert store.machines("demo") == [MACHINE]
    at_once = path.read_bytes()
    path.unlink()
    published(*made[:2])
    assert published(*made[2:]).read_bytes() == at_once


def test_a_machine_must_be_named_where_several_have_something_to_publish():
    with pytest.raises(FileNotFoundError, match="'demo' has no records to be published"):
        store.publish("demo")
    keep(right_row(), right_row(machine=OTHER))
    with pytest.raises(ValueError, match=f"must be one of other-1, {MACHINE} for .*, got ''"):
        store.publish("demo")
    assert store.publish("demo", OTHER_MACHINE).parent.name == OTHER_MACHINE
    with pytest.raises(ValueError, match=f"must be one of {MACHINE} for .*, got 'other-1'"):
        store.publish("demo", OTHER_MACHINE)


def test_the_command_publishes_and_says_where(capsys, fails):
    keep(right_row())
    assert cli.main(["publish", "demo"]) == 0
    path = store.published_path("demo", MACHINE)
    assert capsys.readouterr().out.startswith(f"1 records published in {path}")
    assert "has no records to be published" in fails("publish", "demo")


@pytest.mark.parametrize("room", [0, 1, 500])
def test_a_full_disk_leaves_what_was_kept_and_is_told_with_the_files_name(room):
    before = keep(*rounds(2))
    late = right_row(round=2)
    path = measured_folder() / f"{late['id']}.json"
    with full_disk(room), pytest.raises(OSError, match=rf"^\[Errno 27\] .*: '{path}'$"):
        store.keep(late)
    assert found() == before
    assert len(names_in(measured_folder())) == 2
    with full_disk(room), pytest.raises(OSError, match="File too large"):
        store.keep(right_row(run_us=(99.0,)))
    assert found() == before, "the record that was to be replaced is as it was"
    assert len(keep(late)) == 1
    assert len(found()) == 3


def test_a_full_disk_leaves_the_records_and_no_half_of_a_published_file(fails):
    made = keep(*some_rows())
    with full_disk(5000):
        words = fails("publish", "demo")
    assert words.endswith(f"[Errno 27] File too large: '{store.published_path('demo', MACHINE)}'")
    assert names_in(measured_folder().parent) == ["demo"]
    ids = {row["id"] for row in made}
    assert {row["id"] for row in found()} == ids
    assert len(found()) == len(ids)


def killed_publish(owner, dies):
    setattr(
        owner,
        dies,
        lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL),
    )
    store.publish("demo")


@pytest.mark.parametrize("owner, dies", [(os, "replace"), (Path, "unlink")])
def test_a_publish_that_was_killed_loses_nothing_and_the_next_one_removes_what_it_left(owner, dies):
    made = keep(*rounds(3))
    process = FORK.Process(target=killed_publish, args=(owner, dies))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    folder = measured_folder().parent
    assert len(names_in(folder)) == 2
    assert len(names_in(measured_folder())) == 3
    assert found() == made
    store.publish("demo")
    assert names_in(folder) == ["demo.parquet"] and found() == made


def test_what_a_living_writer_has_not_finished_is_not_removed():
    keep(right_row())
    name = f"0badcafe.json.{os.getppid()}{files.UNFINISHED}"
    unfinished = measured_folder() / name
    unfinished.write_text("{")
    assert len(found()) == 1
    store.publish("demo")
    assert names_in(measured_folder()) == [name]


def test_a_record_that_is_measured_again_while_it_is_published_stays(monkeypatch):
    keep(*rounds(2))
    again = right_row(run_us=(99.0,), started_at="2026-01-03")

    def encode_late(table):
        keep(again)
        return rows.encode(table)

    monkeypatch.setattr(store, "encode", encode_late)
    store.publish("demo")
    assert names_in(measured_folder()) == [f"{again['id']}.json"]
    assert found()[-1]["run_us"] == [99.0]
    assert len(found()) == 2


def publish_until(end):
    while not end.acquire(block=False):
        if store.machines("demo", published=False):
            try:
                store.publish("demo")
            except FileNotFoundError:
                pass  # the other one was faster


def test_two_publishers_and_two_writers_lose_nothing():
    end = FORK.Semaphore(0)
    publishers = [FORK.Process(target=publish_until, args=(end,)) for _ in range(2)]
    writers = [FORK.Process(target=keep, args=rounds(12, first)) for first in (0, 12)]
    for process in (*publishers, *writers):
        process.start()
    for writer in writers:
        writer.join()
    for _ in publishers:
        end.release()
    for publisher in publishers:
        publisher.join()
    assert {process.exitcode for process in (*publishers, *writers)} == {0}
    assert sorted(row["round"] for row in found()) == list(range(24))


def test_a_record_is_kept_though_its_folder_was_published_away_meanwhile(monkeypatch):
    mkdir = Path.mkdir
    removed = []

    def made_and_removed(folder, *args, **options):
        mkdir(folder, *args, **options)
        if not removed:
            removed.append(folder)
            folder.rmdir()

    monkeypatch.setattr(Path, "mkdir", made_and_removed)
    keep(*rounds(1))
    assert removed and len(found()) == 1


KILLERS = 2
KILLS_EACH = 40


def write(report, next_round):
    """Keep rounds until the end, and report each when `keep` has returned."""
    os.write(report, b"!")
    while True:
        keep_long(next_round)
        os.write(report, b"%d\n" % next_round)
        next_round += 1


def keep_long(round_):
    """Pages long, so that a kill can fall inside a write."""
    store.keep(right_row(status="error", round=round_, reason=f"{round_} " * 4_000))


def kill_writers(first):
    """The rounds that writers reported; each is killed at a random instant of one of its first four
    writes. An unfinished report is no report."""
    chance = random.Random(first)
    reported = []
    began = time.monotonic()
    for round_ in range(990, 995):
        keep_long(first + round_)
    write_s = (time.monotonic() - began) / 5
    for kill in range(KILLS_EACH):
        receive, report = os.pipe()
        child = os.fork()
        if not child:
            write(report, first + 1_000 * kill)
        os.close(report)
        os.read(receive, 1)
        with os.fdopen(receive) as pipe:
            reported += [pipe.readline() for _ in range(chance.randrange(4))]
            time.sleep(chance.uniform(0.0, write_s))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            reported += [line for line in pipe if line.endswith("\n")]
    return reported


def test_writers_killed_at_eighty_instants_lose_nothing_they_reported():
    with multiprocessing.get_context("spawn").Pool(KILLERS) as killers:
        told = killers.map(kill_writers, [number * 1_000_000 for number in range(KILLERS)])
    reported = {int(line) for lines in told for line in lines}
    seen = found()
    assert len(reported) > KILLERS * KILLS_EACH
    assert reported <= {row["round"] for row in seen}
    assert all(row["reason"] == f"{row['round']} " * 4_000 for row in seen)
    store.publish("demo")
    assert names_in(measured_folder()) == [], "what killed writers left is removed"


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_is_published_reads_and_survives_being_published_again(path):
    table = rows.decode(path.read_bytes())
    rows.validate(table, path.parent.name)
    # Of the largest files it would take seconds.
    every = math.ceil(table.num_rows / 60)
    few = table.take(list(range(0, table.num_rows, every)))
    again = rows.decode(rows.encode(few))
    assert again.equals(few)
    assert rows.rows_of(again) == whole(*rows.rows_of(few))
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0)
    assert column.compression == "ZSTD"


def test_the_data_stay_small():
    paths = [path for path in (ROOT / "data").rglob("*") if path.is_file()]
    sizes = {path: path.stat().st_size for path in paths}
    assert sum(sizes.values()) <= MAX_DATA_BYTES
    assert [path for path in paths if sizes[path] > MAX_FILE_BYTES] == []
    records = [path for path in sizes if "records" in path.parts]
    assert {path.suffix for path in records} == {".parquet"}, "publish it"
