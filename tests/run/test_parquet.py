"""Published records: exact in Parquet, read together with the journal, described and small."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pyarrow.parquet
import pytest
from support.records import MACHINE, OTHER, append, demo_path, full_disk, tear

from attnlib import cli
from attnlib.core.backends.table import TABLE
from attnlib.kinds.extend.case import ExtendCase
from attnlib.kinds.item import Item
from attnlib.measure import files
from attnlib.measure.timer import RUN_TIMERS
from attnlib.run import parquet, store
from attnlib.run.record import STATUSES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "data" / "README.md").read_text()
PUBLISHED = sorted((ROOT / "data" / "records").glob("*/*.parquet"))
FORK = multiprocessing.get_context("fork")
MAX_DATA_BYTES, MAX_FILE_BYTES = 8_500_000, 1_000_000
"""What a clone carries for ever, of data/ and of one file of it: to raise these is a decision, with
its reason in the commit."""


def some_records(make_record):
    """A case of two kinds, a ceiling, a failure, and what a CPU leaves empty."""
    record = make_record(oracle_error=1e-17 / 3, started_at="2026-01-02T03:04:05+00:00")
    extend = ExtendCase(record.item.case, "dllm_extend", 4)
    several = Item("flashinfer-prefill-fa2", "graph", extend)
    ceiling = make_record(item=Item("copy", "graph"), oracle_error=None, oracle_budget=None)
    crash = make_record(round=1, status="crashed", reason='signal SIGKILL; "last\nwords" é')
    bare = make_record(round=2, versions={}, state_before={}, kernels=(), plan_us=())
    return [record, replace(record, item=several), ceiling, crash, bare]


def test_records_survive_their_columns_exactly_and_in_order(make_record):
    none = {"versions": {}, "state_before": {}, "state_after": {}}
    bare = [make_record(item=Item("copy", "graph"), **none)]
    for records in (some_records(make_record), bare):
        found = parquet.records_of(parquet.read_table(parquet.encode(records)))
        assert [record.to_json() for record in found] == [record.to_json() for record in records]


def test_the_same_records_give_the_same_bytes_in_any_process(make_record):
    records = some_records(make_record)
    with multiprocessing.get_context("spawn").Pool(1) as other:
        assert other.apply(parquet.encode, [records]) == parquet.encode(records)


@pytest.mark.parametrize(
    ("machines", "words"),
    [
        ([{"cores": None}], "must survive its columns"),
        ([{"cores": 2}, {"cores": "two"}], "must be of one type"),
        ([], "must be at least one"),
    ],
)
def test_what_the_columns_cannot_hold_is_refused(make_record, machines, words):
    gpu = make_record().machine
    records = [make_record(round=n, machine=gpu | more) for n, more in enumerate(machines)]
    with pytest.raises(ValueError, match=words):
        parquet.encode(records)


def assert_refused(words):
    for read in (store.read, store.load):
        with pytest.raises(ValueError, match=words):
            read("demo", MACHINE)


def test_a_row_that_is_no_record_and_a_file_that_is_none_are_named(make_record, tmp_path):
    table = pd.read_parquet(published(make_record()))
    path = store.published_path("demo", MACHINE)
    table.assign(round=9).to_parquet(path)
    words = f"{path} row 0 must be a record: id must be the content key"
    with pytest.raises(ValueError, match=re.escape(words)):
        store.read("demo", MACHINE)
    for words, changed in {
        "must have the columns .*; differs in .'status'": table.drop(columns="status"),
        "must have the columns .*; differs in .'news'": table.assign(news=1),
        "must have .*; differs in .'machine.gpu_id'": table.drop(columns="machine.gpu_id"),
        "must hold a record, it has none": table.iloc[:0],
        "schema must be 1 to 1, got 2: update attnlib": table.assign(schema=2),
        f"must be of '{MACHINE}', it is of 'a-0badcafe'": table.assign(**{"machine.gpu": "A"}),
        ".*kind of a case must be one of .*, got 'new'": table.assign(**{"case.kind": "new"}),
    }.items():
        changed.to_parquet(path)
        assert_refused(rf"{re.escape(str(path))} {words}")
    whole = path.read_bytes()
    for broken in (whole[:-9], b"", whole[:200] + bytes(200) + whole[400:]):
        path.write_bytes(broken)
        assert_refused(rf"{re.escape(str(path))} must be a whole Parquet file")


def test_a_file_older_than_a_column_with_a_default_loads(make_record):
    path = published(record := make_record(work_per_call=0.0, calls_per_sample=0))
    pd.read_parquet(path).drop(columns=["work_per_call", "calls_per_sample"]).to_parquet(path)
    assert store.read("demo", MACHINE) == [record]
    assert store.load("demo", MACHINE).work_per_call.tolist() == [0.0]


def test_a_record_without_a_window_says_nothing_of_it_and_reads_as_before(make_record):
    plain = make_record().item
    windowed = replace(plain, case=replace(plain.case, spec=replace(plain.case.spec, window=24)))
    tables = [pd.read_parquet(published(make_record(item=item))) for item in (plain, windowed)]
    assert ["case.window" in table for table in tables] == [False, True]
    assert {record.item for record in store.read("demo", MACHINE)} == {plain, windowed}
    assert sorted(store.load("demo", MACHINE).window) == [0, 24]


def published(*records):
    append(*records)
    return store.publish("demo")


def test_published_at_once_or_in_parts_the_journal_becomes_one_file_of_the_same_bytes(make_record):
    records = some_records(make_record)
    path = published(*records)
    assert path == store.published_path("demo", MACHINE)
    assert [each.name for each in path.parent.iterdir()] == ["demo.parquet"]
    assert (store.read("demo", MACHINE), store.machines("demo")) == (records, [MACHINE])
    at_once = path.read_bytes()
    path.unlink()
    published(*records[:2])
    assert published(*records[2:]).read_bytes() == at_once


def killed_publish(owner, dies):
    setattr(owner, dies, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    store.publish("demo")


@pytest.mark.parametrize(("owner", "dies"), [(os, "replace"), (Path, "unlink")])
def test_a_publish_that_was_killed_loses_nothing_and_the_next_one_removes_what_it_left(
    make_record, owner, dies
):
    records = append(*some_records(make_record))
    process = FORK.Process(target=killed_publish, args=(owner, dies))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(demo_path().parent.iterdir())) == 2
    assert store.read("demo", MACHINE) == records
    store.publish("demo")
    assert [path.name for path in demo_path().parent.iterdir()] == ["demo.parquet"]
    assert store.read("demo", MACHINE) == records


def test_a_full_disk_leaves_the_journal_and_no_half_of_a_published_file(make_record, fails):
    records = append(*some_records(make_record))
    with full_disk(5000):
        words = fails("publish", "demo")
    assert words.endswith(f"[Errno 27] File too large: '{store.published_path('demo', MACHINE)}'")
    assert [path.name for path in demo_path().parent.iterdir()] == ["demo.jsonl"]
    assert store.read("demo", MACHINE) == records


def write(record, published):
    for round_ in range(24):
        if round_ in (8, 16):  # not before the journal was published once, and once more
            published.acquire()
        store.append(replace(record, round=round_))


def test_a_writer_loses_nothing_while_its_journal_is_published_again_and_again(make_record):
    times, published = 0, FORK.Semaphore(0)
    writer = FORK.Process(target=write, args=(make_record(), published))
    writer.start()
    while writer.is_alive():
        if store.machines("demo", [".jsonl"]):
            store.publish("demo")
            times += 1
            published.release()
    assert writer.exitcode == 0 and times > 1
    assert [record.round for record in store.read("demo", MACHINE)] == list(range(24))


def test_a_machine_must_be_named_where_several_have_a_journal(make_record):
    with pytest.raises(FileNotFoundError, match="'demo' has no journal to be published"):
        store.publish("demo")
    append(make_record(), make_record(machine=OTHER))
    with pytest.raises(ValueError, match=f"must be one of other-1, {MACHINE} for .*, got ''"):
        store.publish("demo")
    assert store.publish("demo", "other-1").parent.name == "other-1"
    with pytest.raises(ValueError, match=f"must be one of {MACHINE} for .*, got 'other-1'"):
        store.publish("demo", "other-1")


def test_the_command_publishes_what_is_whole_and_says_where(make_record, capsys, fails):
    records = append(make_record())
    tear(b'{"half')
    assert cli.main(["publish", "demo"]) == 0
    path = store.published_path("demo", MACHINE)
    assert capsys.readouterr().out.startswith(f"1 records published in {path}")
    assert store.read("demo", MACHINE) == records
    assert store.torn_path("demo", MACHINE).read_bytes() == b'{"half\n'
    assert "has no journal" in fails("publish", "demo")


def test_a_published_file_is_parsed_once_and_a_new_one_again(make_record, monkeypatch):
    path = published(make_record())
    decode = Mock(side_effect=parquet.records_of)
    monkeypatch.setattr(parquet, "records_of", decode)
    store._decoded.cache_clear()
    for _ in range(3):
        assert len(store.read("demo", MACHINE)) == len(store.load("demo", MACHINE)) == 1
    decode.assert_called_once()
    # As long as the old one, and of the same time.
    before = path.stat()
    files.write_whole(path, parquet.encode([make_record(run_us=(10.25, 12.0, 11.0))]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.read("demo", MACHINE)[0].run_us[0] == 10.25
    table = store.load("demo", MACHINE)
    table["run_us"] = 0.0
    assert store.load("demo", MACHINE).run_us[0] == 11.0


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_is_published_reads_and_survives_being_published_again(path):
    # `encode` compares them; of the largest files it would take seconds. `test_studies` reads all.
    table = parquet.read_table(path.read_bytes())
    assert len(table["id"].unique()) == table.num_rows
    spread = [*range(0, table.num_rows, -(-table.num_rows // 60))]
    parquet.encode(parquet.records_of(table.take(spread)))


def test_the_data_stay_small():
    sizes = {path: path.stat().st_size for path in (ROOT / "data").rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= MAX_DATA_BYTES
    assert {path.name: size for path, size in sizes.items() if size > MAX_FILE_BYTES} == {}
    journals = [path for path in sizes if path.suffix == ".jsonl"]
    assert not [path for path in journals if path.parent.name != "captures"], "publish it"


HEAD = "| column | type | meaning |\n|---|---|---|\n"
ROWS = README.partition(HEAD)[2]
MEANING = dict(re.findall(r"^\| `(\w+)(?:\.\*)?` \|.*?\| (.+) \|$", ROWS, re.M))
MEMBERS = dict(re.findall(r"^\| `(\w+\.[\w-]+)` \| \w+ \| (.* )?\|$", ROWS, re.M))


def test_the_readme_has_the_columns_of_the_published_files():
    seen = {}
    for path in PUBLISHED:
        # What an item of a list is called depends on the release of pyarrow.
        of_file = pyarrow.parquet.read_schema(path)
        seen |= {each.name: re.sub("<(element|item): ", "<", str(each.type)) for each in of_file}
    table = HEAD
    for name, meaning in MEANING.items():
        members = sorted(column for column in seen if column.startswith(f"{name}."))
        table += f"| `{name}{'.*' if members else ''}` | {seen.pop(name, '')} | {meaning} |\n"
        table += "".join(f"| `{n}` | {seen.pop(n)} | {MEMBERS.get(n, '')}|\n" for n in members)
    assert README.endswith(table), f"the table of data/README.md must be:\n{table}"
    assert seen == {}


def test_every_field_of_a_record_has_a_meaning_that_names_what_there_is(make_record):
    assert set(MEANING) == set(make_record().to_form()) | {"again"}
    families = {entry.family for entry in TABLE.values()} - {""}
    named = {"timer": RUN_TIMERS, "status": STATUSES, "kernel_family": families}
    for field, names in named.items():
        assert [name for name in names if f"`{name}`" not in MEANING[field]] == []


def test_the_example_of_the_readme_runs_with_pandas_alone():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    command = [sys.executable, "-c", f"{code}import sys\nassert 'attnlib' not in sys.modules"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("backend"), done.stderr
