"""A trace made by hand for every known pattern, and for none; files that are no trace."""

import gzip
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.traces import (
    ADD,
    CUDA_CORES,
    FA2_16,
    FA2_128,
    FA3,
    FLASH_ATTN_3,
    GEMM,
    HEAD,
    INDEX,
    MERGE,
    PREPARE,
    SCAN,
    XQA,
    Writer,
    graph_step,
    runs,
    to_sqlite,
)

import attnlib
from attnlib import cli
from attnlib.lab.patterns import PATTERNS

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


def served(attention, steps=STEPS, **how):
    """A trace of decode steps in CUDA graphs, all alike."""
    writer = Writer()
    for _ in range(steps):
        graph_step(writer, attention, **how)
    return writer


def both(*parts):
    return lambda writer, graph=0: [part(writer, graph) for part in parts]


def eager(attention):
    """Decode steps whose kernels are launched one by one."""
    writer = Writer()
    for _ in range(STEPS):
        for _ in range(4):
            writer.kernel(GEMM)
            attention(writer)
        writer.copy("DtoH", 4)
    return writer


FA2_SPLIT = both(runs(FA2_16, grid=(264, 1, 8)), runs(MERGE, 2.0))
OPS = [runs(name, 2.0) for name in (INDEX, ADD, SCAN, ADD)]
PLANNED = [lambda writer: writer.copy("DtoH", 68), lambda writer: writer.wait()]
BAD = {
    "fa3 of FlashInfer decodes": served(runs(FA3, 40.0), mark="step[DECODE bs=16]"),
    "FlashAttention-3's schedule is prepared in every layer": served(
        runs(FLASH_ATTN_3), prepare=True
    ),
    "metadata op by op": served(FA2_SPLIT, ahead=OPS),
    "fa2 splits no request": served(runs(FA2_16, 300.0, grid=(4, 1, 8))),
    "tiles of 128 rows for a few queries": served(
        both(runs(FA2_128, grid=(64, 1, 8)), runs(MERGE, 2.0)), mark="step[TARGET_VERIFY bs=32]"
    ),
    "CUDA cores decode large groups": served(runs(CUDA_CORES, grid=(16, 8, 1), block=(16, 4, 2))),
    "XQA on Hopper": served(runs(XQA)),
    "lengths are copied to the host in every step": served(
        FA2_SPLIT, ahead=PLANNED, mark="execute_context_0(0)_generation_16(16)"
    ),
    "attention outside the CUDA graph": eager(FA2_SPLIT),
}
GOOD = Writer()
for _ in range(STEPS):
    graph_step(GOOD, runs(FLASH_ATTN_3), ahead=[runs(PREPARE, 2.0)], mark="step[DECODE bs=16]")
    GOOD.copy("DtoH", 68)  # of sampled tokens, which the host waits for
    GOOD.wait()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.pt.trace.json.gz"


def names(found):
    return [pattern.name for pattern, _ in found.found]


def test_every_known_pattern_has_a_trace_here_and_a_notebook():
    assert [pattern.name for pattern in PATTERNS] == list(BAD)
    books = [ROOT / "notebooks" / f"{pattern.notebook}.ipynb" for pattern in PATTERNS]
    assert [book.name for book in books if not book.exists()] == []


@pytest.mark.parametrize("name", BAD)
def test_a_pattern_is_found_where_it_shows_and_nowhere_else(name, path, tmp_path):
    found = attnlib.diagnose(BAD[name].save(path))
    assert names(found) == [name]
    assert len(found.steps) == STEPS and {step.kind for step in found.steps} <= {"decode", "verify"}
    row = found.patterns().iloc[0]
    assert row["us a step"] > 0 and row.since and row["by the records"]
    exported = attnlib.diagnose(to_sqlite(BAD[name], tmp_path / "server.sqlite"))
    assert names(exported) == [name]
    assert exported.table().equals(found.table())


def test_a_trace_without_any_says_so_and_what_it_could_not_see(path):
    found = attnlib.diagnose(GOOD.save(path))
    told = repr(found)
    assert names(found) == [] and "no known pattern" in told
    assert "The lengths of the requests are in no trace." in told
    assert "<table" in found._repr_html_()


def test_steps_layers_and_what_comes_before_them_are_counted(path):
    found = attnlib.diagnose(BAD["metadata op by op"].save(path))
    step = found.steps[1]
    assert [span.name for span in step.ahead][:3] == [
        "_sample_kernel",
        "Memcpy DtoH",
        "index_elementwise_kernel",
    ]
    table = found.table().set_index("kernel")
    fa2 = table.loc["BatchPrefillWithPagedKVCacheKernel"]
    assert (fa2["a step"], fa2["a layer"], fa2["us a step"], fa2["of"]) == (4, 1, 40, "FlashInfer")
    assert found.patterns().iloc[0]["us a step"] == 11.0  # four kernels of 2 us, three gaps of 1


