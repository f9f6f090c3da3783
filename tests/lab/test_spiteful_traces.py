"""Traces made to harm whoever reads them: names, views and files without end, what steers a
terminal, what figures take for a formula."""

import json
import random
import sqlite3
import time
from contextlib import closing

import pytest
from support import traces
from support.one_line_mistakes import mistaken
from support.traces import HEAD, Writer, runs

import attnlib
from attnlib import cli
from attnlib.engines import capture
from attnlib.lab import claims
from attnlib.lab.patterns import tile_rows
from attnlib.measure import files, trace_file
from attnlib.measure.printable import CONTROL, printable
from attnlib.measure.spans import MOST_NAME, Span, short_name
from attnlib.select import libraries

CASES = ("--base", "0.6.3", "--new", "0.6.4", "--cases")
DEEP = 32_000
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
DECODE = {"mark": "step[DECODE bs=16]"}


def served(*attention, steps=5, **how):
    writer = Writer()
    for _ in range(steps):
        writer.step(attention, **how)
    return writer


@pytest.mark.parametrize(
    "name",
    [
        "f" + "<int" * DEEP + ">" * DEEP,
        "f" + "<" * 2 * DEEP,
        traces.FA2_16 + "KernelTraits" * 8000,
        "_Z" + "1a" * 500_000,
        "device_kernel<" + "a::" * DEEP,
    ],
)
def test_a_name_without_end_is_cut_before_it_is_searched(name, tmp_path):
    path = served(
        runs(name),
        runs(traces.FA2_16),
        **DECODE,
    ).save(tmp_path / "a.json")
    began = time.process_time()
    diagnosis = attnlib.diagnose(path)
    assert time.process_time() - began < 5
    assert max(len(span.symbol) for span in diagnosis.trace.work) <= MOST_NAME


@pytest.mark.parametrize(
    "name, short",
    [
        ("void ns::f<A<int>, (B)1>(A<int>*)", "f"),
        ("f<A<int>>::g<B>", "g"),
        ("void f<A<int", "f"),
        ("void (anonymous namespace)::f<int>(int)", "f"),
        ("a->b", "a->b"),
        ("ns::f>::g", "g"),
        ("<>", "<>"),
    ],
)
def test_template_arguments_are_left_out_of_a_short_name(name, short):
    assert short_name(name) == short


