"""Traces spoiled at random places: each is refused in one line that names the file."""

import gzip
import json
import random
import sqlite3
from contextlib import closing

import pytest
from support import traces
from support.traces import Writer, runs

SEEDS = range(20)
PER_SEED = 10
MISSING = object()
NO_TIMES = (None, True, "10", "nan", [], {}, -1, -0.5, 1e300, 10**400, float("nan"), float("inf"))
NO_COUNTS = ("7", 1.5, [], {}, True, float("inf"))
SPOILS = [
    *((("ts",), value) for value in (*NO_TIMES, MISSING)),
    *((("dur",), value) for value in (*NO_TIMES, MISSING)),
    *((("name",), value) for value in (None, 7, [], {}, MISSING)),
    *((("args",), value) for value in (7, "x", [1], True)),
    *((("args", "correlation"), value) for value in NO_COUNTS),
    *((("args", "device"), value) for value in NO_COUNTS),
    *((("args", "grid"), value) for value in ("x", 7, {"x": 1}, [132, "1", 1], [1.5, 1, 1])),
]
"""Where a kernel's event is spoiled, and by what."""
HEADERS = (
    [7],
    ["H200"],
    [{"id": [], "name": "H200"}],
    [{"id": 0, "name": 7}],
)
HEADERS += ([{"id": 0, "name": "H200", "numSms": "132"}],)
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
QUERIES = (
    f"DROP TABLE {KERNEL}",
    "DROP TABLE StringIds",
    f"DELETE FROM {KERNEL}",
    "DELETE FROM StringIds",
    "INSERT INTO StringIds SELECT id, value || 'x' FROM StringIds",
    *(f"ALTER TABLE {KERNEL} DROP COLUMN {name}" for name in ("start", "end")),
    *(f"ALTER TABLE StringIds DROP COLUMN {name}" for name in ("id", "value")),
    *(
        f"UPDATE {KERNEL} SET {column} = {value} WHERE rowid = {{row}}"
        for column in ("start", "end", "demangledName", "correlationId", "gridX", "deviceId")
        for value in ("'x'", "x'ff'", "9e999")
    ),
    *(f"UPDATE {KERNEL} SET {column} = NULL WHERE rowid = {{row}}" for column in ("start", "end")),
    f"UPDATE {KERNEL} SET end = start - 1 WHERE rowid = {{row}}",
)


def server():
    """Two steps of a decode server."""
    writer = Writer()
    for _ in range(2):
        plan = [lambda writer: writer.copy("DtoH", 68), lambda writer: writer.wait()]
        writer.step(
            [runs(traces.FA2_16)],
            layers=2,
            ahead=plan,
            mark="step[DECODE bs=16]",
        )
    return writer


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """The bytes of an export of Nsight Systems."""
    return server().export(tmp_path_factory.mktemp("export") / "server.sqlite").read_bytes()


def spoil_an_event(pick, path):
    document = {**traces.HEAD, "traceEvents": server().events}
    place, value = pick.choice(SPOILS)
    event = pick.choice([e for e in document["traceEvents"] if e["cat"] == "kernel"])
    for name in place[:-1]:
        event = event[name]
    event[place[-1]] = value
    if value is MISSING:
        del event[place[-1]]
    path.write_text(json.dumps(document))


def spoil_the_header(pick, path):
    header = {"deviceProperties": pick.choice(HEADERS)}
    path.write_text(json.dumps({**header, "traceEvents": server().events}))


def nest_deeply(pick, path):
    opens, closes = pick.choice([("[", "]"), ('{"a":', "}")])
    depth = pick.randrange(2_000, 50_000)
    nested = opens * depth + "1" + closes * depth
    where = pick.choice(['"traceEvents": [', '"args": {"x": '])
    whole = json.dumps({"traceEvents": server().events}).replace('"args": {', '"args": {"x": 1, ')
    path.write_text(whole.replace(where, f"{where}{nested}, ", 1))


def cut_it_short(pick, path):
    data = server().save(path).read_bytes()
    data = gzip.compress(data) if pick.random() < 0.5 else data
    path.write_bytes(data[: pick.randrange(len(data) - 10)])


def write_anything(pick, path):
    path.write_bytes(pick.choice([b"", b"\0", b"\x1f\x8b", b"{}", b"[]", pick.randbytes(999)]))


def spoil_an_export(pick, path, export):
    path.write_bytes(export)
    with closing(sqlite3.connect(path)) as base:
        base.execute(pick.choice(QUERIES).format(row=pick.randrange(1, 9)))
        base.commit()


def cut_an_export_short(pick, path, export):
    path.write_bytes(export[: pick.randrange(16, len(export) // 2)])


OF_PROFILER = (spoil_an_event, spoil_an_event, spoil_the_header, nest_deeply, cut_it_short)
OF_PROFILER += (write_anything,)
OF_NSIGHT = (spoil_an_export, spoil_an_export, cut_an_export_short)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_malformed_trace_is_one_line_that_names_it_and_nothing_is_written(
    seed, tmp_path, fails, export
):
    pick = random.Random(seed)
    path = tmp_path / "server.json"
    for _ in range(PER_SEED):
        spoil = pick.choice((*OF_PROFILER, *OF_NSIGHT))
        spoil(pick, path, *([export] if spoil in OF_NSIGHT else []))
        line = fails(
            "diagnose",
            str(path),
            *pick.choice(
                [
                    (),
                    ("--json",),
                    (str(path),),
                ]
            ),
        )
        assert str(path) in line and len(line) < 600, (spoil.__name__, line)
        assert [*tmp_path.iterdir()] == [path]