def test_prefill_is_told_from_decode_by_the_mark_and_without_one_by_the_kernel(path):
    writer = Writer()
    begin = writer.clock - 0.6
    writer.kernel(FLASH_ATTN_3)
    writer.mark("step[EXTEND bs=2 toks=300]", begin)
    graph_step(writer, runs(FLASH_ATTN_3), mark="step[DECODE bs=2]")
    found = attnlib.diagnose(writer.save(path))
    assert [(step.kind, step.batch_size) for step in found.steps] == [("prefill", 2), ("decode", 2)]
    writer = Writer()
    for _ in range(3):
        for _ in range(4):
            writer.kernel(GEMM)
            writer.kernel(FA2_128)
        writer.copy("DtoH")
    found = attnlib.diagnose(writer.save(path))
    assert [step.kind for step in found.steps] == ["prefill"] * 3
    assert "No decode step" in repr(found)


def test_gains_are_of_the_records_nearest_to_the_shape_that_is_known(published_records, path):
    writer = BAD["fa3 of FlashInfer decodes"]
    told = attnlib.diagnose(writer.save(path)).patterns().iloc[0]
    assert "nearest to it: batch_size 16" in told["by the records"]
    assert "the trace does not tell heads" in told["by the records"]
    assert told.since.startswith("auto of FlashInfer 0.6.0 to 0.6.3; with FP8 queries still in 0.7")
    shaped = attnlib.diagnose(path, heads="32/8", kv_len=9000).patterns().iloc[0]["by the records"]
    assert "heads 32/8" in shaped and "kv_len 8192" in shaped
    with pytest.raises(ValueError, match="shape must be told by heads, .* got 'head'"):
        attnlib.diagnose(path, head=1)


def test_a_trace_without_attention_that_is_known_names_what_ran_most(path):
    writer = Writer()
    for _ in range(3):
        writer.kernel(GEMM)
    told = repr(attnlib.diagnose(writer.save(path)))
    assert "0 steps" in told and f"3 {GEMM}" in told


def broken(tmp_path):
    whole = json.dumps({"traceEvents": GOOD.events}).encode()
    yield "cut.json", whole[:-3000], "ends within its events, after"
    yield "cut.json.gz", gzip.compress(whole)[:-300], "must be a whole gzip file"
    yield "notes.txt", b"nothing of the kind", "must be a Chrome trace of torch.profiler"
    yield "empty.json", b"", "must be a Chrome trace"
    yield "other.json", b'{"a": 1}', "must be a Chrome trace"
    yield "cpu.json", json.dumps({"traceEvents": [{"ph": "M"}]}).encode(), "has no kernel of a GPU"
    yield "report.nsys-rep", b"NVIDIA", "must be exported first: nsys export"
    yield "cut.sqlite", b"SQLite format 3\0" + b"\0" * 50, "must be a whole export"


def test_what_is_no_whole_trace_of_a_gpu_is_one_line(tmp_path, fails):
    for name, data, words in broken(tmp_path):
        (tmp_path / name).write_bytes(data)
        assert words in fails("diagnose", str(tmp_path / name))
    assert "No such file" in fails("diagnose", str(tmp_path / "missing.json"))
    for table, words in (
        ("T", "capture with --trace cuda"),
        ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "=node"),
    ):
        at = tmp_path / f"{table}.sqlite"
        with sqlite3.connect(at) as database:
            database.execute(f"CREATE TABLE {table} (start)")
        assert words in fails("diagnose", str(at))


def test_the_command_prints_the_card(path, capsys):
    BAD["XQA on Hopper"].save(path)
    assert cli.main(["diagnose", str(path), "--shape", "heads=32/8,kv_len=8192"]) == 0
    told = capsys.readouterr().out
    assert "1 known pattern" in told and "heads 32/8" in told


def lengthened(writer, path, size):
    """`writer`'s trace over and over until the file has `size` bytes; returns how often."""
    count = 0
    with path.open("w") as file:
        file.write(json.dumps({**HEAD, "traceEvents": []})[:-2])
        while file.tell() < size:
            for event in writer.events:
                args = dict(event["args"])
                if "correlation" in args:
                    args["correlation"] += count * writer.correlation
                later = {**event, "ts": event["ts"] + count * writer.clock, "args": args}
                file.write((", " if file.tell() > 200 else "") + json.dumps(later))
            count += 1
        file.write("]}")
    return count


def test_a_long_trace_is_read_as_a_stream(tmp_path):
    """By default 8 MiB; with ATTNLIB_TRACE_MIB=200 and -s it says how long that takes."""
    writer, path = Writer(), tmp_path / "long.json"
    for _ in range(50):
        graph_step(writer, FA2_SPLIT, layers=32, ahead=OPS, mark="step[DECODE bs=16]")
    count = lengthened(writer, path, int(os.environ.get("ATTNLIB_TRACE_MIB", "8")) * 2**20)
    code = "import resource, sys, attnlib; print(len(attnlib.diagnose(sys.argv[1]).steps), "
    code += "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    steps, kib = map(int, run.stdout.split())
    print(
        f"{path.stat().st_size / 2**20:.0f} MiB: {seconds:.1f} s, {kib / 2**10:.0f} MiB of memory"
    )
    assert steps == 50 * count
    assert kib <= 2**20