def test_the_tile_of_a_kernel_is_searched_once_for_a_name():
    span = Span("kernel", "x", 0.0, 1.0, 1.0, symbol="KernelTraits" * (MOST_NAME // 12))
    began = time.process_time()
    assert {tile_rows(span) for _ in range(5000)} == {0}
    assert time.process_time() - began < 2


@pytest.mark.parametrize("table", ["CUPTI_ACTIVITY_KIND_KERNEL", "StringIds", "TARGET_INFO_GPU"])
@pytest.mark.parametrize("how", ["VIEW {} AS {}", "VIRTUAL TABLE {} USING fts5(id, value)"])
def test_a_view_in_an_nsight_export_is_refused_and_never_run(table, how, tmp_path, fails):
    path = served(runs(traces.FA2_16), **DECODE).export(tmp_path / "a.sqlite")
    endless = "WITH RECURSIVE t(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM t) SELECT * FROM t"
    with closing(sqlite3.connect(path)) as base:
        base.execute(f"DROP TABLE {table}")
        base.execute(f"CREATE {how.format(table, endless)}")
        base.commit()
    line = fails("diagnose", str(path))
    assert line.endswith(f"{path} must hold {table} as a table, it is a view")


@pytest.mark.parametrize(
    "query, words",
    [
        (f"DROP TABLE {KERNELS}", "has no kernels: capture with"),
        (
            "INSERT INTO StringIds SELECT id, value FROM StringIds",
            "StringIds must have each id once",
        ),
        ("DELETE FROM StringIds", "StringIds must have id 4, the name of a kernel"),
        (f"UPDATE {KERNELS} SET start = 'x'", "'x'"),
        (f"UPDATE {KERNELS} SET end = NULL", "None"),
        (f"UPDATE {KERNELS} SET gridX = 'x'", "'x'"),
        (f"UPDATE {KERNELS} SET demangledName = x'ff'", "x"),
        (f"DELETE FROM {KERNELS}", "has no kernel of a GPU"),
    ],
)
def test_a_fault_of_an_nsight_export_is_named(query, words, tmp_path, fails):
    path = served(runs(traces.FA2_16), **DECODE).export(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as base:
        base.execute(query)
        base.commit()
    line = fails("diagnose", str(path))
    assert str(path) in line
    assert words in line


@pytest.mark.parametrize(
    "gpu",
    [
        7,
        {"id": []},
        {"id": 0, "name": 7},
        {"id": 0, "numSms": "132"},
    ],
)
def test_a_gpu_without_a_right_name_or_count_of_sms_is_refused(gpu, tmp_path, fails):
    path = tmp_path / "a.json"
    events = served(runs(traces.FA2_16), **DECODE).events
    path.write_text(json.dumps({"deviceProperties": [gpu], "traceEvents": events}))
    assert str(path) in fails("diagnose", str(path))


@pytest.mark.parametrize("suffix", ["", ".jsonl"])
def test_a_file_without_end_is_refused(suffix, tmp_path, fails, monkeypatch):
    path = tmp_path / f"cases{suffix}"
    path.symlink_to("/dev/zero")
    line = fails("compare", *CASES, str(path))
    assert line.endswith(f"{path} must have at most 64 MiB, it has more")
    limited = tmp_path / "few"
    limited.write_bytes(b"x" * 9)
    monkeypatch.setattr(files, "MOST_BYTES", 9)
    monkeypatch.setattr(capture, "MOST_BYTES", 9)
    assert files.read_limited(limited) == b"x" * 9
    with pytest.raises(ValueError, match="must be a captured step"):
        capture.read(limited)


def test_an_event_without_end_is_refused(tmp_path, fails, monkeypatch):
    monkeypatch.setattr(trace_file, "CHUNK", 1000)
    monkeypatch.setattr(trace_file, "MOST_CHARACTERS", 20_000)
    writer = served(runs(traces.FA2_16), **DECODE)
    path = writer.save(tmp_path / "a.json")
    assert attnlib.diagnose(path).steps
    writer.events[7]["args"]["more"] = "x" * 60_000
    line = fails("diagnose", str(writer.save(path)))
    assert line.endswith(f"{path} ends within its events, after 7: is it whole?")


STEERING = "\x1b[2J\x1b]0;title\x07\x9b\r\u202eabc\u2066\ud800"


def test_what_steers_a_terminal_is_shown_and_not_sent():
    assert printable("a\tb\nc \u00e9 <>") == "a\tb\nc \u00e9 <>"
    assert printable("\x1b[2J") == r"\x1b[2J"
    shown = printable(STEERING)
    shown.encode()
    assert not CONTROL.search(shown)


def test_names_of_a_trace_do_not_steer_the_terminal(tmp_path, capsys):
    writer = served(runs(STEERING), runs(traces.FA2_16), **DECODE)
    gpu = {"id": 0, "name": STEERING, "numSms": 132}
    path = tmp_path / "a\x1b[2J.json"
    document = {**HEAD, "deviceProperties": [gpu], "traceEvents": writer.events}
    path.write_text(json.dumps(document))
    for more in (
        [],
        [str(path)],
        ["--json"],
        ["--shape", "heads=\x1b[2J"],
    ):
        status = cli.main(["diagnose", str(path), *more])
        out, err = capsys.readouterr()
        assert status == (cli.USAGE if "--shape" in more else 0)
        assert out + err and not CONTROL.search(out + err)
    assert not CONTROL.search(repr(attnlib.diagnose(path)))


@pytest.mark.parametrize("name", [r"f$\frac$", "a$x_1$b", "a$_0$_1"])
def test_a_dollar_in_a_name_is_no_formula(name, tmp_path):
    path = served(
        runs(name, 30.0),
        runs(traces.FA2_16),
        **DECODE,
    ).save(tmp_path / "a.json")
    more = served(
        runs(name, 60.0),
        runs(traces.FA2_16),
        **DECODE,
    ).save(tmp_path / f"{name}.json")
    figure = attnlib.diagnose(path, more).figure()
    figure.canvas.draw()
    attnlib.save(figure, tmp_path / "a.png")
    (axis,) = figure.axes
    texts = [*axis.texts, *axis.get_yticklabels(), axis.title]
    assert any("$" in text.get_text() for text in texts)
    assert not any(text.get_parse_math() for text in texts)


FILES = sorted(libraries.RULES_FOLDER.glob("*.yaml"))


def assert_one_line_that_names(path, error):
    (line,) = str(error).splitlines()
    assert line.startswith(f"{path.name}:"), line


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_mistake_in_a_file_of_rules_is_one_line_that_names_the_file(path, tmp_path):
    refused = 0
    for seed in range(25):
        for other in FILES:
            text = other.read_text()
            if other == path:
                text = mistaken(text, random.Random(seed))
            (tmp_path / other.name).write_text(text)
        try:
            libraries.load_libraries(tmp_path)
        except ValueError as error:
            refused += 1
            assert_one_line_that_names(path, error)
    assert refused > 12


@pytest.mark.slow
def test_a_mistake_in_the_file_of_claims_is_one_line_that_names_the_file(tmp_path):
    path = tmp_path / "claims.yaml"
    refused = 0
    for seed in range(100):
        path.write_text(mistaken(claims.CLAIMS.read_text(), random.Random(seed)))
        try:
            claims.load_claims(path)
        except ValueError as error:
            refused += 1
            assert_one_line_that_names(path, error)
    assert refused > 50


@pytest.mark.parametrize(
    "text, words",
    [
        ("library: toy\n  a: b\n", "toy.yaml:2: must be YAML: mapping values are not allowed"),
        ("library: toy\nlibrary: toy\n", "toy.yaml:2: a key must stand once, 'library' stands"),
        ("library: toy\n7: toy\n", "toy.yaml:2: a key must be text, got 7"),
        ("library: 7\n", "toy.yaml:1: library must be text, got 7"),
        ("- library\n", "toy.yaml: must hold mappings, got"),
        ("library: toy\nlimits:\n  - 7\n", "toy.yaml:1, limits, row 1: must be a mapping, got 7"),
        (
            "library: toy\nlimits:\n  - {why: w}\n  - {why: []}\n",
            "toy.yaml:3, limits, row 1: cannot must name a backend",
        ),
        (
            "library: toy\nlimits:\n  - {cannot: a, why: []}\n",
            "toy.yaml:3, limits, row 1: why must be text, got",
        ),
        ("library: \x00\n", "toy.yaml: must be YAML: unacceptable character|toy.yaml:1"),
    ],
)
def test_an_error_of_yaml_names_file_line_and_field(text, words, tmp_path):
    (tmp_path / "toy.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"^({words})"):
        libraries.load_libraries(tmp_path)
